"""Evidence as it comes to the host: a piece at a time, for it may be as large as a stage's state several times
over, and come from behind a home line.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_BYTES_PER_S, SHARED_BY
from swarm.host_protocol import AccusationPiece

MAX_COMING, MAX_OF_STRANGERS = 8, 2
"""Files of which pieces are here, one of an accuser; of all who are no members. Keys cost nothing, and a member that
cannot bring its case is struck for having charged without one."""
IDLE_S = 120.0
"""Who brings nothing for so long gives way to others, and who is slower than the slowest line is."""
LEFT_FREE_BYTES = 1 << 30
"""Of the disk."""


@dataclass
class _Coming:
    """A file of which some pieces are here."""

    path: Path
    digest: bytes
    size: int
    is_members: bool
    began_at: float
    touched_at: float
    have: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def gives_way(self, now: float) -> bool:
        """Whether others need not wait for it."""
        due = (now - self.began_at - IDLE_S) * LEAST_BYTES_PER_S / SHARED_BY
        return now >= self.touched_at + IDLE_S or self.have < due


class IncomingEvidence:
    """Evidence files as they come in, each from one accuser; nothing in them is checked here."""

    def __init__(self, folder: Path, largest_bytes: int) -> None:
        """In a folder of its own, of which nothing is kept from one process to the next."""
        self._folder = folder
        self._largest_bytes = largest_bytes
        self._coming: dict[PeerId, _Coming] = {}
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)

    async def take(
        self, sender: PeerId, piece: AccusationPiece, body: bytes | bytearray | memoryview, *, is_member: bool
    ) -> tuple[int, Path | None]:
        """Where the next piece is to begin; and the file, now the caller's, once it is whole.

        Raises RemoteError for what can be no piece of evidence, TransientError while there is no room.
        """
        if piece.size > self._largest_bytes:
            reason = f"evidence of {piece.size} bytes, where this run's is {self._largest_bytes} at most"
            raise RemoteError("evidence", reason, sender)
        if not 0 < len(body) <= piece.size - piece.at:
            raise RemoteError("evidence", f"{len(body)} bytes at {piece.at} of {piece.size}", sender)
        held = self._coming.get(sender)
        if held is None or (held.digest, held.size) != (piece.digest, piece.size):
            if piece.at:
                return 0, None
            held = self._begun(sender, piece, is_member)
        async with held.writing:
            if piece.at != held.have or self._coming.get(sender) is not held:
                return held.have, None
            try:
                await asyncio.to_thread(_write, held.path, piece.at, body, is_last=piece.at + len(body) == piece.size)
            except OSError as error:
                self._drop(sender)
                raise TransientError(f"the evidence cannot be written down: {error}") from error
            held.have += len(body)
            held.touched_at = time.monotonic()
            if held.have < held.size:
                return held.have, None
            del self._coming[sender]
            return held.size, held.path

    def _begun(self, sender: PeerId, piece: AccusationPiece, is_member: bool) -> _Coming:
        self._drop(sender)
        now = time.monotonic()
        self._make_room(is_member, now)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._fits(piece.size) and is_member:
            for stranger in self._strangers():  # what they say is to come need never come
                self._drop(stranger)
        if not self._fits(piece.size):
            raise TransientError(f"no room on disk for evidence of {piece.size} bytes")
        path = self._folder / f"{next(self._numbers)}-{sender[-8:]}"
        made = _Coming(path, piece.digest, piece.size, is_member, now, now)
        self._coming[sender] = made
        return made

    def _make_room(self, is_member: bool, now: float) -> None:
        """For one more. Raises TransientError where nobody gives way."""
        strangers = self._strangers()
        held, most = (list(self._coming), MAX_COMING) if is_member else (strangers, MAX_OF_STRANGERS)
        if len(held) < most and len(self._coming) < MAX_COMING:
            return
        slow = [peer for peer in held if self._coming[peer].gives_way(now)]
        lost = slow or (strangers if is_member else [])
        if not lost:
            raise TransientError(f"{len(held)} accusations are being brought already")
        self._drop(min(lost, key=lambda peer: self._coming[peer].touched_at))

    def _fits(self, size: int) -> bool:
        coming = sum(other.size - other.have for other in self._coming.values())
        return shutil.disk_usage(self._folder).free >= size + coming + LEFT_FREE_BYTES

    def _strangers(self) -> list[PeerId]:
        return [peer for peer, one in self._coming.items() if not one.is_members]

    def _drop(self, sender: PeerId) -> None:
        held = self._coming.pop(sender, None)
        if held is not None:
            with contextlib.suppress(OSError):
                held.path.unlink(missing_ok=True)


def _write(path: Path, at: int, body: bytes | bytearray | memoryview, *, is_last: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        rest = memoryview(body).cast("B")
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written
        if is_last:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
