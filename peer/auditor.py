"""This is where a peer audits the other replicas of its stage: what it drew is fetched, replayed and compared.

A draw is revealed two versions after the contribution it is of. Replays are the least urgent of this peer's work.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from peer.accuser import Accuser
from peer.compute import Urgency
from peer.past_weights import PastVersion
from peer.provable_past import provable_past
from peer.rounds import StageRounds
from peer.step_state import Applied
from swarm.averaging.codecs import leaves_residual
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.contribution import Contribution, Work
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.data.batches import BatchReader
from swarm.host_protocol import EXHIBIT, OWED, PART, max_exhibit_bytes
from swarm.network.transport import Message
from verification.draws import REVEALED_AFTER, AuditBudget, HashChain, contribution_rate, draw
from verification.kinds.data_fraud import DataFraud, differences
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.owed import MAX_REASON, OwedAudit, read_exhibit, read_part
from verification.papers import Bytes, Exhibit
from verification.replay.compared import compared_contribution
from verification.replay.stage_replay import StageReplay
from verification.ticket import Ticket
from verification.tolerance import Grade

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DUE = 256
OWED_S = 30.0


@dataclass
class AuditCounters:
    """What this peer's audits came to; for status and reports."""

    hops: int = 0
    contributions: int = 0
    suspicious: int = 0
    frauds: int = 0
    debts: int = 0
    """Audits that were not served."""
    skipped: int = 0
    """Drawn, but too late or not replayable here."""
    largest_honest_share: float = 0.0
    """Of the fraud bound, over all audits that found nothing."""
    bytes: int = 0


async def _to_no_jury(mismatch: ReplayMismatch) -> None:
    pass


async def _nowhere(contribution: Contribution, work: Work, reveal: bytes) -> Exhibit:
    raise TransientError("no neighbour is asked")


@dataclass(frozen=True)
class _Due:
    """An audit that was drawn."""

    contribution: Contribution
    reveal: bytes


@dataclass
class Auditor:
    """Audits contributions of the other members as chance has it."""

    rounds: StageRounds
    ticket: Ticket
    draws: HashChain
    accuser: Accuser
    coordinator: PeerId
    budget_factor: Callable[[PeerId, StageIndex, Version], float] = lambda peer, stage, version: 1.0
    """By what a peer's standing multiplies what is spent on auditing it."""
    suspect: Callable[[PeerId, Version], None] = lambda peer, version: None
    """Something short of fraud was found at a version of the stage: look closer."""
    prosecute: Callable[[ReplayMismatch], Coroutine[Any, Any, None]] = _to_no_jury
    """Brings a case, which need not have its past, before a jury."""
    exhibit_of_neighbours: Callable[[Contribution, Work, bytes], Awaitable[Exhibit]] = _nowhere
    """An entry of a contribution, from its maker's neighbours; the last argument is what this peer reveals."""
    reader: BatchReader | None = None
    """At stage 0: what every microbatch must hold."""
    counters: AuditCounters = field(default_factory=AuditCounters)

    def __post_init__(self) -> None:
        self._budget = AuditBudget.of_run(self.rounds.settings.audits)
        self._due: deque[_Due] = deque(maxlen=MAX_DUE)
        self._replay = StageReplay(self.rounds.settings, self.rounds.chain.stage, mode=self.rounds.replica.model.mode)

    async def applied(self, applied: Applied) -> None:
        """A round is over: draw on every other member's contribution."""
        roster, me = applied.result.roster, self.rounds.me
        if me not in roster.members:
            return
        if not self._can_replay_sums:
            return
        reveal = self.draws.reveal(int(roster.step))
        replicas = len(roster.members)
        for contribution in roster.contributions:
            if contribution.peer_id == me or not contribution.work:
                continue
            drawn = draw(reveal, contribution.digest(), auditor=me, target=contribution.peer_id)
            factor = self.budget_factor(contribution.peer_id, applied.chain.stage, applied.chain.version)
            if drawn.hits_contribution(contribution_rate(replicas, self._budget, factor=factor)):
                self._due.append(_Due(contribution, reveal))
        self._want_weights()

    @property
    def _can_replay_sums(self) -> bool:
        return not leaves_residual(self.rounds.settings.codecs.averaging)

    async def run(self) -> None:
        """Audit what is due, one after another, for ever."""
        settings = self.rounds.settings
        while True:
            if not self._due:
                await self.rounds.wait_for_version(self.rounds.version + 1, timeout_s=1.0)
                continue
            due = self._due[0]
            step = int(due.contribution.step)
            if not await self.rounds.wait_for_version(step + REVEALED_AFTER, timeout_s=settings.deadlines.step_s):
                continue
            if self._is_late(due) or self.accuser.has_accused(due.contribution.peer_id):
                self.counters.skipped += 1
            else:
                await self._try(due)
            if self._due[0] is due:  # or it was dropped meanwhile, for too many were due
                self._due.popleft()
            self._want_weights()

    async def _try(self, due: _Due) -> None:
        step = int(due.contribution.step)
        try:
            await self._audit(due)
        except (TransientError, TimeoutError) as error:
            self.counters.debts += 1
            log.info("audit of %s at step %d is owed: %s", due.contribution.peer_id, step, error)
        except RemoteError as error:
            self.counters.debts += 1
            self.suspect(due.contribution.peer_id, Version(step))
            log.warning("audit of %s at step %d: %s", due.contribution.peer_id, step, error)
        except LocalError as error:
            self.counters.skipped += 1
            log.info("audit of %s at step %d is left out: %s", due.contribution.peer_id, step, error)

    # -- one audit ----------------------------------------------------------------------------------------

    async def _audit(self, due: _Due) -> None:
        contribution, rounds = due.contribution, self.rounds
        if rounds.adversary.is_lazy(contribution.step):
            self.counters.contributions += 1
            return
        kept = {work.version: rounds.replica.past.get(int(work.version)) for work in contribution.work}
        exhibits = [await self._fetch_exhibit(due, work) for work in contribution.work]
        for exhibit in exhibits:
            if await rounds.exact.run(Urgency.AUDIT, partial(self._is_of_the_data, exhibit)):
                continue
            log.warning("%s at step %d: a microbatch of other data", contribution.peer_id, contribution.step)
            self.counters.frauds += 1
            await self.accuser.accuse(DataFraud(birth=exhibit.papers.birth))
            return
        compute, step = rounds.compute, contribution.step
        own = await compute.run(Urgency.AUDIT, lambda: self._replayed_parts(kept, exhibits, step))
        parts = await self._shown_parts(due, own)
        replayed = [part for part, _ in own]
        found = await compute.run(Urgency.AUDIT, lambda: compared_contribution(self._replay, parts, replayed))
        self.counters.contributions += 1
        if found.grade is Grade.HONEST:
            share = found.measured / found.fraud
            self.counters.largest_honest_share = max(self.counters.largest_honest_share, share)
            if self.rounds.adversary.accuses_falsely(contribution.step):
                await self._accuse(due, exhibits, parts)
            return
        log.warning("%s at step %d, contribution: %s", contribution.peer_id, contribution.step, found.reason)
        if found.grade is Grade.SUSPICIOUS:
            self.counters.suspicious += 1
            self.suspect(contribution.peer_id, Version(int(contribution.step)))
            return
        self.counters.frauds += 1
        await self._accuse(due, exhibits, parts)

    # -- fetched ------------------------------------------------------------------------------------------

    async def _fetch_exhibit(self, due: _Due, work: Work) -> Exhibit:
        settings, run_id = self.rounds.settings, self.rounds.run_id
        num_stages = settings.model.num_stages

        def read(reply: Message) -> Exhibit:
            return read_exhibit(reply.meta, reply.body, due.contribution, work, run_id=run_id, num_stages=num_stages)

        number = int(work.microbatch_id)
        largest = max_exhibit_bytes(settings, self.rounds.replica.model.hidden_size)

        async def instead() -> Exhibit:
            return await self.exhibit_of_neighbours(due.contribution, work, due.reveal)

        return await self._served(due, "exhibit", number, read, instead, max_body_bytes=largest)

    async def _shown_parts(self, due: _Due, own: Sequence[tuple[Bytes, bytes]]) -> list[Bytes]:
        """The contribution's parts. Only those cross the line that came out otherwise here, and of which this peer was
        not the reducer: who computes alike to the bit needs none. What nobody has any more is empty."""
        made, reductions = due.contribution, self.rounds.driver.parts.reductions
        if len(made.part_digests) != len(own):
            raise RemoteError("malformed", f"contribution of {len(made.part_digests)} parts, not {len(own)}")
        parts: list[Bytes] = []
        for index, (part, digest) in enumerate(own):
            if digest == made.part_digests[index]:
                parts.append(part)
                continue
            reduced = reductions.input(made.step, index, made.part_digests[index])
            parts.append(reduced if reduced is not None else await self._fetch_part(due, index))
        if not any(len(part) for part in parts):
            raise TransientError(f"no part of {made.peer_id} at step {made.step} is with anybody who reduced it")
        return parts

    async def _fetch_part(self, due: _Due, index: int) -> Bytes:
        replica = self.rounds.replica
        where = replica.parts()[index]
        largest = replica.codec.encoded_bytes(where.stop - where.start)

        def read(reply: Message) -> Bytes:
            return read_part(reply.body, due.contribution, index)

        async def instead() -> Bytes:
            return await self._part_of_others(due, index, largest)

        try:
            return await self._served(due, "part", index, read, instead, max_body_bytes=largest)
        except TransientError as error:  # it reduced the part itself, and is gone: the others tell enough
            log.info("part %d of %s at step %d: %s", index, due.contribution.peer_id, due.contribution.step, error)
            return b""

    async def _part_of_others(self, due: _Due, index: int, largest: int) -> Bytes:
        """The encoded part, from whoever reduced it. Raises TransientError."""
        rounds, made = self.rounds, due.contribution
        meta: dict[str, Value] = {**self._basis(due), "part": index, "of": made.peer_id}
        call_s = rounds.settings.deadlines.call_s
        for peer in sorted({*rounds.chain.members} - {made.peer_id, rounds.me}):
            try:
                reply = await rounds.transport.call(peer, PART, Message(meta), timeout_s=call_s, max_body_bytes=largest)
                self.counters.bytes += len(reply.body)
                return await rounds.exact.run(Urgency.AUDIT, partial(read_part, reply.body, made, index))
            except (TransientError, RemoteError) as error:
                log.debug("part %d of %s by %s: %s", index, made.peer_id, peer[-6:], error)
        raise TransientError(f"part {index} of {made.peer_id} is with nobody who reduced it")

    def _basis(self, due: _Due) -> dict[str, Value]:
        """What a request rests on."""
        return {"step": due.contribution.step, "ticket": self.ticket.to_value(), "reveal": due.reveal}

    async def _served(
        self,
        due: _Due,
        what: Literal["exhibit", "part"],
        number: int,
        read: Callable[[Message], T],
        instead: Callable[[], Awaitable[T]],
        *,
        max_body_bytes: int,
    ) -> T:
        """What the target shows; or, if it shows nothing or something else, what it shows the host; or, if nothing,
        what others show who hold the same (`instead`). So who withholds owes it, and it is audited all the same.

        Raises TransientError if nobody reaches it, RemoteError if it owes the audit.
        """
        rounds, target = self.rounds, due.contribution.peer_id
        method, name = (EXHIBIT, "microbatch_id") if what == "exhibit" else (PART, "part")
        meta: dict[str, Value] = {**self._basis(due), name: number}
        if what == "part":
            meta["of"] = target
        call_s = rounds.settings.deadlines.call_s
        try:
            reply = await rounds.transport.call(
                target, method, Message(meta), timeout_s=call_s, max_body_bytes=max_body_bytes
            )
            self.counters.bytes += len(reply.body)
            return await rounds.exact.run(Urgency.AUDIT, lambda: read(reply))
        except (TransientError, RemoteError) as error:
            reason = str(error)[:MAX_REASON]
            log.info("%s %d of %s at step %d: %s", what, number, target, due.contribution.step, error)
        owed = OwedAudit(
            run_id=rounds.run_id,
            stage=rounds.chain.stage,
            step=due.contribution.step,
            auditor=rounds.me,
            target=target,
            reveal=due.reveal,
            what=what,
            number=number,
            reason=reason,
        ).signed_by(rounds.identity)
        try:
            relayed = await rounds.transport.call(
                self.coordinator,
                OWED,
                Message({"owed": owed.to_value()}),
                timeout_s=OWED_S,
                max_body_bytes=max_body_bytes,
            )
            self.counters.bytes += len(relayed.body)
            return await rounds.exact.run(Urgency.AUDIT, lambda: read(relayed))
        except (TransientError, RemoteError) as error:
            try:
                return await instead()
            except (TransientError, RemoteError) as other:
                log.info("%s %d of %s at step %d: %s", what, number, target, due.contribution.step, other)
                raise error from other

    def _is_of_the_data(self, exhibit: Exhibit) -> bool:
        """(exact) Whether the source read what the data order says."""
        birth = exhibit.papers.birth
        if self.reader is None:
            return True
        return not differences(birth, *self.reader.batch(birth.microbatch_id))

    # -- computed again -----------------------------------------------------------------------------------

    def _replayed_parts(
        self, kept: Mapping[Version, PastVersion], exhibits: Sequence[Exhibit], step: Step
    ) -> list[tuple[Bytes, bytes]]:
        """(compute) The parts as they come out here, each with its BLAKE3."""
        with self._standing_on(kept) as replay:
            parts = replay.encoded_contribution(exhibits, step)
        return [(part, bulk_digest(part)) for part in parts]

    @contextmanager
    def _standing_on(self, kept: Mapping[Version, PastVersion]) -> Iterator[StageReplay]:
        try:
            for version, past in kept.items():
                self._replay.hold(version, past.weights, past.ahead, ahead_is_known=past.ahead_is_known)
            yield self._replay
        finally:
            self._replay.release()

    def _want_weights(self) -> None:
        """Keep the versions that what is due was computed on."""
        due = [due for due in self._due if not self._is_late(due)]
        self.rounds.replica.past.want({int(work.version) for one in due for work in one.contribution.work})

    def _is_late(self, due: _Due) -> bool:
        """Whether the target need not hold any more what is to be audited."""
        return self.rounds.version > due.contribution.step + self.rounds.settings.audits.retained_versions

    # -- accused ------------------------------------------------------------------------------------------

    async def _accuse(self, due: _Due, exhibits: Sequence[Exhibit], parts: Sequence[Bytes]) -> None:
        """Bring it before a jury, and before the run key with everything that a replay needs."""
        light = ReplayMismatch(contribution=due.contribution, parts=tuple(parts), exhibits=tuple(exhibits))
        self.rounds.spawn(self.prosecute(light))
        await self.accuser.accuse(await self._mismatch(due, exhibits, parts))

    async def _mismatch(self, due: _Due, exhibits: Sequence[Exhibit], parts: Sequence[Bytes]) -> ReplayMismatch:
        contribution = due.contribution
        step, oldest = int(contribution.step), min(int(work.version) for work in contribution.work)
        shown = await provable_past(self.rounds, self.coordinator, oldest=oldest, version=step)
        return ReplayMismatch(
            contribution=contribution,
            parts=tuple(parts),
            exhibits=tuple(exhibits),
            past=shown.past,
            state_chunks=shown.snapshot.chunks(),
            bodies=shown.bodies,
        )
