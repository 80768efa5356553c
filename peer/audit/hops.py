"""Audits of what the other replicas of a stage sent on and sent back: by what their neighbours hold of it.

A draw hits microbatches, whatever a contribution lists; the peers of the stages beside this one say what passed between
them and those audited, and show it. An audited peer is asked itself only for what it alone can show.
"""

import asyncio
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, zip_longest
from typing import TypeAlias

from peer.audit.beside import SIDES, Beside
from peer.audit.inquiry import Inquiry
from peer.stage.events import Applied
from peer.state.past_weights import standing_on
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.host_protocol import HOP
from swarm.network.transport import Message
from verification.audit.draws import hop_draw, microbatch_rate
from verification.audit.owed import read_hop
from verification.audit.tolerance import CAUTION, Comparison, Grade
from verification.kinds.equivocation import Equivocation
from verification.kinds.hop_mismatch import HopMismatch
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.pipeline.hop_claim import HopClaim, claims_of
from verification.replay.compared import compared_activations, compared_claim
from verification.replay.stage_replay import StageReplay

log = logging.getLogger(__name__)

Hit: TypeAlias = tuple[PeerId, MicrobatchId]
"""Whose microbatch the draw hits."""
Holder: TypeAlias = tuple[PeerId, int]
"""Who has it, and on which side."""


@dataclass(frozen=True)
class StepDue:
    """A step that is over, and whose microbatches are to be drawn."""

    step: Step
    members: tuple[PeerId, ...]
    joins: tuple[PeerId, ...]
    """Who may have worked for the step before they were named."""
    reveal: bytes

    def __str__(self) -> str:
        return f"microbatches of step {self.step}"


class HopAudits:
    """Of the other members' microbatches."""

    name = "hops"
    most_due = 16

    def __init__(self, inquiry: Inquiry, beside: Beside) -> None:
        self._inquiry = inquiry
        self._beside = beside
        self._steps = steps = inquiry.steps
        self._replay = StageReplay(steps.context.settings, steps.chain.stage, model=steps.replica.model_of_replays())

    def drawn(self, applied: Applied, reveal: bytes) -> Iterable[StepDue]:
        """The step itself: which of its microbatches is drawn when their neighbours say which there were."""
        roster = applied.result.roster
        has_neighbours = self._steps.context.settings.model.num_stages > 1
        if has_neighbours and len(roster.members) > 1 and self._steps.context.settings.audits.hop_budget > 0:
            yield StepDue(roster.step, roster.members, roster.joins, reveal)

    def computed_on(self, due: StepDue) -> Iterable[int]:
        """What its microbatches may have been computed on."""
        return range(due.step - self._steps.context.settings.delay_at(due.step), due.step + 1)

    async def audit(self, due: StepDue) -> None:
        """Each microbatch that is drawn; one that cannot be audited is left out."""
        for target, number, holders in await self._hits(due):
            try:
                self._inquiry.check_not_accused(target)
                await self._audit(due, target, number, holders)
            except (TransientError, TimeoutError, RemoteError, LocalError) as error:
                self._inquiry.counters.skipped += 1
                log.info("audit of %s, microbatch %d of step %d is left out: %s", target, number, due.step, error)

    async def _hits(self, due: StepDue) -> list[tuple[PeerId, MicrobatchId, list[Holder]]]:
        """Whom the draw hits with which microbatch, and who has it, on which side."""
        inquiry, me = self._inquiry, self._steps.context.me
        asked = [(peer, side) for side in SIDES for peer in self._beside.on(side)]
        lists = await asyncio.gather(*(self._beside.passed(peer, due) for peer, _ in asked))
        holders: dict[Hit, list[Holder]] = {}
        rates = {
            peer: inquiry.rate(microbatch_rate, len(due.members), peer, self._steps.version)
            for peer in (*due.members, *due.joins)
            if peer != me
        }
        for who, listed in zip(asked, lists, strict=True):
            for target, number in dict.fromkeys(listed):
                drawn = hop_draw(due.reveal, number, auditor=me, target=target)
                if target in rates and drawn.hits_hop(rates[target]):
                    holders.setdefault((target, number), []).append(who)
        most = 2 * self._steps.context.settings.microbatches_of_one
        return [(*hit, holders[hit]) for hit in in_turns(holders, last=self._beside.show_nothing)[:most]]

    # -- one audit ----------------------------------------------------------------------------------------

    async def _audit(self, due: StepDue, target: PeerId, number: MicrobatchId, holders: Sequence[Holder]) -> None:
        inquiry = self._inquiry
        # All at once: who takes its time takes it from nobody else.
        found_by = await asyncio.gather(*(self._beside.exchanges(peer, due, target, number) for peer, _ in holders))
        shown: dict[int, list[Exchange]] = {side: [] for side in SIDES}
        for (_, side), exchanges in zip(holders, found_by, strict=True):
            shown[side] += exchanges
        signed = await inquiry.exact(lambda: self._signed_by(target, due, shown))
        births = {exchange.birth.digest(): exchange.birth for exchange, _ in signed}
        if await inquiry.is_of_other_data(target, due.step, births.values()):
            return
        if await self._has_two_faces(target, shown[1]):
            return
        ids = await self._beside.input_ids(number) if shown[1] else None
        claims = await inquiry.exact(lambda: self._claims(target, due, shown, ids))
        proven = {claim.header.digest() for claim in claims}
        unproven = {header.digest(): (exchange, header) for exchange, header in signed}
        for exchange, header in [unproven[digest] for digest in sorted(unproven) if digest not in proven]:
            # What it was made from is with nobody else: the target itself can show it, and owes it.
            claims += await self._shown_by_itself(due, exchange.birth, header)
        if not claims:
            raise TransientError("nobody shows both what came in and what went out")
        inquiry.counters.hops += 1
        found = [(await inquiry.replay(partial(self._compare, claim)), claim) for claim in claims]
        wrong = [(compared, claim) for compared, claim in found if compared.grade is not Grade.HONEST]
        for compared, claim in [max(wrong, key=lambda pair: pair[0].share)] if wrong else found:
            await inquiry.conclude(due.step, claim.kind, compared, HopMismatch(claim=claim))

    def _compare(self, claim: HopClaim) -> Comparison:
        """(replays)"""
        replay, version = self._replay, claim.header.version
        with standing_on(replay, {version: self._steps.replica.past.get(int(version))}):
            return compared_claim(replay, claim, caution=CAUTION)

    def _signed_by(
        self, target: PeerId, due: StepDue, shown: dict[int, list[Exchange]]
    ) -> list[tuple[Exchange, HopHeader]]:
        """(exact) What the target signed of the step, in these exchanges."""
        found = []
        for side, header_of in ((1, _forward), (-1, _gradient)):
            for exchange in shown[side]:
                header = header_of(exchange)
                if header is None or header.producer != target or exchange.birth.step != due.step:
                    continue
                if exchange.birth.era == self._steps.era:
                    found.append((exchange, header))
        return found

    def _claims(
        self, target: PeerId, due: StepDue, shown: dict[int, list[Exchange]], ids: bytes | None
    ) -> list[HopClaim]:
        """(exact) What the target's word on the step can be compared with; `ids` came in at stage 0."""
        held: dict[bytes, HopClaim] = {}
        for claim in claims_of(target, shown[-1], shown[1], ids=ids):
            if claim.birth.step != due.step or claim.birth.era != self._steps.era:
                continue
            try:
                claim.check(self._steps.context.settings, run_id=self._steps.context.run_id)
            except RemoteError as error:
                log.info("a %s of %s: %s", claim.header.direction, target, error)
                continue
            held[claim.header.digest()] = claim
        return [held[key] for key in sorted(held)]

    async def _has_two_faces(self, target: PeerId, sent: Sequence[Exchange]) -> bool:
        """Whether the target is accused of having sent two peers two things for one."""
        settings, width = self._steps.context.settings, self._replay.model.hop_width
        shape = (settings.batch.microbatch_size, settings.data.sequence_length, width)
        for one, other in combinations([exchange for exchange in sent if exchange.forward.producer == target], 2):
            case = Equivocation(one=one.forward, other=other.forward, bodies=(one.activation, other.activation))
            if case.contradiction is None or settings.optimizer.correction == "extrapolate":
                continue

            def differ(case: Equivocation = case) -> bool:
                first, second = case.bodies
                try:
                    return compared_activations(settings, first, second, shape).grade is Grade.FRAUD
                except RemoteError as error:  # its neighbour, who shows it, has accused it, or is its friend
                    log.info("%s signed what does not decode: %s", target, error)
                    return False

            if await self._inquiry.exact(differ):
                log.warning("%s signed %s", target, case.contradiction)
                await self._inquiry.accuse(case)
                return True
        return False

    # -- asked --------------------------------------------------------------------------------------------

    async def _shown_by_itself(self, due: StepDue, birth: BirthRecord, header: HopHeader) -> list[HopClaim]:
        """The header beside what it was made from, as its maker shows it to this peer, or to the host; none if neither
        gets it. So who signs for something that nobody shows owes it."""
        steps, inquiry, target = self._steps, self._inquiry, header.producer
        if steps.chain.stage == 0:  # nothing comes in there, and the data are here
            return []

        def read(reply: Message) -> HopClaim:
            return read_hop(reply.meta, reply.body, header, steps.context.settings, run_id=steps.context.run_id)

        number = birth.microbatch_id
        meta: dict[str, Value] = {"target": target, "microbatch_id": number, "contribution": None}
        meta["header"] = header.digest()
        try:
            claim = await inquiry.shown(
                *(due, target, HOP, meta, read),
                what="hop",
                number=int(number),
                birth=birth,
                header=header,
                max_body_bytes=self._beside.largest,
            )
        except (TransientError, RemoteError) as error:
            inquiry.counters.debts += 1
            if isinstance(error, RemoteError) and error.kind == "debt":
                inquiry.standing.suspect(target, Version(int(due.step)))
            log.warning("microbatch %d of %s at step %d is owed: %s", number, target, due.step, error)
            return []
        return [claim]


def _forward(exchange: Exchange) -> HopHeader | None:
    return exchange.forward


def _gradient(exchange: Exchange) -> HopHeader | None:
    return exchange.gradient


def in_turns(holders: Mapping[Hit, Sequence[Holder]], *, last: Container[PeerId]) -> list[Hit]:
    """What was listed, one of each who listed it in turn, first what most list: whoever lists what never was displaces
    nothing of others. Those in `last` have their turns when the others have had all of theirs."""
    queues: dict[Holder, list[Hit]] = {}
    for hit in sorted(holders, key=lambda hit: (-len(holders[hit]), hit)):
        for holder in holders[hit]:
            queues.setdefault(holder, []).append(hit)
    found: dict[Hit, None] = {}
    for is_last in (False, True):
        listers = [queues[holder] for holder in sorted(queues) if (holder[0] in last) == is_last]
        found |= dict.fromkeys(hit for turn in zip_longest(*listers) for hit in turn if hit is not None)
    return list(found)
