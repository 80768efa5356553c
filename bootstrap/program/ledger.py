"""The host's memory on disk: an append-only log of events in SQLite, which the rest is rebuilt from.

The database itself refuses to change or to remove an event, or to take one twice that happens once.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import LocalError
from swarm.disk.room import full_disk

MAX_EVENT_BYTES = 16 << 20
BUSY_S = 5.0
"""Somebody may be copying the file."""

_TABLE = """
CREATE TABLE IF NOT EXISTS events
    (number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, once TEXT UNIQUE, facts BLOB NOT NULL);
CREATE TRIGGER IF NOT EXISTS never_changed BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'an event is never changed'); END;
CREATE TRIGGER IF NOT EXISTS never_removed BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'an event is never removed'); END;
"""
_APPEND = "INSERT INTO events (at, kind, once, facts) VALUES (?, ?, ?, ?) ON CONFLICT (once) DO NOTHING"


@dataclass(frozen=True)
class Event:
    """One thing that happened. `facts` is canonical; signed objects in it carry their signatures."""

    number: int
    at: float
    kind: str
    facts: Value


class Ledger:
    """Events in order. Each is on disk when `append` returns.

    Once the disk has not taken an event, nothing is written here any more, also when there is room again: what its
    owner holds in memory is ahead of the disk. It is to begin again from what a new Ledger reads.
    """

    def __init__(self, path: Path, on_full: Callable[[], None] | None = None) -> None:
        """`on_full` is called when the disk has not taken an event.

        Raises LocalError if the file is no ledger or cannot be written, DiskFullError if there is no room for it.
        """
        self._path = path
        self._was_full = False
        self._on_full = on_full
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_TABLE)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and _is_full(error):
                raise full_disk(self._path) from error
            raise LocalError(f"the ledger {path} cannot be used: {error}; restore it from a copy") from error

    def append(self, kind: str, facts: Value, *, once: str | None = None) -> bool:
        """Write down what happened; False, and nothing is written, if what is called `once` has happened already.

        Raises DiskFullError if there is no room for it, LocalError if the disk fails otherwise.
        """
        row = time.time(), kind, once, pack(facts)
        return self._write(f"a {kind}", _APPEND, row).rowcount == 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is appended within is on disk all of it, or none. Raises as `append` does."""
        self._write("events", "BEGIN IMMEDIATE")
        try:
            yield
            self._write("events", "COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _write(self, what: str, statement: str, row: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if self._was_full:
            raise full_disk(self._path)
        try:
            return self._database.execute(statement, row)
        except sqlite3.Error as error:
            if not _is_full(error):
                raise LocalError(f"the ledger {self._path} does not take {what}: {error}") from error
            self._was_full = True
            if self._on_full is not None:
                self._on_full()
            raise full_disk(self._path) from error

    def events(self, *kinds: str, after: int = 0) -> Iterator[Event]:
        """Events of these kinds (of all, if none is named) with a higher number than `after`, oldest first."""
        for number, at, kind, facts in self._database.execute(
            "SELECT number, at, kind, facts FROM events WHERE number > ? ORDER BY number", (after,)
        ):
            if not kinds or kind in kinds:
                yield Event(number, at, kind, unpack(facts, max_bytes=MAX_EVENT_BYTES))

    def close(self) -> None:
        self._database.close()


def _is_full(error: sqlite3.Error) -> bool:
    """Whether there is no room for the events, or for what SQLite writes beside them."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says what it was about
    return primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
