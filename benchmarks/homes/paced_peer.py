"""A peer that computes at a fixed rate, whatever the machine: `swarm join`, and each pass takes its time.

    python -m benchmarks.homes.paced_peer FORWARD_S ADDRESS [options of `swarm join`]
    python -m benchmarks.homes.paced_peer --nursery

A forward pass of a microbatch through the stage takes FORWARD_S, a backward pass twice that, audits' passes as well:
the thread sleeps for what the (tiny) layers leave of it. Messages, rounds and state are real. A nursery has everything
imported, which takes seconds of a core, and forks peers: a line in, `{"arguments": [FORWARD_S, ADDRESS, ...], "log":
PATH}`, a process id out for each. They end with its input.
"""

import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from swarm.local.compute_pools import bound_pools


def paced(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ends_at = time.monotonic() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return result

    return wrapper


def join(arguments: Sequence[str]) -> None:
    forward_s, options = float(arguments[0]), arguments[1:]
    from swarm.model.stage import StageModel

    passes = {"forward": forward_s, "loss": forward_s, "backward": 2 * forward_s, "loss_backward": 2 * forward_s}
    for name, seconds in passes.items():
        setattr(StageModel, name, paced(getattr(StageModel, name), seconds))
    from peer.program.command import command

    command([*options, "--threads", "1"], standalone_mode=False)


def nursery() -> None:
    import peer.program.daemon
    import peer.program.life
    import swarm.network.p2pd.p2p
    from swarm.local.transformers_library import transformers

    # All that a peer imports when it needs it.
    assert all((transformers.LlamaModel, peer.program.daemon, peer.program.life, swarm.network.p2pd.p2p))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    forked = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(order["arguments"], order["log"])
        forked.append(pid)
        print(pid, flush=True)
    for pid in forked:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(0)  # what was imported has nothing to tidy up


def _child(arguments: Sequence[str], log_path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        join(arguments)
    except BaseException:  # noqa: BLE001 - the traceback belongs in the log, whatever it is
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    bound_pools(1)
    if sys.argv[1:] == ["--nursery"]:
        nursery()
    else:
        join(sys.argv[1:])


if __name__ == "__main__":
    main()
