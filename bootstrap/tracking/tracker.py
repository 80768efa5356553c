"""What a tracker is to the host: something that takes rows of figures, and knows which of them it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """By what a tracker knows a run, whichever process of its host feeds it."""

    run_id: str
    name: str
    settings: Mapping[str, Any]
    """The run's settings as JSON has them."""
    folder: Path
    """The run's: a tracker's own files may lie below it."""

    @property
    def short_id(self) -> str:
        """Twelve letters, as everywhere that people read them."""
        return self.run_id[:12]


@dataclass(frozen=True)
class Row:
    """What one event of the ledger says of one step."""

    event: int
    """Its number in the ledger: of two rows the later has the higher."""
    at: float
    """When it was written down, seconds since 1970."""
    step: int
    figures: Mapping[str, float]
    """By the name of their series. No two rows of one step have the same, but where the host has measured again."""


class Tracker(Protocol):
    """One run at one tracker. What it raises is its own; it is closed then, and opened anew."""

    def write(self, row: Row) -> None:
        """Keep the row. Of what an earlier process of this host has written nothing is written again."""

    def flush(self) -> None:
        """Have what was written survive this process, as far as the tracker can."""

    def close(self) -> None:
        """The end, for this process."""
