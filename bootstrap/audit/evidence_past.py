"""The past that evidence rests on, as the host fetches it itself: a stage's state and the results since.

All members hold it, and share the sending; whoever accuses has but one home line for it, for hours where a state is
gigabytes. It is left out of what the accuser brings (`Gap`), and comes from it only if the others do not give it.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.many_donors import from_donors
from swarm.checkpoint.state import CHUNK_BYTES
from swarm.checkpoint.transfer import CHUNK, PART_BYTES, transfer_s
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId, StageIndex
from swarm.core.settings import LARGEST_PART_VALUES, RunSettings
from swarm.core.transfers import MOST_DONORS, MOST_LANES, bytes_per_s, expected_s
from swarm.disk.placed_bytes import write_at
from swarm.network.transport import Message, Transport
from verification.audit.evidence import MAX_BLOBS, Bytes, EvidenceHead
from verification.kinds.bias import WITH_A_STATE
from verification.replay.evidence_file import MAX_BYTES_PER_VALUE
from verification.state.anchor import Anchor
from verification.state.past import MAX_RESULTS, Past

log = logging.getLogger(__name__)

FLOOR_S = 60.0
"""Beside what the bytes take on the slowest line: so long others are waited for before the accuser brings them."""
MOST_BYTES = {CHUNK: CHUNK_BYTES, PART_BYTES: MAX_BYTES_PER_VALUE * LARGEST_PART_VALUES}
"""Of what answers one question: several are in memory at a time."""


@dataclass(frozen=True)
class Piece:
    """One blob of a gap, and what a member is asked for it."""

    method: str
    asked: dict[str, Value]
    digest: bytes
    at: int
    """Where in the file it lies."""
    size: int


@dataclass(frozen=True)
class Gap:
    """Bytes of an evidence file that its accuser need not bring: its first blobs."""

    accused: PeerId
    stage: StageIndex
    start: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def gap_in(head: EvidenceHead, start: int, anchor_of: Callable[[int], Anchor | None]) -> Gap | None:
    """What the stage holds of the evidence whose blobs begin at `start`; None if it shows no state of the stage that
    the host has an anchor for. Raises RemoteError if the head is malformed."""
    if head.kind not in WITH_A_STATE:
        return None
    fields = Fields("evidence's facts", head.facts)
    past = fields.maybe("past", Past.from_value)
    num_chunks = fields.integer("num_chunks", high=MAX_BLOBS)
    num_bodies = fields.items("num_bodies", integer_item, max_items=MAX_RESULTS)
    if past is None or len(num_bodies) != len(past.results):
        return None
    version, counts = int(past.beginning.version), [num_chunks, *num_bodies]
    anchor = anchor_of(version)
    if anchor is None or anchor.state_digest != past.beginning.state_digest or sum(counts) > len(head.blobs):
        return None
    asked: list[tuple[str, dict[str, Value]]] = [
        (CHUNK, {"stage": int(head.stage), "version": version, "index": index}) for index in range(num_chunks)
    ]
    for result, count in zip(past.results, num_bodies, strict=True):
        asked += [(PART_BYTES, {"step": result.roster.step, "part": part}) for part in range(count)]
    starts = accumulate((blob.size for blob in head.blobs), initial=start)
    pieces = [
        Piece(method, meta | ({"digest": blob.digest} if method == PART_BYTES else {}), blob.digest, at, blob.size)
        for (method, meta), blob, at in zip(asked, head.blobs, starts, strict=False)
    ]
    if not pieces or any(piece.size > MOST_BYTES[piece.method] for piece in pieces):
        return None
    return Gap(head.accused, head.stage, start, tuple(pieces))


class EvidencePast:
    """Has the members of a stage fill the gaps of evidence files."""

    def __init__(
        self, settings: RunSettings, transport: Transport, members: Callable[[StageIndex], Sequence[PeerId]]
    ) -> None:
        """`members` of a stage, who are not out."""
        self._settings = settings
        self._transport = transport
        self._members = members

    def donors(self, gap: Gap, accuser: PeerId) -> list[PeerId]:
        """Who is asked: neither the accuser, whose line is to be spared, nor the accused."""
        others = [one for one in self._members(gap.stage) if one not in (gap.accused, accuser)]
        return random.sample(others, min(len(others), MOST_DONORS))

    async def fill(self, gap: Gap, path: Path, accuser: PeerId) -> None:
        """Have what is missing in the file, which is there.

        Raises TransientError, RemoteError, TimeoutError or OSError: the accuser is to bring it. No later than its line
        would have brought it, were that the slowest.
        """
        rate = bytes_per_s(self._settings.deadlines.least_mbit)
        async with asyncio.timeout(FLOOR_S + expected_s(gap.num_bytes, rate)):

            async def fetch(donor: PeerId, piece: Piece) -> int:
                answer = await self._transport.call(
                    donor,
                    piece.method,
                    Message(piece.asked),
                    timeout_s=transfer_s(self._settings, MOST_LANES * piece.size),
                    max_body_bytes=piece.size,
                )
                await asyncio.to_thread(_put, path, piece, answer.body, donor)
                return len(answer.body)

            # One after the other: of pieces as different as these it cannot be told which are late.
            for method in MOST_BYTES:
                pieces = [piece for piece in gap.pieces if piece.size and piece.method == method]
                await from_donors(self.donors(gap, accuser), pieces, fetch)


def _put(path: Path, piece: Piece, body: Bytes, donor: PeerId) -> None:
    """Raises RemoteError for other bytes, OSError where the file is gone or the disk full."""
    if len(body) != piece.size or bulk_digest(body) != piece.digest:
        raise RemoteError("digest", f"{piece.method} {piece.asked} is not what evidence names", donor)
    write_in(path, piece.at, body)


def write_in(path: Path, at: int, body: Bytes, *, is_last: bool = False) -> None:
    """Into a file that is there; `is_last`: it is on disk then. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        write_at(descriptor, at, body)
        if is_last:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
