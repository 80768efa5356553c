"""Benchmarks that run programs beside themselves."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

STOP_S = 10.0
LAST_LINES = 8


def end_when_told() -> None:
    """On SIGTERM leave by way of everything that is open, so that the programs end too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def told_afterwards() -> Iterator[None]:
    """SIGTERM counts when this is over: a program that has just begun would else be nobody's to end."""
    if threading.current_thread() is not threading.main_thread():  # others are not interrupted
        yield
        return
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if told:
            signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Program:
    """One that a benchmark has begun, and that is not to end before it."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    """What it says on its standard error."""

    def check(self) -> None:
        """Raises ClickException, with its last words, if it has ended."""
        code = self.process.poll()
        if code is not None:
            said = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise click.ClickException("\n".join([f"{self.name} has ended with exit code {code}:", *said]))


class Talking:
    """A program that is told things on its input and answers on its output, a line of JSON each."""

    def __init__(self, process: subprocess.Popen[str], what: str) -> None:
        self._process = process
        self._what = what

    def tell(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line; it ends by itself when it is stuck."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self._what} ended with exit code {self._process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextmanager
def talking(command: Sequence[str], what: str) -> Iterator[Talking]:
    """It ends when its input does, or is killed."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Talking(process, what)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
