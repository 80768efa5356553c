"""Evidence as it comes to the host: a piece at a time, for it may be as large as a stage's state several times
over, and come from behind a home line.

What the accused's stage holds is left out, and fetched from there once all the rest is here (`evidence_past`); whoever
accuses is asked to come again meanwhile, and for what nobody gave.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bootstrap.audit.evidence_past import EvidencePast, Gap
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_BYTES_PER_S, SHARED_BY
from swarm.host_protocol import AccusationPiece
from verification.audit.evidence import Bytes, EvidenceHead, head_end
from verification.replay.evidence_file import DIGEST_BYTES

log = logging.getLogger(__name__)

MAX_COMING, MAX_OF_STRANGERS = 8, 2
"""Files of which pieces are here, one of an accuser; of all who are no members. Keys cost nothing, and a member that
cannot bring its case is struck for having charged without one."""
IDLE_S = 120.0
"""Who brings nothing for so long gives way to others, and who is slower than the slowest line is."""
LEFT_FREE_BYTES = 1 << 30
"""Of the disk."""
COME_AGAIN_S = 2.0
"""While the rest is fetched: its closing digest, the last that is taken, is asked for as often."""


class Taken(NamedTuple):
    """What came of a piece."""

    next: int
    """Where the next one is to begin."""
    path: Path | None = None
    """Of the file, now the caller's, once it is whole."""
    again_s: float = 0.0
    """After which to send the next piece; not at once, where that is to be waited for."""


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
    """Up to where all is here, but for the gap."""
    head_end: int | None = None
    """Where its head does, as the first piece says."""
    gap: Gap | None = None
    """What is fetched once all else is here."""
    filling: asyncio.Task[None] | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_to_be_filled(self) -> bool:
        """Whether all else is here but the closing digest."""
        return self.gap is not None and self.have == self.size - DIGEST_BYTES

    def gives_way(self, now: float) -> bool:
        """Whether others need not wait for it."""
        due = (now - self.began_at - IDLE_S) * LEAST_BYTES_PER_S / SHARED_BY
        return now >= self.touched_at + IDLE_S or self.have < due


class IncomingEvidence:
    """Evidence files as they come in, each from one accuser; nothing in them is checked here."""

    def __init__(
        self, folder: Path, largest_bytes: int, past: EvidencePast, gap_in: Callable[[EvidenceHead, int], Gap | None]
    ) -> None:
        """In a folder of its own, of which nothing is kept from one process to the next. `gap_in` the file with a head,
        whose blobs begin there."""
        self._folder = folder
        self._largest_bytes = largest_bytes
        self._past = past
        self._gap_in = gap_in
        self._bring_all: set[PeerId] = set()
        """Who brought what was no evidence, or not enough: nobody sends a past for them once more."""
        self._coming: dict[PeerId, _Coming] = {}
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)

    async def take(self, sender: PeerId, piece: AccusationPiece, body: Bytes, *, is_member: bool) -> Taken:
        """Write it down, as far as it is taken.

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
                return Taken(0)
            held = self._begun(sender, piece, is_member)
        async with held.writing:
            if piece.at != held.have or self._coming.get(sender) is not held:
                return Taken(held.have)
            held.touched_at = time.monotonic()
            if held.is_to_be_filled and not self._is_filled(held, sender):
                return Taken(held.have, again_s=COME_AGAIN_S if held.gap is not None else 0.0)
            try:
                is_trusted = is_member and sender not in self._bring_all
                await self._write(held, memoryview(body).cast("B"), is_trusted=is_trusted)
            except OSError as error:
                self._drop(sender)
                raise TransientError(f"the evidence cannot be written down: {error}") from error
            if held.is_to_be_filled:
                self._is_filled(held, sender)
                return Taken(held.have, again_s=COME_AGAIN_S)
            if held.have < held.size:
                return Taken(held.have)
            del self._coming[sender]
            return Taken(held.size, held.path)

    async def _write(self, held: _Coming, body: memoryview, *, is_trusted: bool) -> None:
        """As much of it as is taken now: what a gap is in depends on what comes before. Raises OSError."""
        if held.have == 0:
            held.head_end = head_end(body)
        to_end = held.head_end - held.have if held.head_end is not None else 0
        if is_trusted and 0 < to_end <= len(body):
            await self._append(held, body[:to_end])
            body = body[to_end:]
            held.gap = await asyncio.to_thread(self._gap, held)
            if held.gap is not None:
                held.have = held.gap.end
                return
        most = held.size - held.have - (DIGEST_BYTES if held.gap is not None else 0)
        await self._append(held, body[:most])

    async def _append(self, held: _Coming, body: memoryview) -> None:
        is_last = held.have + len(body) == held.size
        await asyncio.to_thread(_write, held.path, held.have, [body], is_last=is_last)
        held.have += len(body)

    def close(self) -> None:
        """Nothing more is taken."""
        for accuser in [*self._coming]:
            self._drop(accuser)

    def distrust(self, accuser: PeerId) -> None:
        """What it brought was no evidence, or came to nothing."""
        self._bring_all.add(accuser)

    def _gap(self, held: _Coming) -> Gap | None:
        assert held.head_end is not None
        try:
            with held.path.open("rb") as file:
                gap = self._gap_in(EvidenceHead.from_bytes(file.read(held.head_end)), held.head_end)
        except (OSError, RemoteError):  # it is told when all of it is here
            return None
        return gap if gap is not None and gap.end <= held.size - DIGEST_BYTES else None

    def _is_filled(self, held: _Coming, accuser: PeerId) -> bool:
        """Whether what is missing is here; if nobody gives it, the accuser is to bring it after all."""
        assert held.gap is not None
        if held.filling is None:
            held.filling = asyncio.ensure_future(self._fill(held.path, held.gap, accuser))
        if not held.filling.done():
            return False
        if (failure := held.filling.exception()) is None:
            held.gap = None
            return True
        if not isinstance(failure, RemoteError | TransientError | TimeoutError | OSError):
            raise failure
        log.info("the past of evidence against %s, of its accuser: %s", held.gap.accused[-6:], failure)
        held.have, held.gap = held.gap.start, None
        return False

    async def _fill(self, path: Path, gap: Gap, accuser: PeerId) -> None:
        blobs = await self._past.fetch(gap, accuser)
        await asyncio.to_thread(_write, path, gap.start, blobs, is_last=False)

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
            if held.filling is not None:
                held.filling.cancel()
            with contextlib.suppress(OSError):
                held.path.unlink(missing_ok=True)


def _write(path: Path, at: int, blobs: Sequence[Bytes], *, is_last: bool) -> None:
    """One after another, from there on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for blob in blobs:
            rest = memoryview(blob).cast("B")
            while rest:
                written = os.pwrite(descriptor, rest, at)
                rest, at = rest[written:], at + written
        if is_last:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
