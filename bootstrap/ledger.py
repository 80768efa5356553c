"""This is where the host's memory is on disk: an append-only log of events in SQLite, the rest is rebuilt from."""

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm.core.canonical import Value, pack, unpack

MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Event:
    """One thing that happened. `facts` is canonical; signed objects in it carry their signatures."""

    number: int
    at: float
    kind: str
    facts: Value


class Ledger:
    """Events in order. Each is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS events "
            "(number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, facts BLOB NOT NULL)"
        )

    def append(self, kind: str, facts: Value) -> None:
        self._database.execute(
            "INSERT INTO events (at, kind, facts) VALUES (?, ?, ?)", (time.time(), kind, pack(facts))
        )

    def events(self, *kinds: str) -> Iterator[Event]:
        """Events of these kinds (of all, if none is named), oldest first."""
        for number, at, kind, facts in self._database.execute(
            "SELECT number, at, kind, facts FROM events ORDER BY number"
        ):
            if not kinds or kind in kinds:
                yield Event(number, at, kind, unpack(facts, max_bytes=MAX_EVENT_BYTES))

    def close(self) -> None:
        self._database.close()
