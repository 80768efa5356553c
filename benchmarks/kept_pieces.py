"""The pieces of a long benchmark, kept as they are measured, so that an interrupted run goes on.

    with KeptPieces(Path("bans.jsonl"), total=60, stop_after_s=420) as pieces:
        row = pieces.get("sign_flip/0", lambda: measured("sign_flip", seed=0))

A line of the file is one piece. Whoever changes what a piece measures gives it another name, or begins another file.
"""

import json
import os
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any

import click


class KeptPieces:
    """Pieces by name, each measured once."""

    def __init__(self, path: Path | None, *, total: int, stop_after_s: float | None = None) -> None:
        """`path` None keeps nothing. After `stop_after_s` no new piece is begun: `get` ends the command with a word on
        how to go on."""
        self._path, self._total, self._stop_after_s = path, total, stop_after_s
        self._found: dict[str, Any] = {}
        self._file: TextIOWrapper | None = None
        self._begun = time.monotonic()
        self._measured, self._asked = 0, 0

    def __enter__(self) -> "KeptPieces":
        if self._path is not None:
            if self._path.exists():
                for line in self._path.read_text().splitlines():
                    piece = json.loads(line)
                    self._found[piece["piece"]] = piece["value"]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` gave under this name, now or in an earlier run; as JSON has it."""
        self._asked += 1
        if name in self._found:
            return self._found[name]
        spent_s = time.monotonic() - self._begun
        if self._stop_after_s is not None and spent_s > self._stop_after_s:
            click.echo(f"{self._asked - 1} of {self._total} pieces are there; the same command goes on", err=True)
            raise SystemExit(75)  # EX_TEMPFAIL: try again
        value = json.loads(json.dumps(measure()))
        self._measured += 1
        self._found[name] = value
        if self._file is not None:
            self._file.write(json.dumps({"piece": name, "value": value}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        each_s = (time.monotonic() - self._begun) / self._measured
        left_s = each_s * max(0, self._total - self._asked)
        click.echo(f"{self._asked} of {self._total}: {name}; about {left_s:.0f} s left", err=True)
        return value
