"""One peer's side of a run that goes on from an earlier state: what it holds, and the state that the run key names."""

import asyncio
import logging
import time
from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kernels.threads import Threads
from peer.round.taking import StepTaking
from peer.state.joining_state import JoiningState
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.results import ResultStore
from swarm.checkpoint.snapshots import kept_states
from swarm.checkpoint.state import (
    UNNAMED,
    Bytes,
    StageState,
    chunk_hash,
    merkle_root,
    root_as,
    state_chunks,
)
from swarm.checkpoint.transfer import Offer, fetch_chunks, fetch_first_chunk, fetch_offer, read_state
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.core.transfers import MOST_DONORS
from swarm.host_protocol import HOLDINGS, MAX_RESULTS_PER_CALL, PREPARE, RESULTS
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

STANDS_S = 20.0
"""After it was asked for a state a peer takes no step for so long, unless the stage begins again before."""
PREPARED_S = 120.0
"""What was prepared is dropped after so long."""
WAIT_S = 2.0
"""For a state that is being made; then the host asks again."""


@dataclass(frozen=True)
class _Wish:
    lineage: bytes
    version: int
    number: int


@dataclass(frozen=True)
class _Prepared:
    """What was asked for."""

    state: StageState
    """Under the number that was asked for, without a name."""
    chain: StageChain
    digest: bytes
    hashes: tuple[bytes, ...]
    total_bytes: int
    first_chunk: Bytes

    @classmethod
    def of(cls, state: StageState, chain: StageChain, threads: Threads) -> "_Prepared":
        chunks = state_chunks(state)
        hashes, total_bytes = threads.map(chunk_hash, chunks), sum(len(chunk) for chunk in chunks)
        return cls(state, chain, merkle_root(hashes, total_bytes), tuple(hashes), total_bytes, chunks[0])

    def said(self) -> tuple[dict[str, Value], bytes]:
        """For the host: it need not see more to sign where the stage begins."""
        facts: dict[str, Value] = {
            "digest": self.digest,
            "total_bytes": self.total_bytes,
            "chain": self.chain.to_value(),
        }
        return facts, b"".join([*self.hashes, self.first_chunk])

    def digest_as(self, version: int) -> bytes:
        layout, total_bytes = self.state.layout, self.total_bytes
        return root_as(layout, self.first_chunk, self.hashes, total_bytes, version=version, name=UNNAMED)


class Continuing:
    """Answers the host: of a peer that trains, `taking` its steps, or of one that has found nobody who does."""

    def __init__(self, past: KeptPast, host: PeerId, taking: StepTaking | None = None) -> None:
        self._past = past
        self._host = host
        self._taking = taking
        self._wish: _Wish | None = None
        self._making: asyncio.Future[_Prepared | None] | None = None
        self._asked_at = 0.0

    def serve(self, transport: Transport) -> None:
        transport.serve(HOLDINGS, self._on_holdings, max_body_bytes=0)
        transport.serve(PREPARE, self._on_prepare, max_body_bytes=0)
        if self._taking is None:
            transport.serve(RESULTS, self._on_results, max_body_bytes=0)

    async def _on_holdings(self, sender: PeerId, request: Message) -> Message:
        self._check_is_host(sender)
        Fields("holdings request", request.meta).done()
        held = await asyncio.to_thread(self._past.holdings)
        return Message({"held": [[one.lineage, one.oldest, one.newest] for one in held]})

    async def _on_results(self, sender: PeerId, request: Message) -> Message:
        """What is signed of the newest lineage here, for a host that was away."""
        self._check_is_host(sender)
        fields = Fields("results request", request.meta)
        start = fields.integer("from")

        def read() -> dict[str, Value]:
            kept = kept_states(self._past.folder, self._past.stage)
            if not kept:
                return {"version": start, "oldest": start, "results": [], "sizes": []}
            store = ResultStore(self._past.folder, kept[0].chain, kept=0)
            found = store.signed_since(start, at_most=MAX_RESULTS_PER_CALL)
            return {"version": start + len(found), "oldest": start, "results": [*found], "sizes": []}

        return Message(await asyncio.to_thread(read))

    async def _on_prepare(self, sender: PeerId, request: Message) -> Message:
        """Make the state that is asked for, and stand still."""
        self._check_is_host(sender)
        fields = Fields("prepare request", request.meta)
        wish = _Wish(fields.octets("lineage", length=32), fields.integer("version"), fields.integer("number"))
        fields.done()
        stands_at = None if self._taking is None else int(await self._taking.stand_still(for_s=STANDS_S))
        if wish != self._wish or self._making is None:
            self._wish = wish
            self._making = asyncio.ensure_future(self._prepared(wish, self._making))
        self._asked_at = time.monotonic()
        done, _ = await asyncio.wait({self._making}, timeout=WAIT_S)
        newest = await asyncio.to_thread(self._past.newest, wish.lineage) if stands_at is None else stands_at
        if not done:
            return Message({"newest": newest, "state": None})
        found = self._making.result()
        if found is None:
            raise RemoteError("gone", f"version {wish.version} cannot be made again here", sender)
        said, body = found.said()
        return Message({"newest": newest, "state": said}, body)

    async def _prepared(self, wish: _Wish, before: "asyncio.Future[_Prepared | None] | None") -> _Prepared | None:
        """Made once, however often the host asks, and after what it asked for `before`: a state's bytes are many."""
        if before is not None:
            await asyncio.wait({before})
        return await asyncio.to_thread(self._prepare, wish) if wish == self._wish else None

    def _prepare(self, wish: _Wish) -> _Prepared | None:
        made = self._past.made_again(wish.lineage, wish.version)
        if made is None:
            return None
        return _Prepared.of(self._numbered(made[0], wish.number), made[1], self._past.threads)

    def _check_is_host(self, sender: PeerId) -> None:
        """What is on the disk is read, and steps are made again: nobody else has a peer do that."""
        if sender != self._host:
            raise RemoteError("standing", "only the host asks what can be made again here", sender)

    @staticmethod
    def _numbered(state: StageState, number: int) -> StageState:
        return replace(state, version=number, name=UNNAMED)

    async def state_of(self, genesis: Genesis, to_version: int) -> StageState | None:
        """The state that the genesis names, if it is on this machine."""
        return await self.state_with(genesis.state_digest, to_version, as_version=int(genesis.version))

    async def state_with(self, digest: bytes, to_version: int, *, as_version: int) -> StageState | None:
        """The state of `to_version` that has this digest as that version, without a name; if it is on this machine."""
        if self._making is not None and time.monotonic() < self._asked_at + PREPARED_S:
            found = await self._making
            if found is not None and found.digest_as(as_version) == digest:
                self._making = None
                return self._numbered(found.state, as_version)
        self._making = None
        for held in await asyncio.to_thread(self._past.holdings):
            if held.oldest <= to_version <= held.newest:
                made = await asyncio.to_thread(self._past.made_again, held.lineage, to_version)
                if made is not None and await self._has_digest(made[0], digest, as_version):
                    return self._numbered(made[0], as_version)
        return None

    async def _has_digest(self, state: StageState, digest: bytes, as_version: int) -> bool:
        chunks = state_chunks(self._numbered(state, as_version))
        hashes = await asyncio.to_thread(self._past.threads.map, chunk_hash, chunks)
        return merkle_root(hashes, sum(len(chunk) for chunk in chunks)) == digest


async def from_elsewhere(genesis: Genesis, wanted: JoiningState) -> StageState:
    """The state that the genesis names, from the host and from its members; what came of it stays with `wanted` until
    all is here. Raises TransientError.
    """
    donors = _Donors(genesis, wanted)
    offer, holders = await donors.of_state()
    try:
        chunks = await fetch_chunks(
            wanted.transport,
            holders,
            offer,
            wanted.settings,
            wanted.folder,
            wanted.broken_off.chunks,
            lambda giving, but: donors.more_of(offer, giving, but),
        )
        state = await asyncio.to_thread(read_state, wanted.layout, chunks, offer.digest, wanted.folder)
    except (RemoteError, TimeoutError) as error:
        raise TransientError(f"version {genesis.version} from {len(holders)} donors: {error}") from error
    wanted.broken_off.clear()
    return replace(state, version=int(genesis.version), name=UNNAMED)


class _Donors:
    """Who has the state that a genesis names.

    A member has it under the genesis's name, the host without one: all but the first chunk is the same, and by the
    first it is known for what it is, whoever offers it.
    """

    def __init__(self, genesis: Genesis, wanted: JoiningState) -> None:
        self._genesis, self._wanted = genesis, wanted
        me, members = wanted.transport.peer_id, genesis.members
        at = bisect(members, me)  # not all who go back ask the same of them
        self._named = [peer for peer in (wanted.host, *members[at:], *members[:at]) if peer != me]

    async def of_state(self) -> tuple[Offer, list[PeerId]]:
        """An offer of it, whose first chunk is held by now, and all who give the rest. Raises TransientError."""
        offers = await self._offers(self._named[:MOST_DONORS])
        for donor, offer in offers.items():
            if await self._is_it(donor, offer):
                return offer, [peer for peer, other in offers.items() if _has_the_rest(other, offer)]
        version = self._genesis.version
        raise TransientError(f"none of {len(self._named)} gives version {version}, at which the stage begins again")

    async def more_of(self, offer: Offer, giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        """Who has the rest of it, too: members that were on their way there themselves."""
        others = [peer for peer in self._named if peer not in giving and peer not in but]
        offers = await self._offers(others[: max(0, MOST_DONORS - len(giving))])
        return [peer for peer, other in offers.items() if _has_the_rest(other, offer)]

    async def _offers(self, donors: Sequence[PeerId]) -> dict[PeerId, Offer]:
        wanted, genesis = self._wanted, self._genesis

        async def ask(donor: PeerId) -> Offer | None:
            version = int(genesis.version)
            try:
                return await fetch_offer(
                    wanted.transport, donor, int(genesis.stage), wanted.layout, wanted.settings, version=version
                )
            except (TransientError, RemoteError) as error:
                log.info("version %d, at which the stage begins again, of %s: %s", version, donor[-6:], error)
                return None

        found = await asyncio.gather(*(ask(donor) for donor in donors))
        return {donor: offer for donor, offer in zip(donors, found, strict=True) if offer is not None}

    async def _is_it(self, donor: PeerId, offer: Offer) -> bool:
        """Whether it is the genesis's, which its first chunk shows."""
        wanted, version = self._wanted, int(self._genesis.version)
        hashes, first = offer.hashes, wanted.broken_off.chunks.get(offer.hashes[0])
        try:
            if first is None:
                first = await fetch_first_chunk(wanted.transport, donor, offer, wanted.settings)
            root = root_as(wanted.layout, first, hashes, offer.total_bytes, version=version, name=UNNAMED)
        except (TransientError, RemoteError) as error:
            log.info("the first chunk of version %d from %s: %s", version, donor[-6:], error)
            return False
        if root != self._genesis.state_digest:
            return False
        wanted.broken_off.chunks[hashes[0]] = first
        return True


def _has_the_rest(one: Offer, other: Offer) -> bool:
    return (one.hashes[1:], one.total_bytes) == (other.hashes[1:], other.total_bytes)
