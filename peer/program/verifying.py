"""A peer's part in verification, put together: what it shows, what it audits, whom it judges."""

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peer.audit.accuser import Accuser, Prosecution
from peer.audit.beside import Beside
from peer.audit.contributions import ContributionDue
from peer.audit.desk import AuditDesk
from peer.audit.exams import Examiner, Newcomer
from peer.audit.hop_desk import HopDesk
from peer.audit.hops import HopAudits
from peer.audit.inquiry import AuditCounters, Inquiry
from peer.audit.jury import Charges, Jury
from peer.audit.mending import Mending
from peer.audit.queue import AuditQueue
from peer.audit.reducers import ReducerAudits
from peer.audit.reveals import Reveals
from peer.audit.steps import StepAuditor
from peer.audit.verdicts import Verdicts
from peer.directory.neighbours import Neighbours
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.leased_tokens import LeasedTokens
from peer.program.composition import Composition
from peer.round.stage_steps import StageSteps
from peer.stage.bases import RecentBases
from peer.stage.beacon import StageBeacon
from peer.stage.context import StageContext
from peer.stage.events import Applied, OffChain, StateFault, VersionTurned
from peer.state.state_check import StateCheck
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.honest_audits import HonestAudits
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, Version
from swarm.manifest.signed_run import SignedRun
from swarm.network.transport import Transport
from verification.audit.verdicts import Quarantine
from verification.kinds.equivocation import Equivocation
from verification.kinds.false_work import FalseWork
from verification.kinds.protocol_violation import ProtocolViolation


@dataclass(kw_only=True)
class Verifying:
    """Everything of one peer at one stage that others' trust rests on; `serve`, then have `services` run.

    It hears what it needs to from when it is made: nothing is proved of others before.
    """

    context: StageContext
    steps: StageSteps
    neighbours: Neighbours
    exchanges: ExchangeStore
    charges: Charges
    """What this peer's contributions commit to."""
    verdicts: Verdicts
    ticket: Ticket
    draws: HashChain
    beacon: StageBeacon
    signed_run: SignedRun
    host: PeerId
    made: Composition
    tokens: LeasedTokens | None
    """At stage 0: what every microbatch must hold."""

    def __post_init__(self) -> None:
        context, steps, events = self.context, self.steps, self.context.events
        reveals = Reveals(steps)
        self._bases = RecentBases(steps.chain, kept=context.settings.retained_results)
        events.hear(VersionTurned, self._bases.turned)
        self.desk = AuditDesk(steps, self.exchanges, reveals)
        self.hop_desk = HopDesk(steps, self.exchanges, reveals)
        self.accuser = Accuser(context.transport, self.host, self.signed_run)
        self._inquiry = Inquiry(
            steps=steps,
            ticket=self.ticket,
            draws=self.draws,
            accuser=self.accuser,
            host=self.host,
            standing=self.verdicts.standing,
            jury=None,
            tokens=self.tokens,
        )
        self.reducer_auditor = AuditQueue(self._inquiry, ReducerAudits(self._inquiry))
        self.state_check = StateCheck(steps, self.host)
        self.step_auditor = StepAuditor(steps, self.host, self.accuser, self.state_check)
        self.newcomer: Newcomer | None = None
        """In runs with probation."""
        self.auditor: AuditQueue[ContributionDue] | None = None
        """In runs whose replicas replay each other's work."""
        self.mending: Mending | None = None
        """In the same."""
        self._jury: Jury | None = None
        """In the same."""
        self.services: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.reducer_auditor.run,
            self.state_check.run,
            self.step_auditor.run,
        ]
        """To be run while this peer is at the stage."""
        self._served: list[Callable[[Transport], None]] = [self.desk.serve, self.hop_desk.serve]
        events.hear(Equivocation, lambda case: context.tasks.spawn(self.accuser.accuse_of_both(case)))
        events.hear(ProtocolViolation, lambda case: context.tasks.spawn(self.accuser.accuse(case)))
        events.hear(FalseWork, lambda case: context.tasks.spawn(self.accuser.accuse(case)))
        events.hear(StateFault, self.step_auditor.faulty)
        events.hear(OffChain, lambda seen: self.verdicts.standing.suspect(seen.peer, Version(int(seen.step))))
        events.hear(Applied, self.desk.applied, self.hop_desk.applied)
        events.hear(Applied, self.reducer_auditor.applied, self.step_auditor.applied)
        if context.settings.has_probation:
            self._examine()
        if context.settings.replays:
            self._replay()

    def honest_audits(self) -> Sequence[HonestAudits]:
        """Of replays, so far."""
        return tuple(self.auditor.counters.by_class.values()) if self.auditor is not None else ()

    def serve(self) -> None:
        """Begin to show and to look."""
        for serve in self._served:
            serve(self.context.transport)

    def counts(self, quarantine: Quarantine, sender: PeerId) -> bool:
        """Whether what jurors found counts here. Raises RemoteError or TransientError."""
        return self._jury is not None and self._jury.counts(quarantine, sender)

    def _examine(self) -> None:
        """Examine newcomers, and be examined while this peer is one."""
        steps, verdicts, me = self.steps, self.verdicts, self.context.me
        examiner, may_train = Examiner(steps, self.exchanges, self._bases, self.beacon), partial(verdicts.may_train, me)
        newcomer = self.newcomer = Newcomer(steps, self._bases, self.ticket, self.beacon, self.host, may_train)
        self._served.append(examiner.serve)
        self.context.events.hear(Applied, examiner.applied, newcomer.applied)

        async def wait() -> None:
            while True:
                verdicts.take(await newcomer.until_promoted())
                with contextlib.suppress(TransientError):  # announced again soon
                    await self.neighbours.announce_once()

        self.services.append(wait)

    def _replay(self) -> None:
        """Replay others' work, and judge where jurors are needed."""
        steps, verdicts, of_stage = self.steps, self.verdicts, self.neighbours.of_stage
        jury = self._jury = Jury(
            steps,
            self._bases,
            self.charges,
            self.beacon,
            self.signed_run,
            self.host,
            of_stage,
            verdicts.take,
            verdicts.standing,
            Prosecution(steps, self.host, self.accuser).bring,
        )
        self.mending = Mending(steps, verdicts, self.host)
        inquiry = replace(self._inquiry, jury=jury, counters=AuditCounters())
        beside = Beside(inquiry, of_stage)
        self.auditor = AuditQueue(inquiry, self.made.contribution_audits(inquiry, beside))
        hop_auditor = AuditQueue(inquiry, HopAudits(inquiry, beside))
        self._served += [jury.serve, self.mending.serve]
        self.context.events.hear(Applied, jury.applied, self.auditor.applied, hop_auditor.applied)
        self.services += [self.mending.run, self.auditor.run, hop_auditor.run]
