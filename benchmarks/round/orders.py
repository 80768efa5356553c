"""Programs that a benchmark starts and has do things at the same time, each with a deadline.

A program reads orders from its standard input, a JSON object a line, and answers each with one. It ends when its
standard input does, however the benchmark ends.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

END_S = 8.0
"""A program that is told to end has this long before it and what it forked are killed."""

Fields = dict[str, Any]


class OrderFailed(Exception):
    """A program refused an order, in its own words, broke, or was late."""


class Program:
    """One program, in a session of its own with whatever it forks."""

    def __init__(self, arguments: Sequence[str], log_path: Path, environment: dict[str, str]) -> None:
        self._log_path = log_path
        self._answers: queue.Queue[Fields | None] = queue.Queue()
        with log_path.open("w") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def order(self, what: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"order": what, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise OrderFailed(f"{what}: {self._last_words()}") from error

    def answer(self, what: str, *, until: float) -> Fields:
        """Raises OrderFailed if it does not come by `until` (monotonic) or is an error."""
        try:
            answer = self._answers.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            raise OrderFailed(f"{what}: no answer in time") from None
        if answer is None:
            raise OrderFailed(f"{what}: {self._last_words()}")
        if "error" in answer:
            raise OrderFailed(str(answer["error"]))
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Close its standard input, upon which it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for it to end; kill its session if it does not, and what is left of it in any case."""
        self.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"the program ended: {' / '.join(lines[-3:])}"[-500:]


def together(programs: Sequence[Program], what: str, *, timeout_s: float, **fields: Any) -> list[Fields]:
    """The answers of all programs to one order, given to all before the first answer is waited for."""
    until = time.monotonic() + timeout_s
    for program in programs:
        program.order(what, **fields)
    answers: list[Fields] = []
    failure = None
    for program in programs:
        try:
            answers.append(program.answer(what, until=until))
        except OrderFailed as error:  # hear the others out: their next answer is to their next order
            failure = failure or error
    if failure is not None:
        raise failure
    return answers


def next_order() -> Fields | None:
    """In a program: what is to be done next; None when it is to end."""
    line = sys.stdin.readline()
    order: Fields | None = json.loads(line) if line else None
    return order


def answer(fields: Fields) -> None:
    """In a program: the answer to the last order."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def obey(do: Callable[[Fields], Fields]) -> None:
    """In a program: carry orders out until there are no more; an exception is the answer to its order."""
    while (order := next_order()) is not None:
        try:
            fields = do(order)
        except Exception as error:  # noqa: BLE001 - it is the answer
            fields = {"error": f"{type(error).__name__}: {error}"[:500]}
        answer(fields)


def end_session() -> None:
    """In a program, last: kill what is left of its session, itself included."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
