"""This is where a stage's steps run on this peer: progress to the leader, the averaging round, the new version.

`swarm.core` decides (StepProgress, AveragingRound, StageChain); this carries out: messages, encoding on the exact
thread, deadlines on the event loop. Handlers and tasks all run on one event loop, so decisions never interleave.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from peer.compute import Urgency, WorkThread
from peer.grants import StepGrants, Ticket
from peer.replica import StageReplica
from peer.round_work import decode_gradient, encode_contribution, reduce_part
from peer.signing_log import SigningLog
from peer.snapshots import SnapshotStore
from peer.step_state import Applied, Bytes, StepState
from swarm.core import averaging_round as act
from swarm.core.averaging_round import AveragingRound, Instruction, RoundFacts
from swarm.core.canonical import Value, digest
from swarm.core.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, peer_item
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.settings import RunSettings
from swarm.core.stage_chain import StageChain
from swarm.core.step_progress import MemberReport, StepProgress
from swarm.identity import Identity, verify
from swarm.model.stage import Weights
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

PROGRESS, ROUND, PART_BYTES = "progress", "round", "part_bytes"
REPORT_EVERY_S = 0.25
RESEND_S = 0.2
PING_S = 2.0
RETAINED_RESULTS = 24
"""Results whose bytes are kept for late peers; snapshots cover what is older."""


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
    ) -> None:
        self.settings = settings
        self.chain = chain
        self.replica = replica
        self._run_id = run_id
        self._identity = identity
        self._me = identity.peer_id
        self._transport = transport
        self._compute = compute
        self._exact = exact
        self.snapshots = snapshots
        self._signing_log = signing_log
        self._steps: dict[Step, StepState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._version_changed = asyncio.Event()
        self._stopped = False
        self._wanted = 0
        self._grant_available = asyncio.Event()
        self._tries: dict[MicrobatchId, int] = {}
        self._used: set[MicrobatchId] = set()
        self.joining: set[PeerId] = set()
        self.results: dict[int, tuple[Result, list[Bytes]]] = {}
        self.on_applied: list[Callable[[Applied], Awaitable[None]]] = []
        self.on_behind: Callable[[PeerId], None] = lambda peer: None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when something broke that this peer cannot mend: its supervisor must end it."""

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the stage's rounds from the chain's version on."""
        settings = self.settings
        part_bytes = max(self.replica.codec.encoded_bytes(part.stop - part.start) for part in self.replica.parts())
        self._transport.serve(PROGRESS, self._on_progress, max_body_bytes=0)
        self._transport.serve(ROUND, self._on_round, max_body_bytes=part_bytes)
        self._transport.serve(PART_BYTES, self._on_part_bytes, max_body_bytes=0)
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
    def is_member(self) -> bool:
        return self._me in self.chain.members

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

    def rebase(self, chain: StageChain) -> None:
        """Continue from a state that was downloaded: the replica holds `chain.version` already."""
        assert self.replica.version == chain.version
        self.chain = chain
        for state in self._steps.values():
            state.dirty.set()
        self._steps.clear()
        self._used.clear()
        self.results.clear()
        self._open_steps()
        self._announce_version()

    def _announce_version(self) -> None:
        self._version_changed.set()
        self._version_changed = asyncio.Event()
        self._grant_available.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
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
            log.exception("stage %d: the round cannot go on", self.chain.stage)
            if not self.failure.done():
                self.failure.set_exception(error)

    # -- steps --------------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        version = self.chain.version
        for step in [step for step in self._steps if int(step) < version]:
            over = self._steps.pop(step)
            self._used -= over.grants.in_flight | over.grants.done
            over.dirty.set()
            over.notify()
        if self.is_over:
            return
        newest = version + (1 if self.settings.delay_at(version + 1) else 0)
        for number in range(version, min(newest, self.settings.optimizer.total_steps - 1) + 1):
            step = Step(number)
            if step not in self._steps:
                self._steps[step] = self._new_step(step)
                self._spawn(self._report_while_open(self._steps[step]))
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
        progress.reserve(self.chain.members, now=time.monotonic())
        return StepState(step, self.chain.leaders(step), progress, StepGrants(step))

    def _begin_round(self, state: StepState) -> None:
        state.facts = RoundFacts(
            run_id=self._run_id,
            stage=self.chain.stage,
            step=state.step,
            members=self.chain.members,
            leaders=self.chain.leaders(state.step),
            previous_name=self.chain.name,
            num_parts=self.replica.num_parts,
            phase_s=self.settings.deadlines.round_phase_s,
        )
        if self.is_member:
            state.round = AveragingRound(state.facts, self._me, self._identity.sign, verify, view=state.view)
            state.notify()
            state.dirty.set()
            self._spawn(self._watch_deadlines(state))

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

    async def _report_while_open(self, state: StepState) -> None:
        while self._steps.get(state.step) is state:
            if self.is_member and (state.round is None or state.round.roster is None):
                await self._report(state)
            await happened(state.dirty, within_s=REPORT_EVERY_S)
            state.dirty.clear()

    async def _report(self, state: StepState) -> None:
        is_source = self.chain.stage == 0
        num_done = self.replica.num_done(state.step)
        report = MemberReport(
            num_done=num_done,
            # A gradient is in the sum a moment before its ticket is done: counted once, or one too many is granted.
            num_in_flight=max(0, state.grants.started - num_done) if is_source else 0,
            num_wanted=self._wanted if is_source else 0,
            saw_next=state.saw_next,
        )
        leader = state.leader
        if leader == self._me:
            granted, exhausted = self._take_report(state, self._me, report)
        else:
            meta: dict[str, Value] = {
                "step": state.step,
                "view": state.round.view if state.round is not None else state.view,
                "done": report.num_done,
                "in_flight": report.num_in_flight,
                "wanted": report.num_wanted,
                "saw_next": report.saw_next,
                "joins": [*sorted(self.joining)],
            }
            try:
                reply = await self._transport.call(
                    leader, PROGRESS, Message(meta), timeout_s=self.settings.deadlines.call_s, max_body_bytes=0
                )
                fields = Fields("progress answer", reply.meta)
                granted, exhausted = fields.integer("granted"), fields.boolean("exhausted")
                if fields.boolean("over"):
                    self.on_behind(leader)
                    return
            except UnreachableError as error:
                log.info("stage %d step %d: leader %s: %s", self.chain.stage, state.step, leader[-6:], error)
                if await self._is_gone(leader):
                    self._unreachable(state, leader)
                return
            except (TransientError, RemoteError) as error:  # alive, but not ready for this step yet: report again
                log.debug("stage %d step %d: leader %s: %s", self.chain.stage, state.step, leader[-6:], error)
                return
        grants = state.grants
        if (granted, exhausted) != (grants.granted, grants.exhausted):
            grants.granted, grants.exhausted = granted, exhausted
            self._grant_available.set()

    def _take_report(self, state: StepState, member: PeerId, report: MemberReport) -> tuple[int, bool]:
        granted = state.progress.report(member, report, now=time.monotonic())
        self._close_if_due(state)
        return granted, state.progress.is_exhausted

    async def _on_progress(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("progress", request.meta)
        step, view = Step(fields.integer("step")), fields.integer("view", high=1 << 20)
        report = MemberReport(
            fields.integer("done", high=1 << 20),
            fields.integer("in_flight", high=1 << 20),
            fields.integer("wanted", high=1 << 10),
            fields.boolean("saw_next"),
        )
        joins = fields.items("joins", peer_item, max_items=64)
        fields.done()
        if int(step) < self.chain.version:
            return Message({"granted": 0, "exhausted": True, "over": True})
        state = await self._step_state(step)
        if sender not in self.chain.members and int(step) == self.chain.version:
            raise RemoteError("standing", f"{sender} is no member of stage {self.chain.stage}", sender)
        if state.leader != self._me:
            await self._take_over(state, view)
        self.joining.update(joins)
        granted, exhausted = self._take_report(state, sender, report)
        return Message({"granted": granted, "exhausted": exhausted, "over": False})

    async def _take_over(self, state: StepState, view: int) -> None:
        """A member takes this peer for the leader of a later view: true only if the present leader is gone."""
        mine = state.round.view if state.round is not None else state.view
        if view <= mine or state.leaders[view % len(state.leaders)] != self._me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step}, not this peer")
        leader = state.leader
        if not await self._is_gone(leader):
            raise TransientError(f"leader {leader[-6:]} of step {state.step} is alive")
        self._unreachable(state, leader)
        if state.leader != self._me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step} now")

    def _close_if_due(self, state: StepState) -> None:
        if state.round is None or state.leader != self._me or state.closed_at is not None:
            return
        now = time.monotonic()
        synchronous = self.settings.delay_at(state.step + 1) == 0
        closing = state.progress.closing(now=now, synchronous=synchronous)
        if closing is None:
            return
        log.debug("stage %d step %d closes: %s", self.chain.stage, state.step, closing.reason)
        joins = [peer for peer in self.joining if peer not in self.chain.members]
        view = state.round.view
        self._carry_out(state, state.round.close(reason=closing.reason, joins=joins, view=view, now=now))

    def owes_work(self) -> bool:
        """Whether an open step holds work of this peer that the other members' rounds will still take."""
        others = len(self.chain.members) > 1 and self.is_member
        return others and any(self.replica.num_done(step) for step in self._steps)

    # -- grants (stage 0) ---------------------------------------------------------------------------------

    def want(self, num_slots: int) -> None:
        """The source could start this many more microbatches now."""
        if num_slots != self._wanted:
            self._wanted = num_slots
            for state in self._steps.values():
                state.dirty.set()

    async def next_ticket(self) -> Ticket:
        """The next microbatch this member may start; waits for a grant."""
        while True:
            if self.is_member and not self.is_over:
                leased = self.chain.leases.ids_of(self._me)
                for step in sorted(self._steps):
                    ticket = self._steps[step].grants.take(leased, self._used, self._tries)
                    if ticket is not None:
                        # Its slot is spoken for: a report made before the source says so must not ask for one more.
                        self._wanted = max(0, self._wanted - 1)
                        return ticket
            self._grant_available.clear()
            await self._grant_available.wait()

    def ticket_done(self, ticket: Ticket) -> None:
        """The microbatch's gradient is in the step's sum."""
        state = self._steps.get(ticket.step)
        if state is not None:
            state.grants.in_flight.discard(ticket.microbatch_id)
            state.grants.done.add(ticket.microbatch_id)
            state.dirty.set()
        self._tries.pop(ticket.microbatch_id, None)

    def ticket_failed(self, ticket: Ticket, *, step_is_over: bool) -> None:
        """The microbatch did not make it in this try; its id is free again."""
        self._tries[ticket.microbatch_id] = self._tries.get(ticket.microbatch_id, 0) + 1
        self._used.discard(ticket.microbatch_id)
        state = self._steps.get(ticket.step)
        if state is not None:
            state.grants.in_flight.discard(ticket.microbatch_id)
            if step_is_over:
                state.grants.over = True
                state.saw_next = True
            state.dirty.set()
        self._grant_available.set()

    # -- the round ----------------------------------------------------------------------------------------

    async def _step_state(self, step: Step, *, with_round: bool = False) -> StepState:
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

    async def _on_round(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("round message", request.meta)
        kind, step = fields.text("kind"), Step(fields.integer("step"))
        if int(step) < self.chain.version:
            return Message({"status": "over"})
        state = await self._step_state(step, with_round=True)
        machine = state.round
        assert machine is not None
        now = time.monotonic()
        if kind == "close":
            out = machine.on_close(sender, fields.integer("view", high=1 << 20), now=now)
        elif kind == "commit":
            view = fields.integer("view", high=1 << 20)
            contribution = Contribution.from_value(fields.message("contribution"))
            roster = Roster.from_value(fields.message("roster")) if fields.optional("roster") else None
            result = Result.from_value(fields.message("result")) if fields.optional("result") else None
            out = machine.on_commit(sender, view, contribution, roster, result, now=now)
        elif kind == "roster":
            out = machine.on_roster(sender, Roster.from_value(fields.message("roster")), now=now)
            state.notify()
        elif kind == "part":
            part, view = fields.integer("part", high=1 << 20), fields.integer("view", high=1 << 20)
            out = await self._receive_part(state, machine, sender, part, view, request.body)
        elif kind == "reduced":
            reduced = ReducedPart.from_value(fields.message("reduced"))
            out = await self._receive_reduced(state, machine, sender, reduced, request.body)
        elif kind == "result":
            out = machine.on_result(Result.from_value(fields.message("result")), now=now, sender=sender)
        else:
            raise RemoteError("protocol", f"round message of kind {kind[:20]!r}", sender)
        self._carry_out(state, out)
        return Message({"status": "ok"})

    async def _receive_part(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        part: int,
        view: int,
        body: Bytes,
    ) -> list[Instruction]:
        await self._roster_known(state, machine, view)
        expected = machine.expected_digest(part, sender)
        if await self._exact.run(Urgency.ROUND, lambda: hashlib.sha256(body).digest()) != expected:
            raise RemoteError("digest", f"part {part} of {sender} differs from its commitment", sender)
        state.received[part, sender] = body
        return machine.on_part(sender, part, now=time.monotonic())

    async def _receive_reduced(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        reduced: ReducedPart,
        body: Bytes,
    ) -> list[Instruction]:
        await self._roster_known(state, machine, 0)
        if await self._exact.run(Urgency.ROUND, lambda: hashlib.sha256(body).digest()) != reduced.digest:
            raise RemoteError("digest", f"reduced part {reduced.part} of {sender} differs from its digest", sender)
        state.reduced[reduced.part, reduced.digest] = body
        return machine.on_reduced(sender, reduced, now=time.monotonic())

    async def _roster_known(self, state: StepState, machine: AveragingRound, view: int) -> None:
        """Wait for a roster of the view or a later one; what was sent under it may be ahead of it."""
        give_up_at = time.monotonic() + self.settings.deadlines.call_s / 2
        while machine.roster is None or machine.roster.view < view:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise TransientError(f"no roster of step {state.step} here yet")
            await happened(state.changed, within_s=left_s)

    def _carry_out(self, state: StepState, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case act.MakeContribution():
                    state.closed_at = state.closed_at or time.monotonic()
                    self._spawn(self._contribute(state))
                case act.SendClose(to, view, reason):
                    self._send_all(state, to, {"kind": "close", "view": view, "reason": reason[:200]})
                case act.SendCommit(leader, view, contribution, roster, result):
                    meta: dict[str, Value] = {
                        "kind": "commit",
                        "view": view,
                        "contribution": contribution.to_value(),
                        "roster": roster.to_value() if roster is not None else None,
                        "result": result.to_value() if result is not None else None,
                    }
                    self._send_all(state, (leader,), meta)
                case act.SendRoster(to, roster):
                    state.notify()
                    self._send_all(state, to, {"kind": "roster", "roster": roster.to_value()})
                case act.SendPart(reducer, part, view):
                    own: dict[str, Value] = {"kind": "part", "part": part, "view": view}
                    self._send_all(state, (reducer,), own, state.own_parts[part])
                case act.AggregatePart(part, contributors):
                    assert state.round is not None
                    assert state.round.roster is not None
                    self._spawn(self._aggregate(state, state.round.roster, part, contributors))
                case act.SendReduced(to, reduced):
                    body = state.reduced[reduced.part, reduced.digest]
                    self._send_all(state, to, {"kind": "reduced", "reduced": reduced.to_value()}, body)
                case act.SendResult(to, result):
                    self._send_all(state, to, {"kind": "result", "result": result.to_value()})
                case act.FetchPart(part, wanted, holders):
                    if (part, wanted) not in state.fetching:
                        state.fetching.add((part, wanted))
                        self._spawn(self._fetch(state, part, wanted, holders))
                case act.Finish(result):
                    self._spawn(self._finish(state, result))

    def _send_all(
        self,
        state: StepState,
        to: Iterable[PeerId],
        meta: dict[str, Value],
        body: Bytes = b"",
    ) -> None:
        for peer in to:
            self._spawn(self._send(state, peer, {**meta, "step": state.step}, body))

    async def _send(self, state: StepState, peer: PeerId, meta: dict[str, Value], body: Bytes) -> None:
        deadlines = self.settings.deadlines
        what = f"stage {self.chain.stage} step {state.step}: {meta.get('kind')!s} to {peer[-6:]}"
        while self._steps.get(state.step) is state:
            try:
                reply = await self._transport.call(
                    peer,
                    ROUND,
                    Message(meta, body),
                    timeout_s=max(deadlines.call_s, deadlines.round_phase_s),
                    max_body_bytes=0,
                )
            except RemoteError as error:
                log.warning("%s: refused: %s", what, error)
            except UnreachableError as error:
                log.info("%s: %s", what, error)
                if not await self._is_gone(peer):
                    continue
                self._unreachable(state, peer)
            except TransientError as error:  # alive, but not there yet: the round's own deadlines end this
                log.debug("%s: %s", what, error)
                await asyncio.sleep(RESEND_S)
                continue
            else:
                if reply.meta.get("status") == "over":
                    self.on_behind(peer)
            return

    async def _is_gone(self, peer: PeerId) -> bool:
        """Whether the peer does not even answer a ping: one broken stream is no death."""
        try:
            await self._transport.call(peer, "ping", Message(), timeout_s=PING_S, max_body_bytes=0)
        except UnreachableError:
            return True
        except (TransientError, RemoteError):
            return False
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """The peer's open call broke: unless it answers a ping, every open step is told at once."""

        async def confirm() -> None:
            if await self._is_gone(peer):
                for state in list(self._steps.values()):
                    self._unreachable(state, peer)

        self._spawn(confirm())

    def _unreachable(self, state: StepState, peer: PeerId) -> None:
        if self._steps.get(state.step) is not state:
            return
        led_by = state.leader
        state.progress.lost(peer)
        self.joining.discard(peer)
        if state.round is not None:
            self._carry_out(state, state.round.unreachable(peer, now=time.monotonic()))
            state.view = state.round.view
        elif state.leader == peer:
            state.view += 1
        if state.leader == self._me and led_by != self._me:
            state.progress.expect(self.chain.members, now=time.monotonic())
        state.dirty.set()

    async def _watch_deadlines(self, state: StepState) -> None:
        while self._steps.get(state.step) is state and state.round is not None:
            now = time.monotonic()
            times = [t for t in (state.round.deadline, state.progress.next_deadline()) if t is not None and t > now]
            await happened(state.changed, within_s=max(0.01, min([t - now for t in times], default=0.5)))
            if self._steps.get(state.step) is not state:
                return
            self._close_if_due(state)
            self._carry_out(state, state.round.tick(now=time.monotonic()))

    async def _contribute(self, state: StepState) -> None:
        replica, step = self.replica, state.step
        assert state.round is not None
        accumulation = await self._compute.run(Urgency.ROUND, lambda: replica.close(step))
        if not self._signing_log.may_sign(self.chain.lineage, step):
            log.warning("step %d: this peer may have signed before it was restarted, and stays silent", step)
            return
        seed_facts: list[Value] = [self._run_id, self.chain.stage, self.chain.version, self._me]
        parts, digests = await self._exact.run(
            Urgency.ROUND, lambda: encode_contribution(replica, accumulation, seed_facts)
        )
        work = tuple(accumulation.work[key] for key in sorted(accumulation.work)) if parts else ()
        unsigned = Contribution(self._run_id, self.chain.stage, step, self.chain.name, self._me, work, tuple(digests))
        await asyncio.to_thread(self._signing_log.record, self.chain.lineage, step, unsigned.signed_bytes())
        state.own_parts = parts
        for index, part in enumerate(parts):
            state.received[index, self._me] = part
        contribution = replace(unsigned, signature=self._identity.sign(unsigned.signed_bytes()))
        self._carry_out(state, state.round.contributed(contribution, now=time.monotonic()))

    async def _aggregate(self, state: StepState, roster: Roster, part: int, contributors: tuple[PeerId, ...]) -> None:
        machine, replica, chain = state.round, self.replica, self.chain
        assert machine is not None
        counted = chain.weights_of(Result(roster, (), self._me))
        bodies = [(counted[peer], state.received[part, peer]) for peer in contributors if counted[peer] > 0]
        cap, rule = replica.norm_cap(), self.settings.averaging.rule
        seed = digest("reduced-seed", [self._run_id, chain.stage, chain.version, part])
        encoded, encoded_digest = await self._exact.run(
            Urgency.ROUND, lambda: reduce_part(replica, part, bodies, rule=rule, norm_cap=cap, seed=seed)
        )
        state.reduced[part, encoded_digest] = encoded
        reduced = ReducedPart(part, encoded_digest, contributors)
        self._carry_out(state, machine.aggregated(reduced, now=time.monotonic()))

    async def _fetch(self, state: StepState, part: int, wanted: bytes, holders: tuple[PeerId, ...]) -> None:
        where = self.replica.parts()[part]
        size = self.replica.codec.encoded_bytes(where.stop - where.start)
        meta: dict[str, Value] = {"step": state.step, "part": part, "digest": wanted}
        for holder in holders:
            try:
                reply = await self._transport.call(
                    holder, PART_BYTES, Message(meta), timeout_s=self.settings.deadlines.call_s, max_body_bytes=size
                )
            except (TransientError, RemoteError) as error:
                log.info("step %d part %d from %s: %s", state.step, part, holder[-6:], error)
                continue
            if hashlib.sha256(reply.body).digest() == wanted:
                state.reduced[part, wanted] = reply.body
                assert state.round is not None
                self._carry_out(state, state.round.part_fetched(part, wanted))
                return
        state.fetching.discard((part, wanted))
        log.warning("step %d: nobody has part %d of the result", state.step, part)
        for holder in holders[:1]:
            self.on_behind(holder)

    async def _on_part_bytes(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        step, part = fields.integer("step"), fields.integer("part", high=1 << 20)
        wanted = fields.octets("digest", length=32)
        state = self._steps.get(Step(step))
        if state is not None and (part, wanted) in state.reduced:
            return Message({}, state.reduced[part, wanted])
        held = self.results.get(step)
        if held is not None and part < len(held[1]) and held[0].parts[part].digest == wanted:
            return Message({}, held[1][part])
        raise TransientError(f"part {part} of step {step} is not here")

    async def adopt(self, result: Result, bodies: list[Bytes]) -> None:
        """Take the present step's result from another peer's store. Raises RemoteError if it is not genuine."""
        version = self.chain.version
        state = self._steps.get(Step(version))
        if state is None or state.facts is None or int(result.roster.step) != version:
            return
        if state.round is None:
            state.facts.check_result(result, verify)
        for reduced, body in zip(result.parts, bodies, strict=True):
            if hashlib.sha256(body).digest() != reduced.digest:
                raise RemoteError("digest", f"part {reduced.part} of step {state.step} differs from its digest")
            state.reduced[reduced.part, reduced.digest] = body
        if state.round is None:
            self._spawn(self._finish(state, result))
        else:
            out = state.round.on_result(result, now=time.monotonic())
            out = [instruction for instruction in out if not isinstance(instruction, act.FetchPart)]
            for reduced in result.parts:
                out += state.round.part_fetched(reduced.part, reduced.digest)
            self._carry_out(state, out)
        await self.wait_for_version(version + 1, timeout_s=self.settings.deadlines.round_phase_s)

    async def _finish(self, state: StepState, result: Result) -> None:
        replica, chain = self.replica, self.chain
        if self._steps.get(state.step) is not state or int(state.step) != chain.version:
            return
        bodies = [state.reduced[part.part, part.digest] for part in result.parts]
        closed = await self._compute.run(Urgency.ROUND, lambda: replica.close(state.step))
        next_chain = chain.advance(result, self.settings)

        name = next_chain.name
        new = await self._exact.run(Urgency.ROUND, lambda: replica.next_version(decode_gradient(replica, bodies), name))
        replica.swap(new)
        self.chain = next_chain
        self.results[int(state.step)] = (result, bodies)
        for old in sorted(self.results)[:-RETAINED_RESULTS]:
            del self.results[old]
        self.joining -= set(next_chain.members)
        seconds = time.monotonic() - (state.closed_at or time.monotonic())
        applied = Applied(result, next_chain, new.gradient_norm, seconds, closed.stale, len(closed.work))
        due = next_chain.version % self.settings.checkpoint.snapshot_every == 0 or self.is_over
        frozen = await self._exact.run(Urgency.ROUND, replica.frozen_state) if due else None
        self._open_steps()
        self._announce_version()
        if frozen is not None:
            await self.snapshots.save(frozen, next_chain)
        for listener in self.on_applied:
            await listener(applied)
