"""How a peer looks into what others did: what it asks for under its reveal, and what it does about what it finds."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from peer.audit.accuser import Accuser, Case, Prosecution
from peer.audit.jury import Jury
from peer.pipeline.compute import Urgency
from peer.pipeline.screens import KnownStanding
from peer.round.stage_steps import StageSteps
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.honest_audits import MAX_CLASSES, HonestAudits
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.settings import TensorKind
from swarm.data.batches import Batch
from swarm.host_protocol import OWED
from swarm.log_format import printable
from swarm.network.transport import Message
from verification.audit.draws import AuditBudget
from verification.audit.owed import MAX_REASON, Owed, OwedAudit
from verification.audit.tolerance import Comparison, Grade
from verification.kinds.bias import Bias
from verification.kinds.data_fraud import DataFraud, differences
from verification.kinds.mismatch import Mismatch
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.pipeline.headers import BirthRecord, HopHeader

log = logging.getLogger(__name__)

T = TypeVar("T")

OWED_S = 30.0
LEAST_SHARE_S = 1.0
"""Whoever is asked may take so long at least, however fast the stage goes on."""
OTHER_CLASSES = "others"
"""All that came after the first fifteen."""


class OverdueError(TransientError):
    """Who was asked has used up its time for it."""


class Drawn(Protocol):
    """What a draw has hit: a request about it bears the step, and what this peer reveals for it."""

    @property
    def step(self) -> Step: ...

    @property
    def reveal(self) -> bytes: ...


class Batches(Protocol):
    """The run's microbatches, as `peer.pipeline.leased_tokens` has them."""

    async def batch(self, microbatch_id: MicrobatchId) -> Batch:
        """Raises TransientError if nobody gives the tokens now."""


@dataclass
class AuditCounters:
    """What a peer's audits came to; for status and reports."""

    hops: int = 0
    contributions: int = 0
    parts: int = 0
    """Aggregated again."""
    suspicious: int = 0
    frauds: int = 0
    debts: int = 0
    """Audits that were not served."""
    skipped: int = 0
    """Drawn, but too late or not replayable here."""
    largest_honest_share: float = 0.0
    """Of the fraud bound, over all audits that found nothing."""
    largest_bias_share: float = 0.0
    """Of what the contributions of an honest peer may come to in all audits of it together."""
    bytes: int = 0
    by_class: dict[str, HonestAudits] = field(default_factory=dict)
    """Audits that found nothing, by what the work's maker says that it computes on."""

    def honest(self, numeric_class: str, kind: TensorKind, share: float) -> None:
        """An audit found nothing, at that share of the fraud bound."""
        self.largest_honest_share = max(self.largest_honest_share, share)
        if numeric_class not in self.by_class and len(self.by_class) >= MAX_CLASSES - 1:
            numeric_class = OTHER_CLASSES  # names are anybody's
        held = self.by_class.get(numeric_class, HonestAudits(numeric_class=numeric_class))
        self.by_class[numeric_class] = held.and_one(kind, share)


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What a peer's audits rest on."""

    steps: StageSteps
    ticket: Ticket
    draws: HashChain
    accuser: Accuser
    host: PeerId
    standing: KnownStanding
    jury: Jury | None
    """None where nothing is replayed: what is found is exact."""
    tokens: Batches | None
    """At stage 0: what every microbatch must hold."""
    counters: AuditCounters = field(default_factory=AuditCounters)
    late: set[tuple[PeerId, Step]] = field(default_factory=set)
    """Who has used up its share of a step's time: it is asked nothing more about that step."""

    def rate(self, rate_of: Callable[..., float], num_replicas: int, peer: PeerId, version: int) -> float:
        """Chance of an audit of the peer at a version of the stage; `rate_of` is of `verification.audit.draws`."""
        factor = self.standing.budget_factor(peer, self.steps.chain.stage, Version(version))
        return rate_of(num_replicas, AuditBudget.of_run(self.steps.context.settings.audits), factor=factor)

    def exact(self, work: Callable[[], T]) -> Coroutine[None, None, T]:
        return self.steps.context.exact.run(Urgency.AUDIT, work)

    def replay(self, work: Callable[[], T]) -> Coroutine[None, None, T]:
        return self.steps.context.replays.run(Urgency.AUDIT, work)

    # -- asked --------------------------------------------------------------------------------------------

    def is_late(self, step: Step) -> bool:
        """Whether who was audited need not hold any more what its work of the step was made from."""
        return self.steps.version > self._held_until(step)

    async def ask(
        self, peer: PeerId, method: str, due: Drawn, meta: Mapping[str, Value], *, max_body_bytes: int
    ) -> Message:
        """What the peer answers to a request about what was drawn. Raises TransientError, RemoteError; LocalError once
        it is late for the audit.

        It has half of the time that is left, and none of the last version's: who lets bytes drip keeps no audit from
        others and from the host, as long as a debt can be written.
        """
        if (peer, due.step) in self.late:
            raise TransientError(f"{peer} took too long before, of step {due.step}")
        basis: dict[str, Value] = {"step": due.step, "ticket": self.ticket.to_value(), "reveal": due.reveal}
        call_s = self.steps.context.settings.deadlines.call_s
        share_s = self._share_s(due.step) if max_body_bytes else min(self._share_s(due.step), call_s)
        calling = self._call(peer, method, {**basis, **meta}, timeout_s=call_s, max_body_bytes=max_body_bytes)
        try:
            return await self._while_held(due.step, calling, within_s=share_s, leaves_last=True)
        except OverdueError:
            self.late.difference_update([one for one in self.late if self.is_late(one[1])])
            self.late.add((peer, due.step))
            raise

    def _held_until(self, step: Step) -> int:
        return int(step) + self.steps.context.settings.audits.retained_versions

    def _share_s(self, step: Step) -> float:
        """Half of the time until it is late for an audit of the step, by the stage's pace."""
        steps = self.steps
        pace_s = steps.usual_s or steps.context.settings.deadlines.step_s
        left_s = max(0.0, pace_s - (time.monotonic() - steps.turned_at))
        return max(LEAST_SHARE_S, (left_s + pace_s * (self._held_until(step) - steps.version)) / 2)

    async def _while_held(
        self, step: Step, calling: Coroutine[Any, Any, T], *, within_s: float, leaves_last: bool = False
    ) -> T:
        """The call's answer. Raises LocalError once it is late for an audit of the step, OverdueError after `within_s`;
        with `leaves_last` also when the last version begins in which it is not."""
        held_until = self._held_until(step)
        ends_at = held_until if leaves_last and self.steps.version < held_until else held_until + 1
        call = asyncio.ensure_future(calling)
        end = asyncio.ensure_future(self.steps.wait_for_version(ends_at, timeout_s=within_s))
        try:
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if self.is_late(step):
                raise LocalError(f"version {self.steps.version}: who has it need not hold it any more")
            raise OverdueError(f"no answer within {within_s:.1f} s, or by version {ends_at}")
        finally:
            call.cancel()
            end.cancel()
            await asyncio.gather(call, end, return_exceptions=True)

    async def shown(
        self,
        due: Drawn,
        target: PeerId,
        method: str,
        meta: Mapping[str, Value],
        read: Callable[[Message], T],
        *,
        what: Owed,
        number: int,
        max_body_bytes: int,
        birth: BirthRecord | None = None,
        header: HopHeader | None = None,
    ) -> T:
        """What the target shows; or, if it shows nothing or something else, what it shows the host: so who withholds
        owes it. `read` is done in the exact thread.

        Raises TransientError if nobody reaches it, RemoteError if it owes the audit.
        """
        steps = self.steps
        try:
            reply = await self.ask(target, method, due, meta, max_body_bytes=max_body_bytes)
            return await self.exact(partial(read, reply))
        except (TransientError, RemoteError) as error:
            reason = printable(str(error))[:MAX_REASON]
            log.info("%s %d of %s at step %d: %s", what, number, target, due.step, error)
        owed = OwedAudit(
            run_id=steps.context.run_id,
            stage=steps.chain.stage,
            step=due.step,
            auditor=steps.context.me,
            target=target,
            reveal=due.reveal,
            what=what,
            number=number,
            reason=reason,
            birth=birth,
            header=header,
        ).signed_by(steps.context.identity)
        meta = {"owed": owed.to_value()}
        asking = self._call(self.host, OWED, meta, timeout_s=OWED_S, max_body_bytes=max_body_bytes)
        relayed = await self._while_held(due.step, asking, within_s=OWED_S + 2 * self._share_s(due.step))
        return await self.exact(partial(read, relayed))

    async def _call(
        self, peer: PeerId, method: str, meta: Mapping[str, Value], *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        reply = await self.steps.context.transport.call(
            peer, method, Message(dict(meta)), timeout_s=timeout_s, max_body_bytes=max_body_bytes
        )
        self.counters.bytes += len(reply.body)
        return reply

    async def batch(self, number: MicrobatchId) -> Batch | None:
        """At stage 0, what the microbatch must hold; None where nobody gives the tokens now."""
        try:
            return await self.tokens.batch(number) if self.tokens is not None else None
        except TransientError as error:
            log.warning("what microbatch %d holds is not looked at: %s", number, error)
            return None

    # -- found --------------------------------------------------------------------------------------------

    def check_not_accused(self, target: PeerId) -> None:
        """Raises LocalError if it was accused from here lately."""
        if self.accuser.has_accused(target):
            raise LocalError(f"{target} stands accused")

    async def is_of_other_data(self, target: PeerId, step: Step, births: Iterable[BirthRecord]) -> bool:
        """Whether the target is accused, as the source of these, of reading something else than the data order has."""
        for birth in births:
            batch = await self.batch(birth.microbatch_id) if birth.source == target else None
            if batch is not None and differences(birth, *batch):
                log.warning("%s at step %d: a microbatch of other data", target, step)
                await self.accuse(DataFraud(birth=birth))
                return True
        return False

    async def accuse(self, case: Case) -> None:
        """Of what is exact, before the run key."""
        self.counters.frauds += 1
        await self.accuser.accuse(case)

    async def conclude(self, step: Step, kind: TensorKind, found: Comparison, case: Mismatch) -> None:
        """What a replay of a tensor came to, and the case that it makes if it is fraud."""
        counters = self.counters
        if found.grade is Grade.HONEST:
            counters.honest(case.numeric_class, kind, found.share)
            return
        log.warning("%s at step %d, %s: %s", case.accused, step, kind, found.reason)
        if found.grade is Grade.SUSPICIOUS:
            counters.suspicious += 1
            self.standing.suspect(case.accused, Version(int(step)))
            return
        counters.frauds += 1
        await self.prosecute(case)

    async def prosecute(self, case: Mismatch) -> None:
        """Bring it before a jury, and before the run key with everything that a replay needs."""
        spawn, prosecution = self.steps.context.tasks.spawn, Prosecution(self.steps, self.host, self.accuser)
        assert self.jury is not None
        self.check_not_accused(case.accused)  # by another audit, meanwhile: a second charge would have no case
        prosecution.check(case)  # who cannot prove it brings no charge
        spawn(self.jury.prosecute(case))
        try:
            await self.accuser.accuse(await prosecution.whole(case))
        except TransientError:
            spawn(prosecution.bring(case))
            raise

    async def lay_open(self, case: ReplayMismatch) -> None:
        """Have the run key replay a contribution of a peer that is led one way."""
        prosecution = Prosecution(self.steps, self.host, self.accuser)
        await self.accuser.bring(Bias.of(await prosecution.whole(case)))
