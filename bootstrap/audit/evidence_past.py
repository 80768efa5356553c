"""The past that evidence rests on, as the host fetches it itself: a stage's state and the results since.

All members hold it, and share the sending; whoever accuses has but one home line for it, for hours where a state is
gigabytes. It is left out of what the accuser brings (`Gap`), and comes from it only if no member gives it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.averaging.parts import Parts
from swarm.checkpoint.transfer import Offer, fetch_chunks, fetch_offer, fetch_parts
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId, StageIndex
from swarm.core.round.contribution import Result
from swarm.core.settings import RunSettings
from swarm.core.transfers import MOST_DONORS
from swarm.disk.cold_bytes import ColdBytes
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Transport
from verification.audit.evidence import MAX_BLOBS, Bytes, EvidenceHead
from verification.kinds.bias import Bias
from verification.kinds.mismatch import MISMATCHES
from verification.state.anchor import Anchor
from verification.state.past import MAX_RESULTS, Past

log = logging.getLogger(__name__)

WITH_A_STATE = (*MISMATCHES, Bias.KIND)
"""Kinds of evidence that hold a whole one."""


@dataclass(frozen=True)
class Gap:
    """Bytes of an evidence file that its accuser need not bring: the file's first blobs."""

    accused: PeerId
    past: Past
    anchor: Anchor
    """Where it begins: the run key's word on the state, as this host gave it."""
    sizes: tuple[int, ...]
    """Of each blob in it: the state's chunks, and the parts of each result."""
    num_chunks: int
    start: int

    @property
    def end(self) -> int:
        return self.start + sum(self.sizes)


def gap_in(
    head: EvidenceHead, start: int, anchor_of: Callable[[int], Anchor | None], result_of: Callable[[int], Result | None]
) -> Gap | None:
    """What the stage holds of the evidence whose blobs begin at `start`; None if that is nothing, or is not known here.

    `anchor_of` a version and `result_of` a step of that stage, as the host knows them: nobody has it fetch others.
    """
    if head.kind not in WITH_A_STATE:
        return None
    fields = Fields("evidence's facts", head.facts)
    past = fields.maybe("past", Past.from_value)
    num_chunks = fields.integer("num_chunks", high=MAX_BLOBS)
    num_bodies = fields.items("num_bodies", integer_item, max_items=MAX_RESULTS)
    if past is None or not isinstance(past.beginning, Anchor) or len(num_bodies) != len(past.results):
        return None
    anchor = anchor_of(int(past.beginning.version))
    if anchor is None or anchor.state_digest != past.beginning.state_digest:
        return None
    for result, count in zip(past.results, num_bodies, strict=True):
        known = result_of(int(result.roster.step))
        if known is None or known.root() != result.root() or count != len(result.parts):
            return None
    sizes = tuple(blob.size for blob in head.blobs[: num_chunks + sum(num_bodies)])
    if not num_chunks or len(sizes) != num_chunks + sum(num_bodies):
        return None
    return Gap(head.accused, past, anchor, sizes, num_chunks, start)


class EvidencePast:
    """Fetches what fills the gaps of evidence files, of one file at a time."""

    def __init__(
        self,
        settings: RunSettings,
        transport: Transport,
        layouts: Sequence[ParameterLayout],
        folder: Path,
        members: Callable[[StageIndex], Sequence[PeerId]],
    ) -> None:
        """`layouts` by stage. What is fetched lies in `folder`; `members` of a stage who are not out."""
        self._settings = settings
        self._transport = transport
        self._layouts = layouts
        self._folder = folder
        self._members = members
        self._fetching = asyncio.Lock()
        self._chunks: dict[StageIndex, tuple[bytes, dict[bytes, memoryview]]] = {}
        """Of each stage's state that was fetched last: its digest, and what is here of it, by hash. Several may accuse
        one liar, or one several."""

    def forget(self, stage: StageIndex, state_digest: bytes) -> None:
        """No evidence rests on that state any more."""
        if self._chunks.get(stage, (b"", {}))[0] == state_digest:
            del self._chunks[stage]

    async def fetch(self, gap: Gap, accuser: PeerId) -> list[Bytes]:
        """The blobs that are missing. Raises TransientError, RemoteError or TimeoutError: nobody gives them."""
        async with self._fetching:
            others = [one for one in self._members(gap.anchor.stage) if one not in (gap.accused, accuser)]
            donors = [*random.sample(others, min(len(others), MOST_DONORS - 1)), accuser]
            blobs: list[Bytes] = [*await self._state_chunks(gap, donors)]
            for result in gap.past.results:
                blobs += await self._bodies(gap.anchor.stage, result, donors)
        if tuple(map(len, blobs)) != gap.sizes:
            raise RemoteError("evidence", f"the past of version {gap.anchor.version} is cut otherwise", accuser)
        return blobs

    async def _state_chunks(self, gap: Gap, donors: Sequence[PeerId]) -> list[memoryview]:
        stage, wanted = gap.anchor.stage, gap.anchor.state_digest
        if self._chunks.get(stage, (b"", {}))[0] != wanted:
            self._chunks[stage] = wanted, {}
        held = self._chunks[stage][1]
        offer = await self._offer(gap, donors)
        if len(offer.hashes) != gap.num_chunks:
            raise RemoteError("evidence", f"a state of {len(offer.hashes)} chunks, of which {gap.num_chunks} are named")
        return await fetch_chunks(self._transport, donors, offer, self._settings, self._folder, held)

    async def _offer(self, gap: Gap, donors: Sequence[PeerId]) -> Offer:
        anchor, last = gap.anchor, TransientError("nobody to ask for it")
        for donor in donors:
            try:
                layout, version = self._layouts[anchor.stage], int(anchor.version)
                offer = await fetch_offer(self._transport, donor, anchor.stage, layout, self._settings, version=version)
            except (TransientError, RemoteError) as error:
                log.info("the state of stage %d version %d from %s: %s", anchor.stage, version, donor[-6:], error)
                last = TransientError(str(error))
                continue
            if offer.digest == anchor.state_digest:
                return offer
        raise last

    async def _bodies(self, stage: StageIndex, result: Result, donors: Sequence[PeerId]) -> list[Bytes]:
        """Of the result's parts, empty ones where nobody contributed."""
        parts, held = Parts.of(self._settings, self._layouts[stage]), dict[bytes, Bytes]()
        named: Mapping[bytes, int] = {part.digest: part.part for part in result.parts if not part.is_empty}
        await fetch_parts(
            self._transport,
            donors,
            result.roster.step,
            named,
            self._settings,
            held,
            largest_bytes=max(map(parts.result_bytes, range(len(parts)))),
            keep=ColdBytes(self._folder, "parts").put,
        )
        return [b"" if part.is_empty else held[part.digest] for part in result.parts]
