"""This is where a peer's part in verification is put together: what it shows, what it audits, whom it judges."""

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from peer.accuser import Accuser
from peer.audit_desk import AuditDesk
from peer.audit_reducers import ReducerAuditor
from peer.audit_steps import StepAuditor
from peer.auditor import Auditor
from peer.catch_up import CatchUp
from peer.downstream import Downstream
from peer.exams import Examiner, Newcomer
from peer.exchange_store import ExchangeStore
from peer.exhibits import ExhibitStore
from peer.hop_auditor import Beside, HopAuditor
from peer.hop_desk import HopDesk
from peer.hops import HopServer
from peer.jury import Jury
from peer.mending import Mending
from peer.neighbours import Neighbours
from peer.reveals import Reveals
from peer.rounds import StageRounds
from peer.state_check import StateCheck
from peer.verdicts import Verdicts
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.data.batches import BatchReader
from swarm.host_protocol import SignedRun
from verification.draws import HashChain
from verification.ticket import Ticket


@dataclass(kw_only=True)
class Verifying:
    """Everything of one peer at one stage that others' trust rests on; `serve`, then have `services` run."""

    rounds: StageRounds
    server: HopServer
    downstream: Downstream | None
    neighbours: Neighbours
    catch_up: CatchUp
    exhibits: ExhibitStore
    exchanges: ExchangeStore
    verdicts: Verdicts
    ticket: Ticket
    draws: HashChain
    signed_run: SignedRun
    host: PeerId
    reader: BatchReader | None
    """At stage 0: what every microbatch must hold."""

    def __post_init__(self) -> None:
        rounds, standing = self.rounds, self.verdicts.standing
        adversary, reveals = rounds.adversary, Reveals(rounds)
        self.desk = AuditDesk(rounds, self.exhibits, reveals, adversary=adversary)
        self.hop_desk = HopDesk(rounds, self.exchanges, reveals, adversary=adversary)
        self.accuser = Accuser(rounds.transport, self.host, self.signed_run)
        self.reducer_auditor = ReducerAuditor(
            rounds, self.ticket, self.draws, self.accuser, self.exhibits, budget_factor=standing.budget_factor
        )
        self.state_check = StateCheck(rounds, self.host, self.catch_up.load_anew)
        self.step_auditor = StepAuditor(rounds, self.host, self.accuser, self.state_check)
        self.newcomer: Newcomer | None = None
        """In runs with probation."""
        self.auditor: Auditor | None = None
        """In runs whose replicas replay each other's work."""
        self.mending: Mending | None = None
        self.services: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.reducer_auditor.run,
            self.state_check.run,
            self.step_auditor.run,
        ]
        """To be run while this peer is at the stage; all are known once it serves."""

    def serve(self) -> None:
        """Begin to show and to look."""
        rounds, accuser = self.rounds, self.accuser
        self.desk.serve(rounds.transport)
        self.hop_desk.serve(rounds.transport)
        rounds.on_equivocation = lambda one, other: rounds.spawn(accuser.accuse_of_both(one, other))
        rounds.on_violation = self.server.on_violation = lambda case: rounds.spawn(accuser.accuse(case))
        if self.downstream is not None:
            self.downstream.on_violation = rounds.on_violation
        rounds.on_applied += [
            self.desk.applied,
            self.hop_desk.applied,
            self.reducer_auditor.applied,
            self.step_auditor.applied,
        ]
        if rounds.settings.has_probation:
            self._examine()
        if rounds.settings.replays:
            self._replay()

    def _examine(self) -> None:
        """Examine newcomers, and be examined while this peer is one."""
        rounds, verdicts = self.rounds, self.verdicts
        examiner = Examiner(rounds, self.exhibits)
        examiner.serve(rounds.transport)
        newcomer = self.newcomer = Newcomer(
            rounds, self.ticket, self.draws, self.host, lambda: verdicts.may_train(rounds.me)
        )
        self.catch_up.promotion = verdicts.own_promotion
        rounds.on_applied += [examiner.applied, newcomer.applied]

        async def wait() -> None:
            while True:
                promotion = await newcomer.until_promoted()
                verdicts.take(promotion)
                self.catch_up.promotion = promotion
                with contextlib.suppress(TransientError):  # announced again soon
                    await self.neighbours.announce_once()

        self.services.append(wait)

    def _replay(self) -> None:
        """Replay others' work, and judge where jurors are needed."""
        rounds, standing, of_stage = self.rounds, self.verdicts.standing, self.neighbours.of_stage
        stage = rounds.chain.stage
        jury = Jury(rounds, self.signed_run, self.host, of_stage, self.verdicts.take, standing.is_out)
        jury.serve(rounds.transport)
        self.verdicts.counts = jury.counts
        self.mending = Mending(rounds, self.verdicts, self.host)
        self.mending.serve(rounds.transport)
        self.auditor = auditor = Auditor(
            rounds,
            self.ticket,
            self.draws,
            self.accuser,
            self.host,
            budget_factor=standing.budget_factor,
            suspect=standing.suspect,
            prosecute=jury.prosecute,
            reader=self.reader,
        )
        hop_auditor = HopAuditor(
            rounds,
            self.ticket,
            self.draws,
            self.accuser,
            self.host,
            lambda: Beside(frozenset(of_stage(stage - 1)), frozenset(of_stage(stage + 1))),
            budget_factor=standing.budget_factor,
            suspect=standing.suspect,
            prosecute=jury.prosecute,
            reader=self.reader,
            counters=auditor.counters,
        )
        auditor.exhibit_of_neighbours = hop_auditor.exhibit
        rounds.on_applied += [jury.applied, auditor.applied, hop_auditor.applied]
        self.services += [self.mending.run, auditor.run, hop_auditor.run]
