"""This is where a peer computes at a fixed rate, whatever the machine: `swarm join`, and each pass takes its time.

    python -m benchmarks.paced_peer FORWARD_S ADDRESS [options of `swarm join`]

A forward pass of a microbatch through the stage takes FORWARD_S, a backward pass twice that, audits' passes as well:
the thread sleeps for what the (tiny) layers leave of it. Messages, rounds and state are real.
"""

import functools
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


def main() -> None:
    forward_s, arguments = float(sys.argv[1]), sys.argv[2:]
    from peer.limits import apply_thread_limit

    apply_thread_limit(1)
    from swarm.model.stage import StageModel

    passes = {"forward": forward_s, "loss": forward_s, "backward": 2 * forward_s, "loss_backward": 2 * forward_s}
    for name, seconds in passes.items():
        setattr(StageModel, name, paced(getattr(StageModel, name), seconds))
    from peer.command import command

    command([*arguments, "--threads", "1"], standalone_mode=False)


if __name__ == "__main__":
    main()
