"""From where a run goes on whose peers had left: from the newest state that all of its stages hold together.

The host asks all that are there what they can make again, folds what is certified of it, chooses the newest version
that every stage has (from peers, from the checkpoints, or from what the last peer of a stage handed over), has it
prepared, and signs geneses of a new era.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bootstrap.program.host_context import HostContext
from bootstrap.program.ledger import Ledger
from bootstrap.round.asking import of_each
from bootstrap.state.archived_states import Archived, ArchivedStates
from bootstrap.state.beginning import StageSource, StageStart, stage_start
from bootstrap.state.telling import tell_all
from swarm.checkpoint.state import CHUNK_BYTES, UNNAMED, num_chunks_of, verify_chunk, verify_hashes
from swarm.checkpoint.transfer import MAX_HASH_BYTES, MAX_STATE_BYTES_PER_VALUE
from swarm.core.canonical import Value, digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.seats import seats, weight_of
from swarm.core.state.coming_back import (
    Era,
    Holding,
    Point,
    StageSeen,
    goes_on_as,
    highest_said,
    newest_common,
    point_of,
    points_of,
)
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import HOLDINGS, MAX_HOLDINGS, PREPARE
from swarm.network.transport import Message
from verification.state.anchor import Anchor

log = logging.getLogger(__name__)

PREPARE_CALL_S = 10.0
LOOK_S = 0.2

LookAgain: TypeAlias = Callable[[], Awaitable[Sequence[StageSeen]]]
"""Who is there of each stage by now."""
BeginAnew: TypeAlias = Callable[[list[Genesis], Sequence[StageSource], Value], None]
"""Told the new geneses, the states they name, and why they are: they count from then on."""


@dataclass(frozen=True)
class _Prepared:
    """A peer's word for a state that it has made."""

    source: StageSource
    chain: StageChain


@dataclass(frozen=True)
class _Choice:
    """What the run is to go on from."""

    point: Point
    is_present: bool
    """Steps have been taken since the stages began last."""
    number: int
    """It goes on as this version."""
    highest: int
    """That anybody has made."""
    holders: tuple[Mapping[PeerId, Holding], ...]
    """By stage, who can make it again, and from what."""
    archived: tuple[Archived | None, ...]
    """By stage, what the host has itself."""


class GoingOn:
    """Finds the state, and has the run go on from it."""

    def __init__(self, host: HostContext, archived: ArchivedStates, begin_anew: BeginAnew) -> None:
        """`archived`: what this host has itself."""
        self._host = host
        self._archived = archived
        self._begin_anew = begin_anew
        self._telling: asyncio.Future[None] | None = None

    async def stop(self) -> None:
        """Tell nobody any more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    async def go_on(self, seen: Sequence[StageSeen], look_again: LookAgain, left_at: Collection[int]) -> bool:
        """Sign and tell where the run goes on from; whether it does. `left_at`: versions that those who left were at.

        Raises TransientError, RemoteError, LocalError or TimeoutError if what is held cannot be had.
        """
        held = [await self._holdings(stage.training | stage.waiting) for stage in seen]
        for stage, of_stage in enumerate(held):
            lineage = self._host.beginning.geneses[stage].name
            newest = [(max((one.newest for one in kept if one.lineage == lineage), default=-1), peer)
                      for peer, kept in sorted(of_stage.items())]  # fmt: skip
            await self._host.followed.catch_up(stage, newest, most_behind=0)
        # With what is certified by now others may be members, and may be missing.
        before, seen = seen, await look_again()
        if any(was.is_lost != now.is_lost for was, now in zip(before, seen, strict=True)):
            return False
        eras = eras_of(self._host.ledger)
        choice = self._choose(seen, held, eras, left_at)
        if choice is None:
            log.warning("no version of the run is held by all stages, not even by this host")
            return False
        async with asyncio.timeout(self._host.beginning.states_s):
            found = await asyncio.gather(*(self._source(stage, choice, one) for stage, one in enumerate(seen)))
        # Where nobody has gone on since the stages began last, the data is where it was then.
        is_begun = choice.point == point_of(eras[-1].first, eras)
        leases = self._host.beginning.geneses[0].leases if is_begun else found[0][2]
        members = [of_stage for _, of_stage, _ in found]
        if not all(members):
            return False
        training = frozenset[PeerId]().union(*(one.training for one in seen))
        self._begin(choice, [source for source, _, _ in found], members, leases, training)
        return True

    def _choose(
        self,
        seen: Sequence[StageSeen],
        held: Sequence[Mapping[PeerId, list[Holding]]],
        eras: Sequence[Era],
        left_at: Collection[int],
    ) -> _Choice | None:
        certified = [int(self._host.followed[stage].version) for stage in range(len(held))]
        by_peers: list[dict[Point, dict[PeerId, Holding]]] = []
        for stage, of_stage in enumerate(held):
            found: dict[Point, dict[PeerId, Holding]] = {}
            for peer, holdings in sorted(of_stage.items()):
                for given, holding in points_of(holdings, eras, stage, newest=certified[stage]).items():
                    found.setdefault(given, {})[peer] = holding
            by_peers.append(found)
        archived = [self._archived.held(stage, eras) for stage in range(len(held))]
        point = newest_common([{*found, *at_host} for found, at_host in zip(by_peers, archived, strict=True)])
        if point is None:
            return None
        # No more than a little of what is only said: a number that is used up is gone for ever.
        said = [one.newest for of_stage in held for kept in of_stage.values() for one in kept]
        highest = highest_said(max(certified), [*said, *left_at])
        to = point.version if point.era == len(eras) - 1 else eras[-1].first
        holders, at_host = [found.get(point, {}) for found in by_peers], [found.get(point) for found in archived]
        # Whoever trains stands still from when he is asked for the state.
        is_complete = all(
            one.is_complete and one.training <= {*there} for one, there in zip(seen, holders, strict=True)
        )
        last = self._host.run.settings.optimizer.total_steps
        number = goes_on_as(to, highest=highest, is_complete=is_complete, last=last)
        return _Choice(point, point.era == len(eras) - 1, number, highest, tuple(holders), tuple(at_host))

    async def _holdings(self, peers: Collection[PeerId]) -> dict[PeerId, list[Holding]]:
        async def one(peer: PeerId) -> list[Holding]:
            reply = await self._host.transport.call(
                peer, HOLDINGS, Message(), timeout_s=PREPARE_CALL_S, max_body_bytes=0
            )
            fields = Fields("holdings answer", reply.meta)
            held = fields.items("held", _holding, max_items=MAX_HOLDINGS)
            fields.done()
            return [*held]

        return await of_each(peers, one)

    # -- the states ---------------------------------------------------------------------------------------

    async def _source(
        self, stage: int, choice: _Choice, seen: StageSeen
    ) -> tuple[StageSource, list[PeerId], LeaseTable]:
        """The stage's state, who begins with it, and how far the data was used. Raises TransientError."""
        if choice.holders[stage]:
            prepared = await self._prepared(stage, choice, choice.holders[stage])
            agreed = self._agreed(stage, choice, prepared)
            if agreed is not None:
                source, chain = agreed
                return source, sorted(peer for peer, one in prepared.items() if one.source == source), chain.leases
        archived, layout = choice.archived[stage], self._host.beginning.stages[stage].state.layout
        if archived is None:
            raise TransientError(f"stage {stage}: those who hold version {choice.point.version} do not agree on it")

        def load() -> StageStart:
            return stage_start(stage, replace(archived.load(layout), version=choice.number, name=UNNAMED))

        start, leases = await asyncio.to_thread(load), await asyncio.to_thread(archived.leases)
        self._host.beginning.begin_from(stage, start)
        return StageSource.of_start(start), sorted(seen.waiting | seen.training), leases

    async def _prepared(
        self, stage: int, choice: _Choice, holders: Mapping[PeerId, Holding]
    ) -> dict[PeerId, _Prepared]:
        """What each holder has made. Once enough of them agree the others have as long again, and `PREPARE_CALL_S` at
        least: nobody keeps a run waiting that could go on. Raises TransientError if nobody has made it.
        """
        layout, made = self._host.beginning.stages[stage].state.layout, dict[PeerId, _Prepared]()

        async def one(peer: PeerId) -> None:
            held = holders[peer]
            meta: dict[str, Value] = {"lineage": held.lineage, "version": held.newest, "number": choice.number}
            while True:
                reply = await self._host.transport.call(
                    peer,
                    PREPARE,
                    Message(meta),
                    timeout_s=PREPARE_CALL_S,
                    max_body_bytes=MAX_HASH_BYTES + CHUNK_BYTES,
                )
                fields = Fields("prepared", reply.meta)
                if fields.integer("newest") > choice.highest:
                    raise TransientError(f"{peer} has gone on")
                if fields.optional("state"):
                    made[peer] = _read_prepared(Fields("prepared state", fields.message("state")), reply.body)
                    return
                await asyncio.sleep(LOOK_S)

        def _read_prepared(fields: Fields, body: bytes | bytearray | memoryview) -> _Prepared:
            total = fields.integer("total_bytes", low=1, high=MAX_STATE_BYTES_PER_VALUE * layout.num_values + (1 << 24))
            root, chain = fields.octets("digest", length=32), StageChain.from_value(fields.message("chain"))
            fields.done()
            at = 32 * num_chunks_of(total)
            hashes = tuple(bytes(body[start : start + 32]) for start in range(0, at, 32))
            verify_hashes(root, hashes, total)
            verify_chunk(hashes, 0, body[at:])
            return _Prepared(StageSource(layout, choice.number, root, total, hashes, bytes(body[at:])), chain)

        loop = asyncio.get_running_loop()
        began, give_up_at = loop.time(), math.inf
        asking = asyncio.ensure_future(of_each(holders, one))
        try:
            while not asking.done() and loop.time() < give_up_at:
                await asyncio.wait({asking}, timeout=LOOK_S)
                if give_up_at == math.inf and self._agreed(stage, choice, made) is not None:
                    give_up_at = loop.time() + max(loop.time() - began, PREPARE_CALL_S)
            if asking.done():
                asking.result()
        finally:
            asking.cancel()
        if not made:
            raise TransientError(f"nobody of stage {stage} has made version {choice.point.version} again")
        return made

    def _agreed(
        self, stage: int, choice: _Choice, prepared: Mapping[PeerId, _Prepared]
    ) -> tuple[StageSource, StageChain] | None:
        """The state that most say, among strangers one that is anchored or that members of more than two thirds of the
        work say, if what is certified of it is what this host knows; None if nobody is believed."""
        version = choice.point.version
        known = self._host.followed.chain_at(stage, version) if choice.is_present else None
        right = {peer: one for peer, one in prepared.items() if known is None or one.chain.name == known.name}
        saying: dict[bytes, list[PeerId]] = {}
        for peer, one in sorted(right.items()):
            # A version's name binds no leases.
            said = one.source.digest if known is not None else digest("said", [one.source.digest, one.chain.to_value()])
            saying.setdefault(said, []).append(peer)
        most_said = [peers for _, peers in sorted(saying.items(), key=lambda item: (-len(item[1]), item[0]))]
        if self._host.run.settings.trust == "public":
            weights = seats(known.basis.work_of) if known is not None else {}
            most_said = [
                peers
                for peers in most_said
                if 3 * weight_of(weights, [peer for peer in peers if peer in weights]) > 2 * sum(weights.values()) > 0
                or self._anchor_over(stage, choice, right[peers[0]].source) is not None
            ]
        if not most_said:
            return None
        agreed = right[most_said[0][0]]
        anchor = self._anchor_over(stage, choice, agreed.source)
        return agreed.source, known or (anchor.chain if anchor is not None else agreed.chain)

    def _anchor_over(self, stage: int, choice: _Choice, source: StageSource) -> Anchor | None:
        """The run key's word on this very state."""
        begun_at = int(self._host.beginning.geneses[stage].version)
        anchor = self._host.justice.anchor_of(stage, choice.point.version if choice.is_present else begun_at)
        try:
            is_it = anchor is not None and source.digest_as(int(anchor.version), anchor.name) == anchor.state_digest
        except RemoteError:  # its first chunk is no state's
            return None
        return anchor if is_it else None

    def _begin(
        self,
        choice: _Choice,
        sources: list[StageSource],
        members: Sequence[Sequence[PeerId]],
        leases: LeaseTable,
        training: Collection[PeerId],
    ) -> None:
        done, to = self._host.progress.done_versions(), choice.point.version
        facts: dict[str, Value] = {"asked": 0, "from": done, "to": to, "version": choice.number, "skip": []}
        geneses = self._host.beginning.signed(
            sources, members, leases, known=self._host.followed.recent_work, era=self._host.books().lineages[0]
        )
        self._begin_anew(geneses, sources, facts)
        self._host.beginning.begun(geneses, to)
        again = max(0, choice.highest - to)
        self._host.emit({"event": "continued", "from": done, "to": to, "version": choice.number, "again": again})
        if training:
            stage_of = self._host.progress.peers
            stages = [[peer for peer in training if stage_of[peer].stage == stage] for stage in range(len(geneses))]
            self._telling = asyncio.ensure_future(tell_all(self._host.transport, geneses, to, stages))


def eras_of(ledger: Ledger) -> list[Era]:
    """The beginnings of the run, as far as the present branch has them."""
    eras: list[Era] = []
    to, number, lineages = 0, -1, dict[int, bytes]()
    for event in ledger.events("rollback", "genesis", "amendment"):
        if event.kind == "amendment":  # what was kept before was made under other settings, perhaps of other stages
            eras.clear()
            number = -1
            continue
        if event.kind == "rollback":
            facts: Any = event.facts
            to = int(facts["to"])
            continue
        genesis = Genesis.from_value(event.facts)
        if genesis.era != number:
            number, lineages = genesis.era, {}
            while len(eras) > 1 and to < eras[-1].first:
                eras.pop()
            if eras:
                eras[-1] = replace(eras[-1], last=to)
        elif eras:
            eras.pop()
        lineages[int(genesis.stage)] = genesis.name
        eras.append(Era(int(genesis.version), None, tuple(lineages[stage] for stage in sorted(lineages))))
    return eras


def _holding(value: Value) -> Holding:
    fields = Fields.of_list("holding", value, "lineage", "oldest", "newest")
    oldest = fields.integer("oldest")
    return Holding(fields.octets("lineage", length=32), oldest, fields.integer("newest", low=oldest, high=1 << 40))
