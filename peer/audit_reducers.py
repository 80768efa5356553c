"""This is where a peer audits the reducers of its stage: a part is aggregated again from its committed inputs.

Aggregation is exact: one differing bit is a lie. Inputs come from their contributors or, where one is gone or silent,
from the reducer, which had to have them.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.accuser import Accuser
from peer.audit_desk import INPUT
from peer.compute import Urgency
from peer.exhibits import ExhibitStore
from peer.rounds import StageRounds
from peer.step_state import Applied
from swarm.averaging.reduce import read_and_written
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.network.transport import Message
from verification.draws import REVEALED_AFTER, AuditBudget, HashChain, draw, reducer_rate
from verification.kinds.reducer_fraud import ReducerFraud
from verification.papers import Bytes
from verification.reduction import Reduction, ReductionInput
from verification.replay.reduced_again import digest_again
from verification.ticket import Ticket

log = logging.getLogger(__name__)

MAX_DUE = 1024


@dataclass
class ReducerAuditCounters:
    """What this peer's audits of reducers came to; for status and reports."""

    parts: int = 0
    """Aggregated again."""
    frauds: int = 0
    debts: int = 0
    """Parts of which neither contributor nor reducer showed an input."""
    skipped: int = 0
    """Drawn, but too late."""
    bytes: int = 0


@dataclass(frozen=True)
class _Due:
    """An audit that was drawn."""

    reduction: Reduction
    cohort: int | None
    """Whose share it made; None: the whole part."""
    reveal: bytes


@dataclass
class ReducerAuditor:
    """Audits parts of the results that other members reduced, as chance has it."""

    rounds: StageRounds
    ticket: Ticket
    draws: HashChain
    accuser: Accuser
    exhibits: ExhibitStore
    """Of this peer: its own contributions' parts are inputs too."""
    budget_factor: Callable[[PeerId, StageIndex, Version], float] = lambda peer, stage, version: 1.0
    """By what a peer's standing multiplies what is spent on auditing it."""
    counters: ReducerAuditCounters = field(default_factory=ReducerAuditCounters)

    def __post_init__(self) -> None:
        self._budget = AuditBudget.of_run(self.rounds.settings.audits)
        self._due: deque[_Due] = deque(maxlen=MAX_DUE)

    async def applied(self, applied: Applied) -> None:
        """A round is over: draw on every part that another member reduced."""
        roster, me = applied.result.roster, self.rounds.me
        if me not in roster.members:
            return
        reveal = self.draws.reveal(int(roster.step))
        for (part, cohort), made in self.rounds.driver.parts.reductions.of_step(roster.step).items():
            if made.reducer == me:
                continue
            factor = self.budget_factor(made.reducer, applied.chain.stage, applied.chain.version)
            drawn = draw(reveal, made.statement_digest, auditor=me, target=made.reducer)
            if drawn.hits_part(part, reducer_rate(len(roster.members), self._budget, factor=factor)):
                self._due.append(_Due(made, cohort, reveal))

    async def run(self) -> None:
        """Audit what is due, one after another, for ever."""
        rounds, settings = self.rounds, self.rounds.settings
        while True:
            if not self._due:
                await rounds.wait_for_version(rounds.version + 1, timeout_s=1.0)
                continue
            due = self._due[0]
            step, reducer = int(due.reduction.step), due.reduction.reducer
            if not await rounds.wait_for_version(step + REVEALED_AFTER, timeout_s=settings.deadlines.step_s):
                continue
            self._due.popleft()
            if rounds.version > step + settings.audits.retained_versions or self.accuser.has_accused(reducer):
                self.counters.skipped += 1
                continue
            try:
                await self._audit(due)
            except (TransientError, RemoteError, TimeoutError) as error:
                self.counters.debts += 1
                log.info("part %d of %s at step %d is owed: %s", due.reduction.part, reducer, step, error)
            except LocalError as error:
                self.counters.skipped += 1
                log.info("part %d of %s at step %d is left out: %s", due.reduction.part, reducer, step, error)

    async def _audit(self, due: _Due) -> None:
        made, rounds = due.reduction, self.rounds
        if rounds.adversary.is_lazy(made.step):
            self.counters.parts += 1
            return
        bodies = [await self._input(due, one) for one in made.inputs]
        again = await rounds.exact.run(Urgency.AUDIT, lambda: self._digest_again(made, bodies))
        self.counters.parts += 1
        if again == made.digest:
            return
        self.counters.frauds += 1
        log.warning(
            "%s reduced part %d of step %d to %s, not %s",
            *(made.reducer, made.part, made.step, made.digest.hex()[:16], again.hex()[:16]),
        )
        await self.accuser.accuse(ReducerFraud(reduction=made, bodies=tuple(bodies)))

    def _digest_again(self, made: Reduction, bodies: list[Bytes]) -> bytes:
        """(exact)"""
        where = self.rounds.replica.parts()[made.part]
        return digest_again(made, bodies, self.rounds.settings, num_values=where.stop - where.start)

    async def _input(self, due: _Due, one: ReductionInput) -> Bytes:
        """The encoded part that was committed to, or the share. Raises what the last one asked had to say."""
        made, me = due.reduction, self.rounds.me
        if one.peer_id == me:
            store = self.rounds.driver.parts.reductions
            is_share = made.level == "shares"
            part = made.part
            own = store.input(made.step, part, one.digest) if is_share else self.exhibits.part(made.step, part)
            if own is None:
                raise LocalError(f"the own part {made.part} of step {made.step} is not here any more")
            return own
        holders = [one.peer_id, made.reducer] if one.peer_id != made.reducer else [made.reducer]
        for holder in holders:
            try:
                return await self._fetch(due, one, holder)
            except (TransientError, RemoteError, TimeoutError) as error:
                if holder == holders[-1]:
                    raise
                log.info("part %d of step %d from %s: %s", made.part, made.step, holder, error)
        raise AssertionError("unreachable")

    async def _fetch(self, due: _Due, one: ReductionInput, holder: PeerId) -> Bytes:
        made, rounds = due.reduction, self.rounds
        where = rounds.replica.parts()[made.part]
        meta: dict[str, Value] = {
            "step": made.step,
            "ticket": self.ticket.to_value(),
            "reveal": due.reveal,
            "part": made.part,
            "cohort": due.cohort,
            "digest": one.digest,
        }
        read, _ = read_and_written(made.level, rounds.settings.codecs.averaging)
        reply = await rounds.transport.call(
            holder,
            INPUT,
            Message(meta),
            timeout_s=rounds.settings.deadlines.call_s,
            max_body_bytes=read.encoded_bytes(where.stop - where.start),
        )
        self.counters.bytes += len(reply.body)
        found = await rounds.exact.run(Urgency.AUDIT, lambda: bulk_digest(reply.body))
        if found != one.digest:
            raise RemoteError("digest", f"part {made.part} of {one.peer_id} differs from its commitment", holder)
        return reply.body
