"""A stage's state on its way between machines: hashes first, then chunks, each checked as it comes.

A donor answers SNAPSHOT {stage, version | None} with {digest, total_bytes, chain | None} and the chunk hashes as body,
and CHUNK {stage, version, index} with one chunk.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.many_donors import More, from_donors
from swarm.checkpoint.state import (
    CHUNK_BYTES,
    Bytes,
    StageState,
    num_chunks_of,
    state_from_chunks,
    verify_chunk,
    verify_hashes,
)
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.plan import FLOAT_BYTES, RESULT_BYTES
from swarm.core.round.contribution import MAX_PARTS, Result
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import MOST_DONORS, MOST_LANES, bytes_per_s, longest_s
from swarm.disk.cold_bytes import ColdBytes
from swarm.host_protocol import MAX_RESULTS_PER_CALL, RESULTS
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

SNAPSHOT, CHUNK = "snapshot", "snapshot_chunk"
PART_BYTES = "part_bytes"
"""{step, part, digest, lacks_bytes | absent} -> that part of a step's result, of a step that is open or whose result is
kept. `lacks_bytes`: what its caller lacks of that result."""
EARLY_PARTS = "early_parts"
"""{step, from} -> {parts: [[part, digest], ...]}: what is here of an open step's result, in the order in which it
came, but for the first so many. It may yet turn out otherwise."""
MOST_EARLY_PARTS = 8
"""Named in one answer: who takes them sees no new version meanwhile."""
MAX_HASH_BYTES = 32 << 20
MAX_STATE_BYTES_PER_VALUE = 32


@dataclass(frozen=True)
class Offer:
    """What a donor says it has; `chain` is None where nothing is certified yet."""

    stage: int
    version: int
    digest: bytes
    hashes: tuple[bytes, ...]
    total_bytes: int
    chain: StageChain | None

    def to_message(self) -> Message:
        meta: dict[str, Value] = {
            "stage": self.stage,
            "version": self.version,
            "digest": self.digest,
            "total_bytes": self.total_bytes,
            "chain": None if self.chain is None else self.chain.to_value(),
        }
        return Message(meta, b"".join(self.hashes))


async def fetch_state(
    transport: Transport,
    donor: PeerId,
    stage: int,
    layout: ParameterLayout,
    settings: RunSettings,
    folder: Path,
    *,
    version: int | None = None,
    held: dict[bytes, memoryview] | None = None,
) -> tuple[StageState, Offer]:
    """The donor's latest state of the stage, or that of `version`. What comes lies in `folder` until all is here; with
    `held` it stays there if the rest does not come, and is not fetched again.

    Raises TransientError or RemoteError.
    """
    offer = await fetch_offer(transport, donor, stage, layout, settings, version=version)
    here = held if held is not None else {}
    for other in here.keys() - set(offer.hashes):  # or tries of one state after another would pile up
        del here[other]
    chunks = await fetch_chunks(transport, [donor], offer, settings, folder, here)
    state = await asyncio.to_thread(read_state, layout, chunks, offer.digest, folder)
    if state.version != offer.version:
        raise RemoteError("protocol", f"the state is of version {state.version}, offered as {offer.version}", donor)
    if offer.chain is not None and (offer.chain.version != state.version or offer.chain.name != state.name):
        raise RemoteError("fork", f"state of version {state.version} with the facts of {offer.chain.version}", donor)
    return state, offer


async def fetch_state_by_digest(
    transport: Transport,
    find: Callable[[], Iterable[PeerId]],
    digest: bytes,
    stage: int,
    layout: ParameterLayout,
    settings: RunSettings,
    folder: Path,
    *,
    version: int,
    held: dict[bytes, memoryview],
) -> tuple[StageState, Offer]:
    """The state of `version` with this digest, from all who offer it, and what one of them says of it.

    `find` names who may have it, those first who are to be asked first; it is asked again while the state comes. Chunks
    are put into `held` by their hash, stay there if the rest does not come, and are not fetched again.

    Raises TransientError, RemoteError or TimeoutError.
    """
    offers: dict[PeerId, Offer] = {}

    async def ask(donor: PeerId) -> None:
        try:
            offer = await fetch_offer(transport, donor, stage, layout, settings, version=version)
        except (TransientError, RemoteError) as error:
            log.info("state of stage %d version %d from %s: %s", stage, version, donor[-6:], error)
            return
        if offer.digest == digest:
            offers[donor] = offer
        else:
            log.warning("%s offers another state of stage %d version %d than is wanted", donor, stage, version)

    async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        known = [donor for donor in find() if donor not in giving and donor not in but]
        asked = known[: max(0, MOST_DONORS - len(giving))]
        await asyncio.gather(*(ask(donor) for donor in asked))
        return [donor for donor in asked if donor in offers]

    holders = await more((), ())
    if not holders:
        raise TransientError(f"nobody offers version {version} of stage {stage} that is wanted")
    chunks = await fetch_chunks(transport, holders, offers[holders[0]], settings, folder, held, more)
    state = await asyncio.to_thread(read_state, layout, chunks, digest, folder)
    if state.version != version:
        raise RemoteError("protocol", f"the state is of version {state.version}, offered as {version}")
    for offer in offers.values():
        if offer.chain is None or (offer.chain.version, offer.chain.name) == (state.version, state.name):
            return state, offer
    raise RemoteError("fork", f"state of version {state.version} with the facts of others, of {len(offers)} donors")


def read_state(layout: ParameterLayout, chunks: Sequence[memoryview], digest: bytes, folder: Path) -> StageState:
    """The state that was fetched; it lies in `folder` for as long as somebody holds it. Raises RemoteError."""
    return state_from_chunks(layout, chunks, digest, whole=ColdBytes(folder, "state").put_all)


@dataclass(frozen=True)
class OfferedResults:
    """Some of a donor's results, as they came: nothing of them is checked but their form."""

    version: int
    """At which the donor is, by its word."""
    oldest: int
    """The oldest step of which it has the parts."""
    results: tuple[Result, ...]


async def fetch_results(
    transport: Transport, donor: PeerId, start: int, settings: RunSettings, *, wait_s: float = 0.0
) -> OfferedResults:
    """The donor's results from step `start` on, a few; it waits so long for the next. Their parts come one by one, from
    whoever has them (`fetch_parts`). Raises TransientError or RemoteError.
    """
    asked = Message({"from": start, "wait_s": wait_s})
    timeout_s = settings.deadlines.call_s + wait_s
    reply = await transport.call(donor, RESULTS, asked, timeout_s=timeout_s, max_body_bytes=0)
    fields = Fields("results", reply.meta)
    version, oldest = fields.integer("version"), fields.integer("oldest")
    results = fields.items("results", Result.from_value, max_items=MAX_RESULTS_PER_CALL)
    return OfferedResults(version, oldest, results)


async def fetch_early_parts(
    transport: Transport, donor: PeerId, step: Step, settings: RunSettings, *, start: int
) -> list[tuple[int, bytes]]:
    """Numbers and digests of what the donor has of an open step's result, but for the first `start`, as it says.

    Raises TransientError or RemoteError.
    """
    request: dict[str, Value] = {"step": step, "from": start}
    call_s = settings.deadlines.call_s
    reply = await transport.call(donor, EARLY_PARTS, Message(request), timeout_s=call_s, max_body_bytes=0)
    return [*Fields("early parts", reply.meta).items("parts", _read_part, max_items=MOST_EARLY_PARTS)]


def _read_part(value: Value) -> tuple[int, bytes]:
    """Number and digest."""
    pair = Fields("an early part", {"of": value}).items("of", lambda item: item, max_items=2)
    fields = Fields("an early part", dict(zip(("part", "digest"), pair, strict=False)))
    return fields.integer("part", high=MAX_PARTS - 1), fields.octets("digest", length=32)


async def fetch_parts(
    transport: Transport,
    donors: Sequence[PeerId],
    step: Step,
    named: Mapping[bytes, int],
    settings: RunSettings,
    held: dict[bytes, Bytes],
    *,
    largest_bytes: int,
    keep: Callable[[memoryview], Bytes],
) -> None:
    """The bytes of parts of a step's result, `named` by digest, each checked, from several donors at once; those `held`
    are not fetched again. Donors are told how many bytes those are at most that are not held.

    What comes is put there, as `keep` keeps it, and stays if the rest does not come. A donor that fails, or gives other
    bytes, is asked no more. Raises the last donor's TransientError or RemoteError.
    """
    part_s = transfer_s(settings, MOST_LANES * largest_bytes)

    async def fetch(donor: PeerId, piece: tuple[int, bytes]) -> int:
        index, wanted = piece
        lacks_bytes = largest_bytes * len(named.keys() - held.keys())
        meta: dict[str, Value] = {"step": step, "part": index, "digest": wanted, "lacks_bytes": lacks_bytes}
        try:
            reply = await transport.call(
                donor, PART_BYTES, Message(meta), timeout_s=part_s, max_body_bytes=largest_bytes
            )
            if await asyncio.to_thread(bulk_digest, reply.body) != wanted:
                raise RemoteError("digest", f"part {index} of step {step} differs from its digest", donor)
            held[wanted] = await asyncio.to_thread(keep, memoryview(reply.body))
        except (TransientError, RemoteError) as error:
            log.info("part %d of step %d from %s: %s", index, step, donor[-6:], error)
            raise
        return len(reply.body)

    await from_donors(donors, [(index, wanted) for wanted, index in named.items() if wanted not in held], fetch)


def parts_of(result: Result) -> dict[bytes, int]:
    """Its parts of which there are bytes, by digest."""
    return {part.digest: part.part for part in result.parts if not part.is_empty}


def bodies_of(result: Result, held: Mapping[bytes, Bytes]) -> list[Bytes]:
    """All its parts as they are kept, those that were fetched by their digests."""
    return [b"" if part.is_empty else held[part.digest] for part in result.parts]


async def fetch_offer(
    transport: Transport,
    donor: PeerId,
    stage: int,
    layout: ParameterLayout,
    settings: RunSettings,
    *,
    version: int | None = None,
) -> Offer:
    """What the donor says it has, latest or at `version`; its hashes are those under its digest, the rest its word.

    Raises TransientError or RemoteError.
    """
    request: dict[str, Value] = {"stage": stage, "version": version}
    call_s = settings.deadlines.call_s
    reply = await transport.call(donor, SNAPSHOT, Message(request), timeout_s=call_s, max_body_bytes=MAX_HASH_BYTES)
    offer = _read_offer(reply, layout)
    if offer.stage != stage or (version is not None and offer.version != version):
        raise RemoteError("protocol", f"stage {offer.stage} version {offer.version} offered, not asked for", donor)
    verify_hashes(offer.digest, offer.hashes, offer.total_bytes)
    return offer


async def fetch_chunks(
    transport: Transport,
    donors: Sequence[PeerId],
    offer: Offer,
    settings: RunSettings,
    folder: Path,
    held: dict[bytes, memoryview] | None = None,
    more: More | None = None,
) -> list[memoryview]:
    """All chunks of the offered state, from all donors that give them, and those that `more` finds meanwhile; each has
    its hash in the offer, and lies in `folder` for as long as somebody holds it.

    What comes is put into `held` by its hash, stays there if the rest does not come, and is not fetched again.

    A donor that fails, or gives another chunk, is asked no more. Raises the last one's TransientError or
    RemoteError, or TimeoutError; DiskFullError or LocalError where the disk does not take what comes.
    """
    chunk_s, cold = transfer_s(settings, MOST_LANES * CHUNK_BYTES), ColdBytes(folder, "chunks")
    here: dict[bytes, memoryview] = held if held is not None else {}

    async def fetch(donor: PeerId, index: int) -> int:
        meta: dict[str, Value] = {"stage": offer.stage, "version": offer.version, "index": index}
        try:
            answer = await transport.call(donor, CHUNK, Message(meta), timeout_s=chunk_s, max_body_bytes=CHUNK_BYTES)
            await asyncio.to_thread(verify_chunk, offer.hashes, index, answer.body)
        except (TransientError, RemoteError) as error:
            log.warning("chunk %d of version %d from %s: %s", index, offer.version, donor, error)
            raise
        here[offer.hashes[index]] = await asyncio.to_thread(cold.put_all, [answer.body])
        return len(answer.body)

    num_chunks = num_chunks_of(offer.total_bytes)
    places = {offer.hashes[index]: index for index in range(num_chunks) if offer.hashes[index] not in here}
    async with asyncio.timeout(transfer_s(settings, offer.total_bytes)):
        await from_donors(donors, places.values(), fetch, more=more)
    return [here[offer.hashes[index]] for index in range(num_chunks)]


async def fetch_first_chunk(transport: Transport, donor: PeerId, offer: Offer, settings: RunSettings) -> memoryview:
    """Of the offered state: it says what the others are. Raises TransientError or RemoteError."""
    meta: dict[str, Value] = {"stage": offer.stage, "version": offer.version, "index": 0}
    chunk_s = transfer_s(settings, CHUNK_BYTES)
    answer = await transport.call(donor, CHUNK, Message(meta), timeout_s=chunk_s, max_body_bytes=CHUNK_BYTES)
    await asyncio.to_thread(verify_chunk, offer.hashes, 0, answer.body)
    return memoryview(answer.body)


def transfer_s(settings: RunSettings, num_bytes: float) -> float:
    """Seconds after which a transfer of so many bytes has ended in any case."""
    return longest_s(num_bytes, bytes_per_s(settings.deadlines.least_mbit), floor_s=settings.deadlines.call_s)


def states_s(settings: RunSettings, num_values: Iterable[int]) -> float:
    """`transfer_s` of the states of stages with so many values each, with the results until the next snapshots."""
    result_bytes = RESULT_BYTES[settings.codecs.averaging] * settings.round_values * settings.retained_results
    value_bytes = FLOAT_BYTES + settings.state_moment_bytes + result_bytes
    return transfer_s(settings, sum(num_values) * value_bytes)


def _read_offer(reply: Message, layout: ParameterLayout) -> Offer:
    fields = Fields("state offer", reply.meta)
    chain = fields.maybe("chain", StageChain.from_value)
    made = Offer(
        fields.integer("stage"),
        fields.integer("version"),
        fields.octets("digest", length=32),
        tuple(bytes(reply.body[at : at + 32]) for at in range(0, len(reply.body), 32)),
        fields.integer("total_bytes", low=1, high=MAX_STATE_BYTES_PER_VALUE * layout.num_values + (1 << 24)),
        chain,
    )
    fields.done()
    return made
