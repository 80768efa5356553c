"""This is where the host's memory is on disk: an append-only log of events in SQLite, the rest is rebuilt from.

The database itself refuses to change or to remove an event, or to take one twice that happens once.
"""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import LocalError

log = logging.getLogger(__name__)

MAX_EVENT_BYTES = 16 << 20
BUSY_S = 5.0
"""`swarm ticket` writes to the same file as the host."""
WAIT_FOR_ROOM_S, LOOK_FOR_ROOM_S = 600.0, 1.0

_TABLE = """
CREATE TABLE IF NOT EXISTS events
    (number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, once TEXT UNIQUE, facts BLOB NOT NULL);
CREATE TRIGGER IF NOT EXISTS never_changed BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'an event is never changed'); END;
CREATE TRIGGER IF NOT EXISTS never_removed BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'an event is never removed'); END;
"""


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
        """Raises LocalError if the file is no ledger or cannot be written."""
        self._path = path
        self._waits = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise LocalError(f"the ledger {path} cannot be used: {error}; restore it from a copy") from error

    def append(self, kind: str, facts: Value, *, once: str | None = None) -> bool:
        """Write down what happened; False, and nothing is written, if what is called `once` has happened already.

        While the disk is full this waits, and the host with it, which must not go on from what it has not written
        down: the swarm does without it. Raises LocalError if the disk does not take it.
        """
        give_up_at = time.monotonic() + WAIT_FOR_ROOM_S
        while True:
            try:
                done = self._database.execute(
                    "INSERT INTO events (at, kind, once, facts) VALUES (?, ?, ?, ?) ON CONFLICT (once) DO NOTHING",
                    (time.time(), kind, once, pack(facts)),
                )
                self._waits = False
                return done.rowcount == 1
            except sqlite3.Error as error:
                may_wait = _is_full(error) and not self._database.in_transaction
                if not may_wait or time.monotonic() > give_up_at:
                    why = f"{error}; look at the disk's free space"
                    raise LocalError(f"the ledger does not take a {kind}: {why}") from error
                if not self._waits:
                    log.error("the disk of %s is full: this host stands still until there is room on it", self._path)
                self._waits = True
                time.sleep(LOOK_FOR_ROOM_S)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is appended within is on disk all of it, or none."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

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
