"""A peer at one stage, put together: everything that lives from when it has joined until it leaves the stage."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernels.threads import Threads
from peer.audit.jury import Charges
from peer.audit.verdicts import Verdicts
from peer.directory.expected import ExpectedCallers
from peer.directory.host import Host
from peer.directory.limited_transport import LimitedTransport
from peer.directory.neighbours import Neighbours
from peer.directory.posted import Posted
from peer.owner.limits import VolunteerSettings
from peer.owner.permit import Permit
from peer.owner.tally import WorkTally
from peer.pipeline.closed_steps import ClosedSteps
from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.downstream import Downstream, HopCounters
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.hops import HopServer
from peer.pipeline.leased_tokens import LeasedTokens
from peer.pipeline.memory_pressure import MemoryPressure
from peer.pipeline.screens import Screens
from peer.pipeline.source import Source
from peer.pipeline.stage_pass import StagePass
from peer.pipeline.stage_work import StageWork
from peer.program.composition import Composition
from peer.program.joining import Joined
from peer.program.reports import Reports
from peer.program.verifying import Verifying
from peer.round.leaving import Leaving
from peer.round.reductions import ReductionStore
from peer.round.rounds import StageRounds
from peer.round.signing_log import SigningLog
from peer.round.stage_steps import StageSteps
from peer.round.step_progress import LONGEST_WAIT_SHARE
from peer.stage.beacon import StageBeacon
from peer.stage.context import StageContext
from peer.stage.events import Applied, Events, Overtaken, PeerLost, PeersChanged, StateFault, StepClosed, VersionTurned
from peer.stage.tasks import Tasks
from peer.state.catch_up import CatchUp, StateDonor
from peer.state.continuing import Continuing
from peer.state.handing_over import hand_over
from peer.state.replica import StageReplica
from peer.state.rolling_back import RollingBack
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.results import ResultStore
from swarm.checkpoint.snapshots import SnapshotStore
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.core.pipeline.wiring import EarliestFinishWiring
from swarm.core.plan import longest_round_s
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import work_limits
from swarm.drawn_papers import DrawnPapers
from swarm.host_protocol import RUN
from swarm.identity.key import Identity
from swarm.manifest.signed_run import Ending
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Directory, Message
from swarm.optim.stage_step import stage_clip_norm, stage_num_parts
from swarm.witness_service import VoteLog, WitnessService
from verification.kinds.false_work import entry_check

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """What a peer has whatever stage it serves."""

    volunteer: VolunteerSettings
    identity: Identity
    limited: LimitedTransport
    """The owner's line, whose rate may be limited."""
    transport: GuardedTransport
    """Over that line, without those who are shut out."""
    directory: Directory
    host: Host
    permit: Permit
    """The owner's, to begin."""
    tally: WorkTally
    reports: Reports
    verdicts: Verdicts
    rng: random.Random
    threads: Threads
    """That share the exact work."""
    composition: Callable[[], Composition]
    """What to be made of, at each stage anew."""
    on_step: Callable[[StageSteps, Applied], None] | None
    """Told of each step that this peer took, after all others; None: nobody looks on."""


@dataclass(frozen=True)
class WorkThreads:
    """What a peer at a stage works with; what each is for says `StageContext`."""

    compute: WorkThread
    copies: WorkThread
    exact: WorkThread
    replays: WorkThread
    judging: WorkThread

    @property
    def all(self) -> list[WorkThread]:
        """Each once."""
        named = self.compute, self.copies, self.exact, self.replays, self.judging
        return list({id(one): one for one in named}.values())


class PeerAtStage:
    """Its parts, for those who look at it. `serve` once, then have `works` run until `leave`."""

    def __init__(self, own: Belongings, joined: Joined, works_on: WorkThreads, memory: MemoryPressure) -> None:
        """Whoever hears of anything is there before the first message can bring it."""
        settings, chain, model, me = joined.settings, joined.chain, joined.model, own.identity.peer_id
        self._own, self._joined, self.memory = own, joined, memory
        self.settings, self.stage, self.device = settings, chain.stage, str(model.device)
        made = own.composition()
        self.context = context = _context(own, joined, works_on)
        events = context.events
        clip_norm, threads = stage_clip_norm(settings, self.stage), own.threads
        joined.snapshots.mkdir(parents=True, exist_ok=True)
        replica = StageReplica(
            *(settings, model, joined.state.take()),
            clip_norm=clip_norm,
            threads=threads,
            era=chain.era,
            folder=joined.snapshots,
        )
        self.steps = steps = StageSteps(context, replica, chain, own.verdicts.may_train)
        self.beacon = beacon = StageBeacon(steps, joined.ticket, joined.draws, own.host.peer_id)
        self.counters = HopCounters()
        self._posted = Posted(me, lambda: steps.chain)
        self.neighbours = neighbours = Neighbours(
            context,
            own.directory,
            self.stage,
            version=lambda: steps.version,
            takes=own.verdicts.is_shown_to_train,
            more_to_say=own.verdicts.said_of_self,
            usual_s=lambda: steps.usual_s,
        )
        self._drawn = DrawnPapers(
            own.transport,
            entry_check(settings, is_of_stage=self._was_of_stage, on_lie=events.publish),
            random.SystemRandom(),
        )
        screens, charges = Screens(own.verdicts.standing, lambda: steps.version), Charges()
        vote_log = VoteLog(joined.folder / f"voted-{me[-8:]}.log")
        self._closed_steps = closed_steps = ClosedSteps(
            transport=own.transport,
            tasks=context.tasks,
            stage=self.stage,
            call_s=settings.deadlines.call_s,
            era=lambda: steps.era,
            before=lambda: neighbours.of_stage(self.stage - 1),
            after=lambda: neighbours.of_stage(self.stage + 1),
        )
        self.rounds = rounds = StageRounds(
            context=context,
            steps=steps,
            screens=screens,
            signing_log=SigningLog(joined.folder / f"signed-{me[-8:]}.log"),
            vote_log=vote_log,
            neighbours=lambda: neighbours.of_stage(self.stage - 1) | neighbours.of_stage(self.stage + 1),
            is_closed_before=closed_steps.is_closed_before,
            charges=charges.brought,
            chance=beacon.chance,
            drawn=self._drawn,
            make_part_exchange=made.part_exchange,
            make_driver=made.round_driver,
        )
        self.tokens = tokens = LeasedTokens(*joined.tokens, steps) if joined.tokens is not None else None
        batch = tokens.reader.batch if tokens is not None else None
        self._exchanges = exchanges = ExchangeStore.of_run(settings, me, batch, joined.snapshots)
        stage_pass = made.stage_pass(settings, joined.run_id, own.identity, replica)
        downstream = self._made_downstream(stage_pass, exchanges)
        work = StageWork(
            stage_pass,
            context.compute,
            steps,
            self.counters,
            exchanges,
            screens,
            copies=context.copies,
            permit=own.permit,
            memory=memory,
        )
        self.server = HopServer(
            work,
            downstream,
            own.limited,
            is_before=lambda peer: peer in neighbours.of_stage(self.stage - 1),
            begun=closed_steps.begun,
            on_violation=events.publish,
        )
        self.source: Source | None = None
        if tokens is not None:
            self.source = Source(work, steps, rounds.turns, downstream, tokens)
        self.catch_up = CatchUp(
            rounds,
            own.transport,
            lambda: neighbours.of_stage(self.stage),
            joined.ticket,
            promotion=lambda: own.verdicts.own_promotion,
            rng=own.rng,
        )
        self._name_hearers(work, downstream, screens)
        self.verifying = Verifying(
            context=context,
            steps=steps,
            neighbours=neighbours,
            exchanges=exchanges,
            charges=charges,
            verdicts=own.verdicts,
            ticket=joined.ticket,
            draws=joined.draws,
            beacon=beacon,
            signed_run=joined.signed_run,
            host=own.host.peer_id,
            made=made,
            tokens=tokens,
        )
        if own.on_step is not None:
            events.hear(Applied, partial(own.on_step, steps))
        past = KeptPast(joined.snapshots, self.stage, settings, model.layout, threads)
        self._continuing = Continuing(past, own.host.peer_id, rounds.taking)
        self._rolling_back = RollingBack(
            steps, rounds.taking, own.host, self._continuing, partial(own.verdicts.begin, settings), rounds.end_at
        )
        self._donor = StateDonor(steps, rounds.joiners, own.verdicts.take)
        self._witness = WitnessService(
            joined.run_id,
            own.identity,
            chain.host,
            chain.run_key,
            vote_log,
            self._is_of_stage,
            own.verdicts.may_train,
            lambda peer, stage, *_: peer in neighbours.of_stage(stage),
            num_parts=stage_num_parts(settings),
            papers=self._drawn,
            limits=partial(work_limits, settings),
            call_s=settings.deadlines.call_s,
            amendments=chain.amendments,
        )
        self._draining = asyncio.Event()
        self.leaving = Leaving(
            rounds, lambda: neighbours.of_stage(self.stage), lambda: self.in_flight, lambda: self._num_given
        )
        events.seal()

    def _made_downstream(self, stage_pass: StagePass, exchanges: ExchangeStore) -> Downstream | None:
        """None at the last stage."""
        own, context, steps = self._own, self.context, self.steps
        if self._joined.model.is_last:
            return None
        return Downstream(
            stage_pass,
            own.transport,
            context.copies,
            EarliestFinishWiring(StageIndex(self.stage + 1), own.rng),
            self.counters,
            era=lambda: steps.era,
            keep=exchanges.keep,
            on_violation=context.events.publish,
        )

    def _name_hearers(self, work: StageWork, downstream: Downstream | None, screens: Screens) -> None:
        """But for those that look for lies, which are named after these."""
        own, context, events = self._own, self.context, self.context.events
        losses = self.source.losses if self.source is not None else {}

        def report(applied: Applied) -> None:
            own.reports.add(applied, context, screens, work, losses, self.verifying.honest_audits())

        events.hear(Applied, report)
        events.hear(Applied, own.tally.applied, self.server.applied)
        events.hear(Overtaken, self.catch_up.overtaken)
        events.hear(StateFault, lambda fault: self.catch_up.load_anew())
        if self.tokens is not None:
            events.hear(VersionTurned, self.tokens.turned)
        expected = ExpectedCallers(own.transport, own.host.peer_id, self.steps.chain)
        events.hear(StepClosed, self._closed_steps.closed)
        events.hear(VersionTurned, expected.turned, self._closed_steps.turned)
        events.hear(PeersChanged, expected.changed, self._closed_steps.changed)
        if downstream is not None:
            events.hear(PeersChanged, partial(_next_changed, downstream, self.stage + 1))

    # -- life ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Begin to answer, first of all those who bring proofs, and say that this peer is there."""
        own, context, steps = self._own, self.context, self.steps
        self.verifying.serve()
        chain = steps.chain
        await self.rounds.taking.save()
        await asyncio.to_thread(context.results.forget_others)
        self.rounds.start()
        self._continuing.serve(own.transport)
        self._rolling_back.serve(own.transport)
        self.server.serve(own.transport)
        self._closed_steps.serve(chain.version)
        self._donor.serve(own.transport)
        self._witness.serve(own.transport)
        own.transport.serve(RUN, self._on_run, max_body_bytes=0)
        self.neighbours.serve()
        self._posted.serve(own.transport)
        if self.source is not None:
            self.source.serve(own.transport)
        with contextlib.suppress(TransientError):  # announced again soon
            await self.neighbours.announce_once()
        which = "one" if steps.is_member else "not one"
        log.info("stage %d at version %d, %s of %d members", self.stage, chain.version, which, len(chain.members))

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on while this peer is at the stage; all of it is to be run."""
        works = [self.neighbours.run(), self.catch_up.run(), self._own.reports.send(), self._rolling_back.run()]
        works.append(self.beacon.run())
        works += [run() for run in self.verifying.services]
        works.append(self._keep_to_the_permit())
        if self.tokens is not None:
            works.append(self.tokens.run())
        if self.source is not None:
            works.append(self.source.run(self._draining))
        return works

    async def drain(self) -> None:
        """Begin nothing, finish what is in flight, see its gradients averaged, and others have what was made here.

        Who is to go to another stage has `drain_s` for it. Else nothing need move for so long and for as long as the
        last round took, for others may be busy with each other alone, and as its leader may wait for who is late.
        """
        self.neighbours.leaving = self.server.draining = True
        self._draining.set()
        drain_s = self.settings.deadlines.drain_s
        values, members = self.steps.replica.layout.num_values, len(self.steps.chain.members)
        longest_s = drain_s + 2 * longest_round_s(self.settings, values, members)
        quiet_s = drain_s + self.rounds.taking.last_round_s + LONGEST_WAIT_SHARE * (self.steps.usual_s or 0.0)
        await self.leaving.done(quiet_s=quiet_s, most_s=drain_s if self.target is not None else longest_s)

    async def hand_over(self) -> str | None:
        """What became of the state, in words for the owner; None where there is nothing to say."""
        self.leaving.waits_for = "the state is handed over, where nobody else has it"
        return await hand_over(self.rounds, self._own.host)

    @property
    def _num_given(self) -> int:
        return self.rounds.num_given + self._donor.num_given

    def stop_beginning(self) -> None:
        """Nothing more is started, in whatever state the rest is."""
        self._draining.set()

    async def leave(self) -> None:
        """Answer no more, and end what is under way."""
        self.neighbours.gone.set()
        if self.source is not None:
            self.source.leave(self._own.transport)
        await self.server.stop()
        await self.rounds.stop()

    def close(self) -> None:
        """Once it has left, and whoever audits its last steps has had the time: let go of what it would have shown, and
        of the thread that wrote it."""
        self._exchanges.close()
        if self.tokens is not None:
            self.tokens.leave()
        self.steps.replica.release()

    # -- looked at, and told ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Microbatches that have begun here and have not ended."""
        return self.server.in_flight + (self.source.in_flight if self.source is not None else 0)

    @property
    def target(self) -> StageIndex | None:
        """Where this peer is to go; None: it stays."""
        return self._posted.target

    @property
    def amended(self) -> asyncio.Event:
        """Set once the run has other settings than this peer was made under: it is to join anew."""
        return self._rolling_back.amended

    @property
    def ending(self) -> Ending | None:
        """The run key's word that the present era ends, to be amended."""
        ending = self._rolling_back.ending
        return ending if ending is not None and ending.era == self.steps.era else None

    def lost(self, peer: PeerId) -> None:
        """The peer may not train any more."""
        self.neighbours.drop(peer)
        self.context.events.publish(PeerLost(peer))

    def fault(self) -> None:
        """The run key says that this peer has computed wrongly."""
        if self.verifying.mending is not None:
            self.verifying.mending.fault()

    def pardon(self) -> None:
        """The run key takes it back: the state is loaded anew."""
        if self.verifying.mending is not None:
            self.catch_up.load_anew()

    # -- what its parts ask -------------------------------------------------------------------------------

    def _was_of_stage(self, peer: PeerId, stage: int) -> bool:
        """Whether a header of that stage may be a peer's, whatever has become of it since: as far as this peer can
        know, that is of the stages beside it."""
        return abs(stage - self.stage) > 1 or self._own.verdicts.standing.table.was_member(peer)

    def _is_of_stage(self, peer: PeerId, stage: int) -> bool:
        """As far as this peer can know: it knows its own stage."""
        return stage != self.stage or peer in self.steps.chain.members or peer in self.neighbours.of_stage(stage)

    async def _on_run(self, sender: PeerId, request: Message) -> Message:
        """For those who know fewer amendments, while the host is away."""
        return Message(self._joined.signed_run.to_value())

    async def _keep_to_the_permit(self) -> None:
        """What may begin changes with the owner's permit."""
        while True:
            changed = self._own.permit.changed
            for thread in (self.context.compute, self.context.judging):
                thread.wake()
            await changed.wait()


def _context(own: Belongings, joined: Joined, threads: WorkThreads) -> StageContext:
    settings, stage = joined.settings, joined.chain.stage
    return StageContext(
        settings=settings,
        run_id=joined.run_id,
        identity=own.identity,
        transport=own.transport,
        compute=threads.compute,
        copies=threads.copies,
        exact=threads.exact,
        replays=threads.replays,
        judging=threads.judging,
        snapshots=SnapshotStore(joined.snapshots, threads=own.threads),
        results=ResultStore(joined.snapshots, joined.chain, kept=settings.retained_results),
        reductions=ReductionStore(settings.audits.retained_versions),
        tasks=Tasks(stage),
        events=Events(),
    )


def _next_changed(downstream: Downstream, stage: int, event: PeersChanged) -> None:
    if event.stage == stage:
        downstream.update_peers(set(event.peers))


def work_threads(
    joined: Joined,
    permit: Permit,
    follower: Callable[[], Callable[[], None]],
    memory: MemoryPressure,
    *,
    make: Callable[..., WorkThread] = WorkThread,
) -> WorkThreads:
    """Of a peer that has joined; `follower` makes what sets how many cores a thread computes with."""
    compute = compute_thread(joined.settings, permit, follower(), memory, make=make)
    link, follow = joined.model.link, follower()

    def go_aside() -> None:
        follow()
        link.go_aside()

    shares = link.device.type == "cpu"
    judging = make(
        "judging", before_job=go_aside, may_begin=lambda urgency: shares or not permit.withheld, memory=memory
    )
    replays = compute if shares else judging
    log.info(
        "replays for audits, exams and juries run on %s, %s",
        link.device,
        "after what is trained" if shares else "beside what is trained",
    )
    copies = compute if shares else make("copies", memory=memory)
    return WorkThreads(compute, copies, make("exact", memory=memory), replays, judging)


def compute_thread(
    settings: RunSettings,
    permit: Permit,
    before_job: Any,
    memory: MemoryPressure,
    *,
    make: Callable[..., WorkThread] = WorkThread,
) -> WorkThread:
    """A peer's: paused, what is begun is finished, and audits and evaluations wait."""
    return make(
        "compute",
        before_job=before_job,
        may_begin=lambda urgency: urgency <= Urgency.BIRTH or not permit.withheld,
        audits_wait_s=settings.deadlines.step_s,
        memory=memory,
    )
