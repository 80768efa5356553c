"""This is where a peer computes at a fixed rate, whatever the machine: `swarm join`, and each pass takes its time.

    python -m benchmarks.paced_peer FORWARD_S ADDRESS [options of `swarm join`]

A forward pass of a microbatch through the stage takes FORWARD_S, a backward pass twice that, audits' passes as well:
the thread sleeps for what the (tiny) layers leave of it. Messages, rounds and state are real. With - for FORWARD_S it
says that it is ready once all is imported, and joins when its input tells FORWARD_S.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def paced(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ends_at = time.monotonic() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return result

    return wrapper


def _when_ready() -> str:
    for name in ("peer.life", "peer.daemon", "swarm.network.p2p", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    print("ready", flush=True)
    told = sys.stdin.readline()
    os.dup2(2, 1)  # nobody reads on
    return told or sys.exit("nobody told this peer to join")


def main() -> None:
    told, arguments = sys.argv[1], sys.argv[2:]
    from peer.limits import apply_thread_limit

    apply_thread_limit(1)
    from swarm.model.stage import StageModel

    if told == "-":
        told = _when_ready()
    forward_s = float(told)
    passes = {"forward": forward_s, "loss": forward_s, "backward": 2 * forward_s, "loss_backward": 2 * forward_s}
    for name, seconds in passes.items():
        setattr(StageModel, name, paced(getattr(StageModel, name), seconds))
    from peer.command import command

    command([*arguments, "--threads", "1"], standalone_mode=False)


if __name__ == "__main__":
    main()
