"""Evidence as it comes to the host: a piece at a time, for it may be as large as a stage's state several times
over, and come from behind a home line.

What the accused's stage holds is left out, and fetched from there once all the rest is here (`evidence_past`); whoever
accuses is asked to come again meanwhile, and for what nobody gave.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bootstrap.audit.evidence_past import EvidencePast, Gap, write_in
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
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
HELPED_EVERY = 16
"""Versions of a stage: so often its members send a past for one accuser, true or not."""
WAITED_S, COME_AGAIN_S = 2.0, 0.1
"""While the rest is fetched: whoever brings the closing digest, the last that is taken, is answered after so long, and
is to come again so soon. Of a small stage all is there within one answer."""


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
    accused: PeerId
    """As its pieces say."""
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
    """What is fetched once all else is here; None once it is."""
    skipped: int = 0
    """Bytes of `have` that its accuser has not brought."""
    filling: asyncio.Task[None] | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_to_be_filled(self) -> bool:
        """Whether all else is here but the closing digest."""
        return self.gap is not None and self.have == self.size - DIGEST_BYTES

    def gives_way(self, now: float) -> bool:
        """Whether others need not wait for it."""
        due = (now - self.began_at - IDLE_S) * LEAST_BYTES_PER_S / SHARED_BY
        is_slow = self.have - self.skipped < due and not self.is_to_be_filled
        return now >= self.touched_at + IDLE_S or is_slow

    @property
    def lacks(self) -> int:
        """Bytes that are not on disk yet."""
        return self.size - self.have + (self.skipped if self.gap is not None else 0)


class IncomingEvidence:
    """Evidence files as they come in, each from one accuser; nothing in them is checked here."""

    def __init__(
        self,
        folder: Path,
        largest_bytes: int,
        past: EvidencePast,
        gap_in: Callable[[EvidenceHead, int], Gap | None],
        now: Callable[[StageIndex], Version],
    ) -> None:
        """In a folder of its own, of which nothing is kept from one process to the next. `gap_in` the file with a head,
        whose blobs begin there; it raises RemoteError or TransientError where all of it would be refused. `now`: the
        stage's version."""
        self._folder = folder
        self._largest_bytes = largest_bytes
        self._past = past
        self._gap_in = gap_in
        self._now = now
        self._helped_at: dict[PeerId, Version] = {}
        """For whom members have sent a past, and at which version that was last."""
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
            if len(body) == piece.size:
                return Taken(piece.size, await self._whole(sender, body, is_member))
            held = self._begun(sender, piece, is_member)
        async with held.writing:
            if piece.at != held.have or self._coming.get(sender) is not held:
                return Taken(held.have)
            held.touched_at = time.monotonic()
            if held.is_to_be_filled and not await self._is_filled(held):
                return Taken(held.have, again_s=COME_AGAIN_S if held.gap is not None else 0.0)
            try:
                with _writing():
                    await self._write(held, sender, memoryview(body).cast("B"))
            except (RemoteError, TransientError):
                self._drop(sender, held)
                raise
            if self._coming.get(sender) is not held:  # meanwhile it began with another, or gave way
                return Taken(0)
            if held.is_to_be_filled:
                self._begin_to_fill(held, sender)
            if held.have < held.size:
                return Taken(held.have)
            del self._coming[sender]
            return Taken(held.size, held.path)

    async def _whole(self, sender: PeerId, body: Bytes, is_member: bool) -> Path:
        """The file of evidence that came at once: nothing that comes in pieces gives way to it. Raises TransientError
        while there is no room."""
        path = self._file_of(sender, len(body), is_member)
        try:
            with _writing():
                await asyncio.to_thread(write_in, path, 0, body, is_last=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def _write(self, held: _Coming, sender: PeerId, body: memoryview) -> None:
        """As much of it as is taken now: what a gap is in depends on what comes before.

        Raises OSError, and what `gap_in` does.
        """
        if held.have == 0:
            held.head_end = head_end(body)
        to_end = held.head_end - held.have if held.head_end is not None else 0
        if held.is_members and 0 < to_end <= len(body):
            await self._append(held, body[:to_end])
            body = body[to_end:]
            held.gap = await asyncio.to_thread(self._gap, held, sender)
            if held.gap is not None:
                held.have, held.skipped = held.gap.end, held.gap.num_bytes
                return
        await self._append(held, body[: held.size - held.have - (DIGEST_BYTES if held.gap is not None else 0)])

    async def _append(self, held: _Coming, body: memoryview) -> None:
        is_last = held.have + len(body) == held.size
        await asyncio.to_thread(write_in, held.path, held.have, body, is_last=is_last)
        held.have += len(body)

    def _gap(self, held: _Coming, accuser: PeerId) -> Gap | None:
        assert held.head_end is not None
        with held.path.open("rb") as file:
            gap = self._gap_in(EvidenceHead.from_bytes(file.read(held.head_end)), held.head_end)
        if gap is None or gap.end > held.size - DIGEST_BYTES or gap.accused != held.accused:
            return None
        helped_at = self._helped_at.get(accuser)
        is_due = helped_at is None or self._now(gap.stage) >= helped_at + HELPED_EVERY
        return gap if is_due and self._past.donors(gap, accuser) else None

    def _begin_to_fill(self, held: _Coming, accuser: PeerId) -> None:
        assert held.gap is not None
        self._helped_at[accuser] = self._now(held.gap.stage)
        held.filling = asyncio.ensure_future(self._past.fill(held.gap, held.path, accuser))

    async def _is_filled(self, held: _Coming) -> bool:
        """Whether what is missing is here, or soon is; if nobody gives it, the accuser is to bring it after all."""
        assert held.gap is not None
        assert held.filling is not None
        await asyncio.wait({held.filling}, timeout=WAITED_S)
        if not held.filling.done() or held.filling.cancelled():  # it gave way meanwhile
            return False
        gap, failure, held.gap, held.skipped = held.gap, held.filling.exception(), None, 0
        if failure is None:
            held.began_at = time.monotonic()
            return True
        held.have, held.began_at = gap.start, time.monotonic()
        if not isinstance(failure, RemoteError | TransientError | TimeoutError | OSError):
            raise failure
        log.info("the past of evidence against %s is to come from its accuser: %s", gap.accused[-6:], failure)
        return False

    def drop(self, accuser: PeerId, digest: bytes | None = None) -> None:
        """What it is bringing is of no use any more; with `digest` if it is that file."""
        held = self._coming.get(accuser)
        if held is not None and digest in (None, held.digest):
            self._drop(accuser, held)

    def drop_about(self, accused: PeerId) -> None:
        """It is judged: nobody sends any more for what is being brought against it."""
        for accuser, held in [*self._coming.items()]:
            if held.gap is not None and held.gap.accused == accused:
                self._drop(accuser, held)

    def close(self) -> None:
        """What is under way comes to nothing."""
        for accuser in [*self._coming]:
            self.drop(accuser)

    def _begun(self, sender: PeerId, piece: AccusationPiece, is_member: bool) -> _Coming:
        self.drop(sender)
        now = time.monotonic()
        self._make_room(is_member, now)
        path = self._file_of(sender, piece.size, is_member)
        made = _Coming(path, piece.accused, piece.digest, piece.size, is_member, now, now)
        self._coming[sender] = made
        return made

    def _file_of(self, sender: PeerId, size: int, is_member: bool) -> Path:
        """An empty one. Raises TransientError where the disk has no room for so much."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._fits(size) and is_member:
            for stranger in self._strangers():  # what they say is to come need never come
                self.drop(stranger)
        if not self._fits(size):
            raise TransientError(f"no room on disk for evidence of {size} bytes")
        path = self._folder / f"{next(self._numbers)}-{sender[-8:]}"
        path.touch(mode=0o600)
        return path

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
        self.drop(min(lost, key=lambda peer: self._coming[peer].touched_at))

    def _fits(self, size: int) -> bool:
        coming = sum(other.lacks for other in self._coming.values())
        return shutil.disk_usage(self._folder).free >= size + coming + LEFT_FREE_BYTES

    def _strangers(self) -> list[PeerId]:
        return [peer for peer, one in self._coming.items() if not one.is_members]

    def _drop(self, sender: PeerId, held: _Coming) -> None:
        if self._coming.get(sender) is held:
            del self._coming[sender]
        if held.filling is not None:
            held.filling.cancel()
        with contextlib.suppress(OSError):
            held.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raises TransientError where the disk does not take it."""
    try:
        yield
    except OSError as error:
        raise TransientError(f"the evidence cannot be written down: {error}") from error
