"""This is where a peer audits what the other replicas sent on and sent back: by what their neighbours hold of it.

A draw hits microbatches, whatever a contribution lists; the peers of the stages beside this one say what passed between
them and those audited, and show it. So neither silence nor a crash nor an omission of the audited changes anything. An
audited peer is asked itself only for what it alone can show.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch

from peer.accuser import Accuser
from peer.auditor import OWED_S, AuditCounters
from peer.compute import Urgency
from peer.hop_desk import MAX_PASSED, PASSED
from peer.provable_past import provable_past
from peer.rounds import StageRounds
from peer.step_state import Applied
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value, signed_bytes
from swarm.core.contribution import Contribution, Work
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.data.batches import BatchReader
from swarm.host_protocol import HOP, OWED, max_exhibit_bytes
from swarm.identity import verify
from swarm.network.transport import Message
from verification.draws import REVEALED_AFTER, AuditBudget, HashChain, hop_draw, microbatch_rate
from verification.exchanges import MAX_EXCHANGES, Exchange, exhibit_of, read_exchanges
from verification.headers import BirthRecord, HopHeader, check_birth, ids_bytes
from verification.hop_claim import HopClaim, claims_of
from verification.kinds.data_fraud import DataFraud, differences
from verification.kinds.equivocation import Equivocation
from verification.kinds.hop_mismatch import HopMismatch
from verification.owed import MAX_REASON, OwedAudit, read_hop
from verification.papers import Exhibit
from verification.replay.compared import compared_activations, compared_claim
from verification.replay.stage_replay import StageReplay
from verification.ticket import Ticket
from verification.tolerance import Comparison, Grade

log = logging.getLogger(__name__)

MAX_DUE = 16
"""Steps."""
SIDES = (-1, 1)
T = TypeVar("T")


class Beside(NamedTuple):
    """Live peers of the stages beside this one."""

    before: frozenset[PeerId]
    after: frozenset[PeerId]

    def of_side(self, side: int) -> frozenset[PeerId]:
        return self.before if side < 0 else self.after


@dataclass(frozen=True)
class _Due:
    """A step that is over, and whose microbatches are to be drawn."""

    step: Step
    members: tuple[PeerId, ...]
    joins: tuple[PeerId, ...]
    """Who may have worked for the step before they were named."""
    reveal: bytes


async def _to_no_jury(mismatch: HopMismatch) -> None:
    pass


@dataclass
class HopAuditor:
    """Audits what the other members did of microbatches, as chance has it."""

    rounds: StageRounds
    ticket: Ticket
    draws: HashChain
    accuser: Accuser
    coordinator: PeerId
    beside: Callable[[], Beside]
    budget_factor: Callable[[PeerId, StageIndex, Version], float] = lambda peer, stage, version: 1.0
    """By what a peer's standing multiplies what is spent on auditing it."""
    suspect: Callable[[PeerId, Version], None] = lambda peer, version: None
    """Something short of fraud was found at a version of the stage: look closer."""
    prosecute: Callable[[HopMismatch], Coroutine[Any, Any, None]] = _to_no_jury
    """Brings a case, which need not have its past, before a jury."""
    reader: BatchReader | None = None
    """At stage 0: what every microbatch must hold."""
    counters: AuditCounters = field(default_factory=AuditCounters)

    def __post_init__(self) -> None:
        settings = self.rounds.settings
        self._budget = AuditBudget.of_run(settings.audits)
        self._due: deque[_Due] = deque(maxlen=MAX_DUE)
        self._replay = StageReplay(settings, self.rounds.chain.stage, mode=self.rounds.replica.model.mode)
        self._into: torch.Tensor | None = None
        hidden_size = self._replay.model.hidden_size
        self._largest = MAX_EXCHANGES * max_exhibit_bytes(settings, hidden_size)
        self._shape = (settings.batch.microbatch_size, settings.data.sequence_length, hidden_size)

    async def applied(self, applied: Applied) -> None:
        """A round is over: its microbatches can be drawn soon."""
        roster, me = applied.result.roster, self.rounds.me
        if me in roster.members and len(roster.members) > 1 and self._budget.hop > 0:
            self._due.append(_Due(roster.step, roster.members, roster.joins, self.draws.reveal(int(roster.step))))
        self._want_weights()

    async def run(self) -> None:
        """Audit step after step, for ever."""
        rounds, settings = self.rounds, self.rounds.settings
        while True:
            if not self._due:
                await rounds.wait_for_version(rounds.version + 1, timeout_s=1.0)
                continue
            due = self._due[0]
            if not await rounds.wait_for_version(due.step + REVEALED_AFTER, timeout_s=settings.deadlines.step_s):
                continue
            if self._is_late(due):
                self.counters.skipped += 1
            else:
                await self._audit_step(due)
            if self._due[0] is due:  # or it was dropped meanwhile, for too many were due
                self._due.popleft()
            self._want_weights()

    def _want_weights(self) -> None:
        """Keep the versions that what may be drawn was computed on."""
        delay_at = self.rounds.settings.delay_at
        due = [one.step for one in self._due if not self._is_late(one)]
        wanted = {version for step in due for version in range(step - delay_at(step), step + 1)}
        self.rounds.replica.past.want(wanted, by="hops")

    def _is_late(self, due: _Due) -> bool:
        """Whether the neighbours need not hold any more what is to be audited."""
        return self.rounds.version > due.step + self.rounds.settings.audits.retained_versions

    async def _audit_step(self, due: _Due) -> None:
        for target, number, holders in await self._hits(due):
            if self.accuser.has_accused(target):
                self.counters.skipped += 1
                continue
            try:
                await self._audit(due, target, number, holders)
            except (TransientError, TimeoutError, RemoteError, LocalError) as error:
                self.counters.skipped += 1
                log.info("audit of %s, microbatch %d of step %d is left out: %s", target, number, due.step, error)

    # -- what passed --------------------------------------------------------------------------------------

    async def _hits(self, due: _Due) -> list[tuple[PeerId, MicrobatchId, list[tuple[PeerId, int]]]]:
        """Whom the draw hits with which microbatch, and who has it, on which side."""
        beside = self.beside()
        asked = [(peer, side) for side in SIDES for peer in sorted(beside.of_side(side))]
        lists = await asyncio.gather(*(self._passed(peer, due) for peer, _ in asked))
        holders: dict[tuple[PeerId, MicrobatchId], list[tuple[PeerId, int]]] = {}
        now = self.rounds.chain.stage, Version(self.rounds.version)
        rates = {
            peer: microbatch_rate(len(due.members), self._budget, factor=self.budget_factor(peer, *now))
            for peer in (*due.members, *due.joins)
            if peer != self.rounds.me
        }
        for who, listed in zip(asked, lists, strict=True):
            for target, number in listed:
                drawn = hop_draw(due.reveal, number, auditor=self.rounds.me, target=target)
                if target in rates and drawn.hits_hop(rates[target]):
                    holders.setdefault((target, number), []).append(who)
        # A neighbour may list what never was: no more are followed than a stage can do, those first that most say.
        found = sorted(holders.items(), key=lambda item: (-len(item[1]), item[0]))
        most = 2 * self.rounds.settings.microbatches_per_step
        return [(target, number, who) for (target, number), who in found[:most]]

    async def _passed(self, peer: PeerId, due: _Due) -> tuple[tuple[PeerId, MicrobatchId], ...]:
        """What the peer says passed between it and this stage; nothing if it says nothing."""
        try:
            reply = await self._call(peer, PASSED, due, {}, max_body_bytes=0)
            fields = Fields("what passed", reply.meta)
            return fields.items("passed", _passed_item, max_items=MAX_PASSED)
        except (TransientError, RemoteError) as error:
            log.debug("what passed at step %d by %s: %s", due.step, peer[-6:], error)
            return ()

    # -- one audit ----------------------------------------------------------------------------------------

    async def _audit(
        self, due: _Due, target: PeerId, number: MicrobatchId, holders: Sequence[tuple[PeerId, int]]
    ) -> None:
        if self.rounds.adversary.is_lazy(due.step):
            self.counters.hops += 1
            return
        shown: dict[int, list[Exchange]] = {side: [] for side in SIDES}
        for peer, side in holders:
            try:
                shown[side] += await self._fetch(peer, due, target, number)
            except (TransientError, RemoteError) as error:
                log.info("microbatch %d of %s by %s: %s", number, target, peer[-6:], error)
        signed = await self._exact(lambda: self._signed_by(target, due, shown))
        if await self._is_of_other_data(target, due, signed) or await self._has_two_faces(target, shown[1]):
            return
        claims = await self._exact(lambda: self._claims(target, due, shown))
        proven = {claim.header.digest() for claim in claims}
        unproven = {header.digest(): (exchange, header) for exchange, header in signed}
        for exchange, header in [unproven[digest] for digest in sorted(unproven) if digest not in proven]:
            # What it was made from is with nobody else: the target itself can show it, and owes it.
            claims += await self._shown_by_itself(due, exchange.birth, header)
        if not claims:
            raise TransientError("nobody shows both what came in and what went out")
        self.counters.hops += 1
        compute = self.rounds.compute
        found = [await compute.run(Urgency.AUDIT, partial(self._compare, claim)) for claim in claims]
        worst, claim = max(zip(found, claims, strict=True), key=lambda pair: pair[0].measured / pair[0].fraud)
        if worst.grade is Grade.HONEST:
            share = worst.measured / worst.fraud
            self.counters.largest_honest_share = max(self.counters.largest_honest_share, share)
            return
        log.warning("%s at step %d, microbatch %d: %s", target, due.step, number, worst.reason)
        if worst.grade is Grade.SUSPICIOUS:
            self.counters.suspicious += 1
            self.suspect(target, Version(int(due.step)))
            return
        self.counters.frauds += 1
        version = int(claim.header.version)
        self.rounds.spawn(self.prosecute(HopMismatch(claim=claim)))
        held = await provable_past(self.rounds, self.coordinator, oldest=version, version=version)
        whole = HopMismatch(claim=claim, past=held.past, state_chunks=held.snapshot.chunks(), bodies=held.bodies)
        await self.accuser.accuse(whole)

    def _compare(self, claim: HopClaim) -> Comparison:
        """(compute)"""
        replay = self._replay
        past = self.rounds.replica.past.get(int(claim.header.version))
        try:
            replay.hold(claim.header.version, past.weights, past.ahead, ahead_is_known=past.ahead_is_known)
            if self._into is None:
                self._into = torch.zeros(replay.layout.num_values, dtype=torch.float32, device=replay.model.device)
            return compared_claim(replay, claim, self._into)
        finally:
            replay.release()

    def _signed_by(
        self, target: PeerId, due: _Due, shown: dict[int, list[Exchange]]
    ) -> list[tuple[Exchange, HopHeader]]:
        """(exact) What the target signed of the step, in these exchanges."""
        found = []
        for side, header_of in ((1, _forward), (-1, _gradient)):
            for exchange in shown[side]:
                header = header_of(exchange)
                if header is None or header.producer != target or exchange.birth.step != due.step:
                    continue
                if exchange.birth.era != self.rounds.era or not _is_signed(exchange, header, self.rounds.run_id):
                    continue
                found.append((exchange, header))
        return found

    def _claims(self, target: PeerId, due: _Due, shown: dict[int, list[Exchange]]) -> list[HopClaim]:
        """(exact) What the target's word on the step can be compared with."""
        ids = None
        numbers = {exchange.birth.microbatch_id for exchange in shown[1]}
        if self.reader is not None and len(numbers) == 1:
            ids = ids_bytes(self.reader.batch(numbers.pop())[0])
        held: dict[bytes, HopClaim] = {}
        for claim in claims_of(target, shown[-1], shown[1], ids=ids):
            if claim.birth.step != due.step or claim.birth.era != self.rounds.era:
                continue
            try:
                claim.check(self.rounds.settings, run_id=self.rounds.run_id)
            except RemoteError as error:
                log.info("a %s of %s: %s", claim.header.direction, target, error)
                continue
            held[claim.header.digest()] = claim
        return [held[key] for key in sorted(held)]

    async def _is_of_other_data(self, target: PeerId, due: _Due, signed: Sequence[tuple[Exchange, HopHeader]]) -> bool:
        """Whether a source is accused of reading something else than the data order has."""
        reader = self.reader
        if reader is None:
            return False
        for birth in {exchange.birth.digest(): exchange.birth for exchange, _ in signed}.values():
            batch = await self._exact(partial(reader.batch, birth.microbatch_id))
            if birth.source == target and differences(birth, *batch):
                log.warning("%s at step %d: a microbatch of other data", target, due.step)
                self.counters.frauds += 1
                await self.accuser.accuse(DataFraud(birth=birth))
                return True
        return False

    async def _has_two_faces(self, target: PeerId, sent: Sequence[Exchange]) -> bool:
        """Whether the target is accused of having sent two peers two things for one."""
        settings = self.rounds.settings
        for one, other in combinations([exchange for exchange in sent if exchange.forward.producer == target], 2):
            case = Equivocation(one=one.forward, other=other.forward, bodies=(one.activation, other.activation))
            if case.contradiction is None or settings.optimizer.correction == "extrapolate":
                continue

            def differ(case: Equivocation = case, one: Exchange = one, other: Exchange = other) -> bool:
                case.check_signatures(self.rounds.run_id)
                first, second = case.bodies
                if [bulk_digest(first), bulk_digest(second)] != [one.forward.body_digest, other.forward.body_digest]:
                    return False
                return compared_activations(settings, first, second, self._shape).grade is Grade.FRAUD

            if await self._exact(differ):
                log.warning("%s signed %s", target, case.contradiction)
                self.counters.frauds += 1
                await self.accuser.accuse(case)
                return True
        return False

    # -- asked --------------------------------------------------------------------------------------------

    async def _shown_by_itself(self, due: _Due, birth: BirthRecord, header: HopHeader) -> list[HopClaim]:
        """The header beside what it was made from, as its maker shows it to this peer, or to the host; none if neither
        gets it. So who signs for something that nobody shows owes it."""
        rounds, target, run_id = self.rounds, header.producer, self.rounds.run_id
        if rounds.chain.stage == 0:  # nothing comes in there, and the data are here
            return []
        settings, number = rounds.settings, birth.microbatch_id

        async def read(reply: Message) -> list[HopClaim]:
            self.counters.bytes += len(reply.body)
            return [await self._exact(lambda: read_hop(reply.meta, reply.body, header, settings, run_id=run_id))]

        meta: dict[str, Value] = {"target": target, "microbatch_id": number, "contribution": None}
        meta["header"] = header.digest()
        try:
            return await read(await self._call(target, HOP, due, meta, max_body_bytes=self._largest))
        except (TransientError, RemoteError) as error:
            reason = str(error)[:MAX_REASON]
            log.info("what microbatch %d of %s was made from: %s", number, target, error)
        owed = OwedAudit(
            run_id=run_id,
            stage=rounds.chain.stage,
            step=due.step,
            auditor=rounds.me,
            target=target,
            reveal=due.reveal,
            what="hop",
            number=int(number),
            reason=reason,
            birth=birth,
            header=header,
        ).signed_by(rounds.identity)
        asked = Message({"owed": owed.to_value()})
        try:
            return await read(
                await rounds.transport.call(
                    self.coordinator, OWED, asked, timeout_s=OWED_S, max_body_bytes=self._largest
                )
            )
        except (TransientError, RemoteError) as error:
            self.counters.debts += 1
            if isinstance(error, RemoteError) and error.kind == "debt":
                self.suspect(target, Version(int(due.step)))
            log.warning("microbatch %d of %s at step %d is owed: %s", number, target, due.step, error)
            return []

    async def exhibit(self, contribution: Contribution, work: Work, reveal: bytes) -> Exhibit:
        """An entry of a contribution that was drawn, from its maker's neighbours. Raises TransientError."""
        due, target, number = _Due(contribution.step, (), (), reveal), contribution.peer_id, work.microbatch_id
        beside, shown = self.beside(), dict[int, list[Exchange]]()
        for side in SIDES:
            asked = [self._fetch_or_not(peer, due, contribution, number) for peer in sorted(beside.of_side(side))]
            shown[side] = [exchange for found in await asyncio.gather(*asked) for exchange in found]
        ids = ids_bytes(self.reader.batch(number)[0]) if self.reader is not None else b""

        def put_together() -> Exhibit:
            found = exhibit_of(work, shown[-1], shown[1], ids=ids)
            if found is None:
                raise TransientError(f"microbatch {number} of {target} is not with its neighbours")
            num_stages = self.rounds.settings.model.num_stages
            found.check(target, run_id=self.rounds.run_id, stage=contribution.stage, num_stages=num_stages)
            found.check_work(work, target)
            return found

        return await self._exact(put_together)

    async def _fetch_or_not(
        self, peer: PeerId, due: _Due, contribution: Contribution, number: MicrobatchId
    ) -> tuple[Exchange, ...]:
        try:
            return await self._fetch(peer, due, contribution.peer_id, number, contribution)
        except (TransientError, RemoteError) as error:
            log.debug("microbatch %d of %s by %s: %s", number, contribution.peer_id, peer[-6:], error)
            return ()

    async def _fetch(
        self,
        peer: PeerId,
        due: _Due,
        target: PeerId,
        number: MicrobatchId,
        contribution: Contribution | None = None,
    ) -> tuple[Exchange, ...]:
        meta: dict[str, Value] = {
            "target": target,
            "microbatch_id": number,
            "contribution": value_or_none(contribution),
            "header": None,
        }
        reply = await self._call(peer, HOP, due, meta, max_body_bytes=self._largest)
        self.counters.bytes += len(reply.body)
        return await self._exact(lambda: read_exchanges(reply.meta, reply.body))

    async def _call(
        self, peer: PeerId, method: str, due: _Due, meta: dict[str, Value], *, max_body_bytes: int
    ) -> Message:
        common: dict[str, Value] = {"step": due.step, "ticket": self.ticket.to_value(), "reveal": due.reveal}
        return await self.rounds.transport.call(
            peer,
            method,
            Message({**common, **meta}),
            timeout_s=self.rounds.settings.deadlines.call_s,
            max_body_bytes=max_body_bytes,
        )

    def _exact(self, work: Callable[[], T]) -> Coroutine[None, None, T]:
        return self.rounds.exact.run(Urgency.AUDIT, work)


def _forward(exchange: Exchange) -> HopHeader | None:
    return exchange.forward


def _gradient(exchange: Exchange) -> HopHeader | None:
    return exchange.gradient


def _is_signed(exchange: Exchange, header: HopHeader, run_id: str) -> bool:
    birth = exchange.birth
    try:
        check_birth(birth, run_id=run_id)
    except RemoteError:
        return False
    is_of_it = (header.run_id, header.microbatch_id, header.attempt) == (run_id, birth.microbatch_id, birth.attempt)
    return is_of_it and verify(header.producer, signed_bytes(header.DOMAIN, header.signed_value()), header.signature)


def _passed_item(value: Value) -> tuple[PeerId, MicrobatchId]:
    fields = Fields.of_list("what passed", value, "peer", "microbatch_id")
    return fields.peer("peer"), MicrobatchId(fields.integer("microbatch_id"))
