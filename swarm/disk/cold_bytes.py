"""Bytes that are seldom read again, on disk and mapped: the system takes their memory when it needs it.

They are read in this process alone, and for as long as somebody holds them: a file goes with the last of its bytes.
"""

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from swarm.disk.placed_bytes import write_at
from swarm.disk.room import disk_room

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
"""What is put begins at a multiple of this: whoever reads numbers there need not copy them."""
MAPPED_AT_ONCE_BYTES = 256 << 20
"""Of a file; what is not written yet is a hole, and takes no disk."""
_BEGUN: set[tuple[Path, str]] = set()
"""Where this process has removed what an earlier one left."""


class ColdBytes:
    """A row of files, of which the last one is written to. Methods are for any thread."""

    def __init__(self, folder: Path | None, label: str) -> None:
        """`label`: what the files' names begin with; nothing of an earlier process stays. `folder` None: in memory."""
        self._folder = folder
        self._label = label
        self._number = 0
        self._lock = threading.Lock()
        self._file: _File | None = None
        self._is_full = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder, label) not in _BEGUN:  # else they are this process's own, and somebody may read in them
                _BEGUN.add((folder, label))
                for left in folder.glob(f"{label}-*"):
                    left.unlink(missing_ok=True)

    def put(self, body: memoryview) -> memoryview:
        """The same bytes, on disk, read-only; itself where the disk does not take them."""
        if self._folder is None or not len(body):
            return body
        try:
            found = self._on_disk(self._folder, [body])
        except OSError as error:
            if not self._is_full:
                log.warning("%s: bytes that are seldom read stay in memory: %s", self._folder, error)
            self._is_full = True
            return body
        self._is_full = False
        return found

    def put_all(self, bodies: Sequence[bytes | bytearray | memoryview]) -> memoryview:
        """Their bytes end to end, on disk and nowhere else: a whole state, or what comes of one, fills any memory.

        Raises DiskFullError where the disk took no more, LocalError where it failed otherwise.
        """
        if self._folder is None or not bodies:
            return memoryview(b"".join(bodies))
        with disk_room(self._folder):
            return self._on_disk(self._folder, [memoryview(body) for body in bodies])

    def _on_disk(self, folder: Path, bodies: Sequence[memoryview]) -> memoryview:
        """Raises OSError."""
        with self._lock:
            if self._file is None:
                self._file = self._next_file(folder)
            place = self._file.room_for(sum(map(len, bodies)))
        place.write(bodies)
        return place.read()

    def begin_anew(self) -> None:
        """What is put from now on is in another file: the one before can go when nobody reads in it any more."""
        with self._lock:
            self._file = None

    def _next_file(self, folder: Path) -> "_File":
        while True:
            path = folder / f"{self._label}-{self._number:08d}"
            self._number += 1
            with contextlib.suppress(FileExistsError):
                return _File(path)


class _Place:
    """Room in a file, mapped."""

    def __init__(self, file: "_File", mapping: mmap.mmap, start: int, mapped_from: int, size: int) -> None:
        self._file = file
        """While it is written to, it is there."""
        self._mapping = mapping
        self._start, self._within, self._size = start, start - mapped_from, size

    def write(self, bodies: Sequence[memoryview]) -> None:
        """Raises OSError: a full disk is told of here, and not to whoever reads what a hole is in the place of."""
        at = self._start
        for body in bodies:
            at = write_at(self._file.descriptor, at, body)

    def read(self) -> memoryview:
        return memoryview(self._mapping)[self._within : self._within + self._size]


class _File:
    """One file: it grows, and goes when neither it nor anything mapped of it is held any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lives = _Lives(path)
        self._lives.hold(self, self.descriptor)
        self._end = 0
        self._mapping: mmap.mmap | None = None
        self._mapped_from = self._mapped_to = 0

    def room_for(self, size: int) -> _Place:
        """Raises OSError."""
        start = -(-self._end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._mapping is None or start + size > self._mapped_to:
            start = self._mapped_to  # where the mapping ends: no two of them share a page
            length = -(-max(size, MAPPED_AT_ONCE_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self.descriptor, start + length)
            mapping = mmap.mmap(self.descriptor, length, access=mmap.ACCESS_READ, offset=start)
            self._lives.hold(mapping, None)
            self._mapping, self._mapped_from, self._mapped_to = mapping, start, start + length
        self._end = start + size
        return _Place(self, self._mapping, start, self._mapped_from, size)


class _Lives:
    """Who holds a file. What tells of an end may run in any thread, also while one of these methods does in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held_by: set[int] = set()

    def hold(self, holder: object, descriptor: int | None) -> None:
        """The holder does, while it lives; its descriptor ends with it."""
        self._held_by.add(id(holder))
        weakref.finalize(holder, self._let_go, id(holder), descriptor)

    def _let_go(self, holder: int, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        self._held_by.discard(holder)
        if not self._held_by:
            self._path.unlink(missing_ok=True)
