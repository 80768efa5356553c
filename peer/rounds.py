"""This is where a stage's steps run on this peer: they open, are averaged, and make the new version.

`swarm.core` decides (StepProgress, AveragingRound, StageChain); this carries out: messages, encoding on the exact
thread, deadlines on the event loop. Handlers and tasks all run on one event loop, so decisions never interleave.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from peer.adversary import HONEST, Adversary
from peer.bare_results import BareResults
from peer.compute import Urgency, WorkThread
from peer.grants import StepGrants
from peer.replica import StageReplica
from peer.round_driver import RoundDriver
from peer.screening import KnownStanding, Screening
from peer.signing_log import SigningLog
from peer.snapshots import SnapshotStore
from peer.step_reports import StepReports
from peer.step_state import Applied, Bytes, StepState
from peer.tickets import Tickets
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import StageState
from swarm.core import averaging_round as act
from swarm.core.averaging_round import AveragingRound
from swarm.core.contribution import Result
from swarm.core.deadlines import AdaptiveDeadline
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.settings import RunSettings
from swarm.core.stage_chain import StageChain
from swarm.core.step_progress import StepProgress
from swarm.core.voting import Reconfiguration
from swarm.host_protocol import RECONFIGURE, STANDING
from swarm.identity import Identity, verify
from swarm.model.stage import Weights
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport
from swarm.witness_service import VoteLog
from verification.kinds.equivocation import Statement
from verification.kinds.protocol_violation import ProtocolViolation

log = logging.getLogger(__name__)

SHORTEST_PHASE_S, PHASE_FACTOR, PHASE_WINDOW = 1.0, 2.0, 16
"""A phase of a round is waited for twice as long as whole rounds lately took: a second at least."""
LOOK_EVERY_S = 0.5
PING_S = 2.0


class StageRounds:
    """The stage's steps as seen by one of its peers."""

    def __init__(
        self,
        settings: RunSettings,
        run_id: str,
        identity: Identity,
        transport: Transport,
        replica: StageReplica,
        chain: StageChain,
        compute: WorkThread,
        exact: WorkThread,
        snapshots: SnapshotStore,
        signing_log: SigningLog,
        vote_log: VoteLog,
    ) -> None:
        self.settings = settings
        self.chain = chain
        self.replica = replica
        self.run_id = run_id
        self.identity = identity
        self.me = identity.peer_id
        self.transport = transport
        self.compute = compute
        self.exact = exact
        self.snapshots = snapshots
        self.signing_log = signing_log
        self.driver = RoundDriver(self)
        self._reports = StepReports(self)
        self._vote_log = vote_log
        limit_s = settings.deadlines.round_phase_s
        self._phase = AdaptiveDeadline(
            limit_s=limit_s, floor_s=min(limit_s, SHORTEST_PHASE_S), factor=PHASE_FACTOR, window=PHASE_WINDOW
        )
        self._steps: dict[Step, StepState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._version_changed = asyncio.Event()
        self._stopped = False
        self._turning = asyncio.Lock()
        """Held while a version takes the place of another, so that two never do at once."""
        self.tickets = Tickets(self._steps, self._leased, replica.accepts)
        self.joining: set[PeerId] = set()
        self._joins_at: Version | None = None
        self._gone: dict[PeerId, Version] = {}
        """Members that did not answer, with the version at that time, until they are left out or heard of."""
        self.results: dict[int, tuple[Result, list[Bytes]]] = {}
        self.bare_results = BareResults()
        self.on_applied: list[Callable[[Applied], Awaitable[None]]] = []
        self.on_contributed: Callable[[Step, Sequence[Bytes]], None] = lambda step, parts: None
        """Told of the encoded parts of this peer's contribution before they are committed to."""
        self.on_behind: Callable[[PeerId], None] = lambda peer: None
        self.on_equivocation: Callable[[Statement, Statement], None] = lambda one, other: None
        """Told of two statements that one peer has signed, and which may contradict each other."""
        self.on_violation: Callable[[ProtocolViolation], None] = lambda case: None
        """Told of bytes that no honest program writes, with what their maker signed for them."""
        self.adversary: Adversary = HONEST
        self.screening = Screening(KnownStanding(), lambda: self.version)
        self.neighbours: Callable[[], set[PeerId]] = set
        """Live peers of the neighbouring stages."""
        self.charges: Callable[[], tuple[bytes, ...]] = tuple
        """What this peer brings before juries with its next contribution."""
        self.may_join: Callable[[PeerId], bool] = lambda peer: True
        """Whether a peer may be a member: not while it is on probation."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when something broke that this peer cannot mend: its supervisor must end it."""

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the stage's rounds from the chain's version on."""
        settings = self.settings
        self._reports.serve()
        self.transport.serve(STANDING, self._on_standing, max_body_bytes=0)
        self.transport.serve(RECONFIGURE, self._on_reconfigure, max_body_bytes=0)
        self.driver.serve()
        assert settings.deadlines.round_phase_s > 0
        self._open_steps()

    async def stop(self) -> None:
        """End all work; nothing is begun after it."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def version(self) -> Version:
        return self.chain.version

    @property
    def era(self) -> int:
        """Of the run."""
        return self.chain.era

    @property
    def is_member(self) -> bool:
        return self.me in self.chain.members

    def joins_at(self, version: Version) -> None:
        """The leader says that the rosters make this peer a member with that version."""
        if self._joins_at is None or self._joins_at <= self.version:  # the first word holds until its time has come
            self._joins_at = version

    def may_work_for(self, step: Step) -> bool:
        """Whether what this peer computes for the step can count: it is a member, or will be by the time of its round.

        The next step's microbatches come while this one's round still runs, which names whom it lets in. If it does not
        name this peer, the work is lost, and nothing more.
        """
        if self.is_member:
            return True
        joins_at = self._joins_at
        return joins_at is not None and self.version < joins_at <= int(step) and self.may_join(self.me)

    @property
    def is_over(self) -> bool:
        return self.chain.version >= self.settings.optimizer.total_steps

    def evaluation_weights(self, version: int) -> Weights | None:
        """Weights of the current version or of a snapshot on disk."""
        if version == self.replica.version:
            return self.replica.weights_for(Step(version))[1]
        snapshot = self.snapshots.get(version)
        return self.replica.model.weights(snapshot.weights()) if snapshot is not None else None

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        """Whether the stage reached `version` within the time."""
        give_up_at = time.monotonic() + timeout_s
        while self.chain.version < version:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return False
            await happened(self._version_changed, within_s=left_s)
        return True

    async def begin_again(self, state: StageState, chain: StageChain) -> None:
        """Leave what is in flight, and go on from this state, at `chain.version`, whatever the version was here."""
        async with self._turning:
            self.replica.restore(state)
            self._rebase(chain)
            self.snapshots.begin_anew()

    def _rebase(self, chain: StageChain) -> None:
        assert self.replica.version == chain.version
        self.chain = chain
        for state in self._steps.values():
            state.dirty.set()
        self._steps.clear()
        self.tickets.begin_again()
        self.results.clear()
        self.bare_results.clear()
        self._open_steps()
        self._announce_version()

    def _announce_version(self) -> None:
        self._version_changed.set()
        self._version_changed = asyncio.Event()
        self.tickets.look_again()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopped:
            work.close()
            return
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would never be awaited

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (TransientError, RemoteError) as error:
            log.info("stage %d: %s", self.chain.stage, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a service that dies tells its supervisor
            of_the_program = not isinstance(error, OSError)  # else of the disk, which the message names
            log.error("stage %d: the round cannot go on: %s", self.chain.stage, error, exc_info=of_the_program)
            if not self.failure.done():
                self.failure.set_exception(error)

    # -- steps --------------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        version = self.chain.version
        for step in [step for step in self._steps if int(step) < version]:
            over = self._steps.pop(step)
            self.tickets.step_is_over(over.grants)
            over.dirty.set()
            over.notify()
        if self.is_over:
            return
        newest = version + (1 if self.settings.delay_at(version + 1) else 0)
        for number in range(version, min(newest, self.settings.optimizer.total_steps - 1) + 1):
            step = Step(number)
            if step not in self._steps:
                self._steps[step] = self._new_step(step)
                self.spawn(self._reports.report_while_open(self._steps[step]))
        self._begin_round(self._steps[Step(version)])

    def _new_step(self, step: Step) -> StepState:
        deadlines = self.settings.deadlines
        progress = StepProgress(
            step,
            self.chain.stage == 0,
            self.settings.microbatches_per_step,
            deadlines.step_s,
            deadlines.straggler_s,
        )
        progress.reserve(self.present(), now=time.monotonic())
        return StepState(step, self.chain.leaders(step), progress, StepGrants(step))

    def present(self) -> list[PeerId]:
        """Members, but for those that did not answer."""
        return [peer for peer in self.chain.members if peer not in self._gone]

    def _begin_round(self, state: StepState) -> None:
        state.facts = self.chain.facts(
            num_parts=self.replica.num_parts,
            phase_s=self._phase.seconds,
            max_tokens=self.settings.microbatch_tokens,
        )
        if self.is_member:
            name = self.chain.name
            # Whoever votes alone cannot contradict another.
            votes = self._vote_log.may_vote(name) or state.facts.voters == (self.me,)
            state.round = AveragingRound(
                state.facts,
                self.me,
                self.identity.sign,
                verify,
                view=state.view,
                votes=votes,
                signed_under=self._vote_log.signed_under(name),
            )
            self.log_round(state)
            state.notify()
            state.dirty.set()
            self.spawn(self._watch_deadlines(state))

    def log_round(self, state: StepState) -> None:
        """Nothing that is signed from now on leaves before the round and its reconfiguration are on disk."""
        machine = state.round
        assert machine is not None
        state.logged, state.logged_under = asyncio.get_running_loop().create_future(), machine.changed
        self.spawn(self._log_round(machine.facts.previous_name, machine.changed, state.logged))

    async def _log_round(self, name: bytes, changed: Reconfiguration | None, logged: asyncio.Future[None]) -> None:
        await self._vote_log.begin(name, changed)
        logged.set_result(None)

    # -- progress -----------------------------------------------------------------------------------------

    def saw_step(self, step: Step) -> None:
        """A microbatch of `step` arrived: the step before is ending."""
        earlier = self._steps.get(Step(step - 1))
        if earlier is not None and not earlier.saw_next:
            earlier.saw_next = True
            earlier.dirty.set()

    def work_done(self, step: Step) -> None:
        """The step's sum has grown."""
        state = self._steps.get(step)
        if state is not None:
            state.dirty.set()

    async def _on_standing(self, sender: PeerId, request: Message) -> Message:
        """Where the stage is, for whoever finds it silent; `stage`, if given: the one that is meant."""
        fields = Fields("standing request", request.meta)
        if fields.optional("stage"):
            self.check_stage(sender, fields.integer("stage"))
        fields.done()
        state = self._steps.get(Step(self.chain.version))
        # A reconfiguration under which this identity has voted is over: the next must begin past it.
        view = max(state.leading_view if state is not None else 0, self._vote_log.signed_under(self.chain.name))
        closing = state is not None and state.round is not None and state.round.is_closing
        basis = self.chain.basis.to_value()
        return Message({"version": self.chain.version, "view": view, "closing": closing, "basis": basis})

    async def _on_reconfigure(self, sender: PeerId, request: Message) -> Message:
        """The run key names other voters for the present round. Whoever brings its word does not matter."""
        changed = Reconfiguration.from_value(Fields("reconfiguration call", request.meta).message("reconfiguration"))
        state = await self.step_state(changed.step, with_round=True)
        assert state.round is not None
        log.warning("stage %d step %d: %d voters decide from now on", changed.stage, changed.step, len(changed.voters))
        self.driver.carry_out(state, state.round.reconfigure(changed, now=time.monotonic()))
        return Message()

    def open_step(self, step: Step) -> StepState | None:
        """The step, while it is open here."""
        return self._steps.get(step)

    def owes_work(self) -> bool:
        """Whether an open step holds work of this peer that the other members' rounds will still take."""
        others = len(self.chain.members) > 1 and self.is_member
        return others and any(self.replica.num_done(step) for step in self._steps)

    def _leased(self) -> list[MicrobatchId]:
        return self.chain.leases.ids_of(self.me) if self.is_member and not self.is_over else []

    def check_stage(self, sender: PeerId, stage: int) -> None:
        """Raises RemoteError for what is meant for a stage that this peer has left."""
        if self._stopped or stage != self.chain.stage:
            now = "has left it" if self._stopped else f"serves stage {self.chain.stage}"
            raise RemoteError("protocol", f"a message to stage {stage}: this peer {now}", sender)

    # -- the round ----------------------------------------------------------------------------------------

    def next_to_join(self) -> Version:
        """The version with which whoever asks now becomes a member: a round that is closing names nobody more."""
        state = self._steps.get(Step(self.chain.version))
        is_closing = state is not None and state.round is not None and state.round.is_closing
        return Version(self.chain.version + 1 + is_closing)

    async def step_state(self, step: Step, *, with_round: bool = False) -> StepState:
        """The open step, waiting for this peer to reach it. Raises TransientError if it does not in time."""
        give_up_at = time.monotonic() + self.settings.deadlines.call_s / 2
        while True:
            state = self._steps.get(step)
            if state is not None and (state.round is not None or not with_round):
                return state
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or int(step) < self.chain.version or self.is_over:
                raise TransientError(f"step {step} is not open here: version {self.chain.version}")
            await happened(self._version_changed, within_s=left_s)

    async def is_gone(self, peer: PeerId) -> bool:
        """Whether the peer does not even answer a ping, or has gone to another stage: one broken stream is no death.
        Probation is one, to rounds."""
        if not self.may_join(peer):
            return True
        try:
            reply = await self.transport.call(peer, "ping", Message(), timeout_s=PING_S, max_body_bytes=0)
            fields = Fields("ping answer", reply.meta)
            return fields.optional("stage") and fields.integer("stage") != self.chain.stage
        except UnreachableError:
            return True
        except (TransientError, RemoteError):
            return False

    def heard_of(self, peer: PeerId) -> None:
        """It reports: it is not gone."""
        self._gone.pop(peer, None)

    def peer_lost(self, peer: PeerId) -> None:
        """The peer's open call broke: unless it answers a ping, every open step is told at once."""

        async def confirm() -> None:
            if await self.is_gone(peer):
                for state in list(self._steps.values()):
                    self.unreachable(state, peer)

        self.spawn(confirm())

    def unreachable(self, state: StepState, peer: PeerId) -> None:
        if self._steps.get(state.step) is not state:
            return
        led_by = state.leader
        self._gone[peer] = self.chain.version
        state.progress.lost(peer)
        self.joining.discard(peer)
        if state.round is not None:
            self.driver.carry_out(state, state.round.unreachable(peer, now=time.monotonic()))
            state.view = state.round.view
        elif state.leader == peer:
            state.view += 1
        if state.leader == self.me and led_by != self.me:
            state.progress.expect(self.present(), now=time.monotonic())
        state.dirty.set()

    async def _watch_deadlines(self, state: StepState) -> None:
        while self._steps.get(state.step) is state and state.round is not None:
            now = time.monotonic()
            times = [t for t in (state.round.deadline, state.progress.next_deadline()) if t is not None and t > now]
            await happened(state.changed, within_s=max(0.01, min([LOOK_EVERY_S, *(t - now for t in times)])))
            if self._steps.get(state.step) is not state:
                return
            self._reports.close_if_due(state)
            self._reports.look_for_the_silent(state)
            self.driver.carry_out(state, state.round.tick(now=time.monotonic()))

    async def adopt(self, result: Result, bodies: list[Bytes]) -> None:
        """Take the present step's result from another peer's store. Raises RemoteError if it is not genuine."""
        version = self.chain.version
        state = self._steps.get(Step(version))
        if state is None or state.facts is None or int(result.roster.step) != version:
            return
        if state.round is None:
            state.facts.check_result(result, verify, certified=True)
        for reduced, body in zip(result.parts, bodies, strict=True):
            if not reduced.is_empty and bulk_digest(body) != reduced.digest:
                raise RemoteError("digest", f"part {reduced.part} of step {state.step} differs from its digest")
            state.reduced[reduced.part, reduced.digest] = body
        if state.round is None:
            self.spawn(self.finish(state, result))
        else:
            out = state.round.on_result(result, now=time.monotonic())
            out = [instruction for instruction in out if not isinstance(instruction, act.FetchPart)]
            for reduced in result.parts:
                out += state.round.part_fetched(reduced.part, reduced.digest, now=time.monotonic())
            self.driver.carry_out(state, out)
        await self.wait_for_version(version + 1, timeout_s=self.settings.deadlines.round_phase_s)

    async def finish(self, state: StepState, result: Result) -> None:
        async with self._turning:
            if self._steps.get(state.step) is not state or int(state.step) != self.chain.version:
                return
            applied, frozen = await self._apply(state, result)
        if frozen is not None:
            await self.snapshots.save(frozen, applied.chain)
        for listener in self.on_applied:
            await listener(applied)

    async def _apply(self, state: StepState, result: Result) -> tuple[Applied, StageState | None]:
        """Take the step; what was done, and the new state where a snapshot is due."""
        replica, chain = self.replica, self.chain
        bodies = [b"" if part.is_empty else state.reduced[part.part, part.digest] for part in result.parts]
        closed = state.accumulation  # else the compute thread is waited for, which may be at a microbatch
        if closed is None:
            closed = await self.compute.run(Urgency.ROUND, lambda: replica.close(state.step))
        next_chain = chain.advance(result, self.settings)

        name = next_chain.name
        new = await self.driver.parts.next_version(state, result, bodies, name)
        replica.swap(new)
        self.chain = next_chain
        self.results[int(state.step)] = (result, bodies)
        self.bare_results.keep(result)
        for old in sorted(self.results)[: -self.settings.retained_results]:
            del self.results[old]
        self.joining -= set(next_chain.members)
        heard = {contribution.peer_id for contribution in result.roster.contributions}
        for peer, version in list(self._gone.items()):
            if peer not in next_chain.members or (peer in heard and int(state.step) > version):
                del self._gone[peer]
        seconds = time.monotonic() - (state.closed_at or time.monotonic())
        if state.closed_at is not None and state.round is not None:
            if result.roster.view > state.round.facts.first_view or result.roster.leaves:
                self._phase.missed()
            else:
                self._phase.observe(seconds)
        worked_s = self.compute.busy_s - state.busy_s_at_close
        applied = Applied(
            result=result,
            chain=next_chain,
            gradient_norm=new.gradient_norm,
            seconds=seconds,
            overlap=min(1.0, worked_s / seconds) if state.closed_at is not None and seconds > 0 else 0.0,
            sent_bytes=state.sent_bytes,
            stale=closed.stale,
            counted=len(closed.work),
            not_finite=tuple(sorted(closed.not_finite)),
        )
        due = next_chain.version % self.settings.checkpoint.snapshot_every == 0 or self.is_over
        frozen = await self.exact.run(Urgency.ROUND, replica.frozen_state) if due else None
        self._open_steps()
        self._announce_version()
        return applied, frozen
