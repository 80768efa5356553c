"""A process that feeds one tracker from the host's ledger, which is its queue: nothing is dropped, nobody waits for it.

`python -m bootstrap.tracking.feeding`, with its `Job` as JSON on a line of standard input. It goes on until its input
ends, and writes what is left then. It says, as JSON strings on lines, that all is given, or why it ends by itself.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.program.ledger import Ledger
from bootstrap.tracking.places import TrackerPlace
from bootstrap.tracking.rows import KINDS, Rows
from bootstrap.tracking.tracker import TrackedRun, Tracker

LOOK_S = 1.0
"""Between two looks at the ledger."""
ALL_GIVEN = "all given"
MAX_REASON = 400
"""Letters; some trackers explain at length."""
AT_MOST = 256
"""Events in memory at once. A look at the ledger is short: while one lasts, its log cannot be folded in."""
LAST_ROWS_S = 10.0
"""For what is left when the host has ended; then this process ends however far it is."""


@dataclass(frozen=True)
class Job:
    """What is to be fed, from what."""

    place: TrackerPlace
    ledger: Path
    run: TrackedRun

    def to_line(self) -> str:
        run = self.run
        told = {"track": str(self.place), "ledger": str(self.ledger), "run_id": run.run_id, "name": run.name}
        return json.dumps({**told, "settings": run.settings, "folder": str(run.folder)})

    @classmethod
    def from_line(cls, line: str) -> "Job":
        told: Mapping[str, Any] = json.loads(line)
        run = TrackedRun(
            run_id=told["run_id"], name=told["name"], settings=told["settings"], folder=Path(told["folder"])
        )
        return cls(TrackerPlace.of(told["track"]), Path(told["ledger"]), run)


def feed(ledger: Ledger, tracker: Tracker, ended: threading.Event, all_given: Callable[[], None]) -> None:
    """Until `ended`, and then what is left; `all_given` is called once the tracker has all that there was.

    Raises what the tracker raises.
    """
    rows, after = Rows(), 0
    while True:
        was_ended = ended.is_set()
        while events := list(itertools.islice(ledger.events(after=after), AT_MOST)):
            after = events[-1].number
            for event in events:
                row = rows.take(event) if event.kind in KINDS else None
                if row is not None:
                    tracker.write(row)
        tracker.flush()
        all_given()
        if was_ended:
            tracker.close()
            return
        ended.wait(LOOK_S)


def main() -> None:
    """Feeds until the host closes the pipe, also by being killed, or the tracker fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's, who then closes the pipe
    said = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # trackers chat
    told: list[str] = []

    def tell(text: str) -> None:
        if text not in told:
            told.append(text)
            with contextlib.suppress(OSError):  # the host is gone, and its end of the pipe with it
                os.write(said, json.dumps(text).encode() + b"\n")

    job = Job.from_line(sys.stdin.readline())
    ended, finished = threading.Event(), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()
        if not finished.wait(LAST_ROWS_S):
            os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        feed(Ledger(job.ledger), job.place.open(job.run), ended, lambda: tell(ALL_GIVEN))
    except Exception as error:  # noqa: BLE001 - each tracker has errors of its own: whatever comes is its
        tell(f"{type(error).__name__}: {error}"[:MAX_REASON])
    os._exit(0)  # what a tracker leaves to the interpreter's end may wait for its server


if __name__ == "__main__":
    main()
