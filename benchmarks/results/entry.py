"""A figure's words, the commands that give it, how it is read out of their answers, and what code it is of."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.core.errors import LocalError

Figures = Mapping[str, float]
Read = Callable[[Sequence[str]], Figures]
"""From what the commands answered, in their order. Raises `NotAsStatedError` where the words would be wrong."""

DAEMON = ("peer.program.daemon", "peer.program.command")
HOST = ("bootstrap.program.host", "bootstrap.program.command")
SWARM = (*DAEMON, *HOST)
"""What runs where `swarm host` and `swarm join` are started as programs: no import shows it."""

ANSWER = "answer.json"


class NotAsStatedError(LocalError):
    """What was measured is not what the row says in words."""


@dataclass(frozen=True)
class Command:
    """A command as README shows it."""

    line: str
    to_read: str = "--json"
    """Options with which it answers in a form that is read; one that writes `ANSWER` is read there."""


@dataclass(frozen=True)
class Row:
    """A line of README's table; figures stand in braces."""

    what: str
    says: str
    shown: str | None = None
    """In place of the commands, where one stands for several."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is measured together."""

    name: str
    commands: tuple[Command, ...]
    read: Read
    measures: tuple[str, ...]
    """Modules whose change, or that of anything they import, makes the figures old."""
    minutes: float
    """That the commands take on two quiet cores, until they are measured."""
    rows: tuple[Row, ...]
    """What is told of it: one command's figures may be several lines."""

    @property
    def lines_given(self) -> tuple[str, ...]:
        """The commands, as README shows them."""
        return tuple(command.line for command in self.commands)


def must(holds: object, words: str) -> None:
    """Raise `NotAsStatedError` unless the words hold."""
    if not holds:
        raise NotAsStatedError(f"not as stated: {words}")


def object_of(answer: str) -> Any:
    """The JSON that a command answered, alone in its output or after lines of progress."""
    start = re.search(r"^[{\[]", answer, re.MULTILINE)
    if start is None:
        raise NotAsStatedError(f"no JSON in what the command said: {answer[-500:]!r}")
    return json.loads(answer[start.start() :])


def passed(answers: Sequence[str]) -> Figures:
    """Of tests: how many there were. That they passed is their exit code's word."""
    found = re.search(r"(\d+) passed", answers[-1])
    if found is None:
        raise NotAsStatedError(f"no test passed: {answers[-1][-500:]!r}")
    return {"passed": int(found[1])}
