"""A peer whose windows take the time they would on a volunteer's machine: `swarm join`, and each pass takes its time.

    python -m benchmarks.windows.paced_peer MICROBATCH_S RECORD ADDRESS [options of `swarm join`]

A microbatch's loss takes a third of MICROBATCH_S and its backward pass the rest: the layers' own arithmetic is done, on
few tokens, and the thread sleeps for what that leaves. What AdamW takes after an inner step comes out of the next
pass's sleep. There is one device: an audit's replay takes its time too, and no other pass goes on meanwhile. The host's
evaluations are not held up. Messages, encoding, rounds, audits and state are real. Each pass of training or of a replay
is a line of RECORD: `{"began", "ended", "cpu_s", "of", "thread"}`, seconds since the epoch and CPU seconds of this
process by then.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from swarm.local.compute_pools import bound_pools


class Device:
    """What passes take turns on."""

    def __init__(self, record: TextIO) -> None:
        self._record = record
        self._turn = threading.Lock()
        self._owed_s = 0.0
        """By which the next pass is shorter: its thread has spent them on optimizer steps."""

    def paced(self, function: Callable[..., Any], seconds: float, *, of: str) -> Callable[..., Any]:
        """The function, which then takes so long in all."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("keep") is False:  # an evaluation
                return function(*args, **kwargs)
            with self._turn:
                began, begun_at = time.time(), time.monotonic()
                result = function(*args, **kwargs)
                spare_s = begun_at + seconds - time.monotonic()
                paid_s = min(self._owed_s, max(0.0, spare_s))
                self._owed_s -= paid_s
                time.sleep(max(0.0, spare_s - paid_s))
                line = {"began": began, "ended": time.time(), "cpu_s": time.process_time(), "of": of}
                self._record.write(json.dumps({**line, "thread": threading.current_thread().name}) + "\n")
                self._record.flush()
            return result

        return wrapper

    def owing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time comes out of the next pass."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._owed_s += time.monotonic() - began

        return wrapper


def main() -> None:
    bound_pools(1)
    microbatch_s, path, options = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    from peer.program.command import command
    from swarm.model.stage import StageModel
    from swarm.optim.local_window import LocalWindow

    with open(path, "a") as record:
        device = Device(record)
        for name, share in (("loss", 1 / 3), ("loss_backward", 2 / 3)):
            setattr(StageModel, name, device.paced(getattr(StageModel, name), share * microbatch_s, of=name))
        LocalWindow.take = device.owing(LocalWindow.take)  # type: ignore[method-assign]
        command([*options, "--threads", "1"], standalone_mode=False)


if __name__ == "__main__":
    main()
