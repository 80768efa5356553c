"""How far members are in a step, told to its leader, which grants more or closes the step.

`swarm.core.round.step_progress` counts; this carries messages and sees who has fallen silent. All of it runs on the
event loop.
"""

import logging
import time
from collections.abc import Callable

from peer.pipeline.turns import Turns
from peer.round.driver import RoundDriver
from peer.round.presence import Presence
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState, Ungranted
from peer.stage.events import Overtaken, PeerLost
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, peer_item
from swarm.core.ids import PeerId, Step
from swarm.core.ranking import rank
from swarm.core.round.averaging_round import AveragingRound, Instruction, SendTurned
from swarm.core.round.step_progress import MemberReport, StepProgress
from swarm.core.round.voting import MOST_VIEWS
from swarm.network.loop import happened
from swarm.network.transport import Message

log = logging.getLogger(__name__)

PROGRESS = "progress"
MAX_NEIGHBOURS_NAMED = 6
"""Voters a stage of few members takes from its neighbours."""
MAX_JOINS_TOLD = 64
"""Peers that want to join, in one report to the leader: the others are in a later one."""
REPORT_EVERY_S, LONGEST_REPORT_S, REPORTS_A_STEP = 0.25, 2.0, 400
"""But at once where there is more to say: the rest keeps a leader sure that its members live, and them of its word."""
BACK_TIMES, LONGEST_WAIT_SHARE = 1.5, 0.75
"""So many times as long as who is on its way back would take, if all its donors sent nothing else, for they send what
has begun; and at most that share of what steps lately took, of which others give a leader `USUAL_TIMES`."""
UNGRANTED_TIMES = 3.0
"""So many times as long as others who wait for its leader, and more, waits who wants work and was given none."""
USUAL_TIMES = 2.0
"""A step that takes so many times as long as steps lately did has a leader that waits for nothing."""


class ProgressCalls:
    """The reports of this stage's open steps: those that this peer makes, and those it gets where it leads."""

    def __init__(
        self,
        steps: StageSteps,
        presence: Presence,
        driver: RoundDriver,
        turns: Turns,
        neighbours: Callable[[], set[PeerId]],
        is_closed_before: Callable[[Step], bool],
        back_in_s: Callable[[PeerId], float | None],
    ) -> None:
        """`neighbours`: live peers of the stages beside this one. `is_closed_before`: whether the stage before takes no
        more of a step. `back_in_s`: when somebody is at the stage's step again, if others send nothing else."""
        self._steps = steps
        self._context = steps.context
        self._presence = presence
        self._driver = driver
        self._turns = turns
        self._neighbours = neighbours
        self._is_closed_before = is_closed_before
        self._back_in_s = back_in_s
        self._waited_for: set[PeerId] = set()
        """Late members that were, since they were on their way back: once, until they have contributed in time."""

    def serve(self) -> None:
        """Begin to answer."""
        self._context.transport.serve(PROGRESS, self._on_progress, max_body_bytes=0)

    async def report_while_open(self, state: StepState) -> None:
        """Tell the step's leader, whoever that is, until the step has a roster or is over."""
        steps = self._steps
        while steps.is_open(state):
            if steps.is_member and (state.round is None or state.round.roster is None):
                await self._report(state)
            pause_s = min(LONGEST_REPORT_S, max(REPORT_EVERY_S, (steps.usual_s or 0.0) / REPORTS_A_STEP))
            await happened(state.dirty, within_s=pause_s)
            state.dirty.clear()

    async def _report(self, state: StepState) -> None:
        steps, context = self._steps, self._context
        is_source = steps.chain.stage == 0
        num_done, grants = steps.replica.num_done(state.step), state.grants
        # A gradient is in the sum a moment before its turn is done: counted once, or one too many is granted.
        num_in_flight = max(0, grants.started - num_done) if is_source else 0
        report = MemberReport(
            num_done=num_done,
            num_in_flight=num_in_flight,
            num_wanted=self._turns.wanted if is_source else 0,
            num_passed_on=min(len(grants.passed_on), num_in_flight),
            is_over=state.is_over,
        )
        is_over = state.is_over or self._is_closed_before(state.step)
        if num_done > state.had_done or (is_over and state.waits_since is None):
            state.waits_since, state.had_done = time.monotonic(), num_done
        is_waiting = bool(report.num_wanted or num_done or is_over)
        leader = state.leader
        if leader == context.me:
            granted, exhausted = self._take_report(state, context.me, report)
        else:
            meta: dict[str, Value] = {
                "stage": steps.chain.stage,
                "step": state.step,
                "view": state.round.view if state.round is not None else state.view,
                "done": report.num_done,
                "in_flight": report.num_in_flight,
                "wanted": report.num_wanted,
                "passed_on": report.num_passed_on,
                "is_over": report.is_over,
                "joins": [*sorted(steps.joining)[:MAX_JOINS_TOLD]],
            }
            asked_at = time.monotonic()
            try:
                reply = await context.transport.call(
                    leader, PROGRESS, Message(meta), timeout_s=context.settings.deadlines.call_s, max_body_bytes=0
                )
                self._presence.answered(leader, within_s=time.monotonic() - asked_at)
                fields = Fields("progress answer", reply.meta)
                granted, exhausted = fields.integer("granted"), fields.boolean("exhausted")
                if fields.boolean("over"):
                    context.events.publish(Overtaken(leader))
                    return
            except (UnreachableError, RemoteError) as error:
                log.info("stage %d step %d: leader %s: %s", steps.chain.stage, state.step, leader[-6:], error)
                if await self._presence.is_gone(leader):
                    self._presence.unreachable(state, leader)
                elif is_waiting:
                    state.refused_since = state.refused_since or time.monotonic()
                return
            except TransientError as error:  # alive, but not ready for this step yet: report again
                log.debug("stage %d step %d: leader %s: %s", steps.chain.stage, state.step, leader[-6:], error)
                if is_waiting:
                    state.refused_since = state.refused_since or time.monotonic()
                return
            state.refused_since = None
            has_some = granted > num_done or not report.num_wanted or (exhausted and num_done > 0)
            state.ungranted.look(leader, has_some=has_some, now=time.monotonic())
        if (granted, exhausted) != (grants.granted, grants.exhausted):
            grants.granted, grants.exhausted = granted, exhausted
            self._turns.look_again()

    def _take_report(self, state: StepState, member: PeerId, report: MemberReport) -> tuple[int, bool]:
        now = state.heard_at[member] = time.monotonic()
        granted = state.progress.report(member, report, now=now)
        self.close_if_due(state)
        return granted, state.progress.is_exhausted

    async def _on_progress(self, sender: PeerId, request: Message) -> Message:
        steps, context = self._steps, self._context
        fields = Fields("progress", request.meta)
        steps.check_stage(sender, fields.integer("stage"))
        step, view = Step(fields.integer("step")), fields.integer("view", high=MOST_VIEWS)
        report = MemberReport(
            num_done=fields.integer("done", high=1 << 20),
            num_in_flight=fields.integer("in_flight", high=1 << 20),
            num_wanted=fields.integer("wanted", high=1 << 10),
            num_passed_on=fields.integer("passed_on", high=1 << 20),
            is_over=fields.boolean("is_over"),
        )
        joins = fields.items("joins", peer_item, max_items=MAX_JOINS_TOLD)
        fields.done()
        if int(step) < steps.chain.version:
            return Message({"granted": 0, "exhausted": True, "over": True})
        state = await steps.step_state(step)
        if sender not in steps.chain.members and int(step) == steps.chain.version:
            raise RemoteError("standing", f"{sender} is no member of stage {steps.chain.stage}", sender)
        if sender not in steps.chain.members and sender not in steps.joining:
            raise TransientError(f"{sender[-6:]} is not known here as a member after step {steps.chain.version}")
        if state.leader != context.me:
            await self._take_over(state, view)
        # Whom nobody may let in takes no place of those who may.
        told = [peer for peer in joins if steps.may_join(peer)]
        for peer in told[: max(0, context.settings.limits.max_peers_per_stage - len(steps.joining))]:
            steps.asks_to_join(peer)
        self._presence.heard_of(sender)
        granted, exhausted = self._take_report(state, sender, report)
        return Message({"granted": granted, "exhausted": exhausted, "over": False})

    async def _take_over(self, state: StepState, view: int) -> None:
        """A member takes this peer for the leader of a later view: true only if the present leader is gone."""
        context = self._context
        mine = state.round.view if state.round is not None else state.view
        if view <= mine or state.leaders[view % len(state.leaders)] != context.me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step}, not this peer")
        leader = state.leader
        if not self._is_idle(state) and not await self._presence.is_gone(leader):
            raise TransientError(f"leader {leader[-6:]} of step {state.step} is alive")
        self._presence.unreachable(state, leader)
        if state.leader != context.me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step} now")

    def close_if_due(self, state: StepState) -> None:
        """Begin the round, where this peer leads the step and nothing more can come."""
        steps, context = self._steps, self._context
        if state.round is None or state.leader != context.me or state.closed_at is not None:
            return
        now = time.monotonic()
        progress = state.progress
        if isinstance(progress, StepProgress) and not progress.is_source and self._is_closed_before(state.step):
            progress.closed_before(now=now)
        closing = progress.closing(now=now)
        if closing is None or self._awaits_the_late(state, state.round, now):
            return
        log.debug("stage %d step %d closes: %s", steps.chain.stage, state.step, closing.reason)
        self._driver.carry_out(state, self._closed(state, state.round, closing.reason, now))

    def look_for_the_silent(self, state: StepState) -> None:
        """Members report several times a second: who does not for long may be stopped, and what it was granted waits.

        Its open calls say so much later: nothing breaks.
        """
        context = self._context
        if state.leader != context.me or state.closed_at is not None:
            return
        now = time.monotonic()
        for member in self._presence.present():
            if (
                member != context.me
                and now > state.heard_at.setdefault(member, now) + context.settings.deadlines.call_s
            ):
                state.heard_at[member] = now
                self._presence.lost(PeerLost(member))

    def pass_over_the_idle(self, state: StepState) -> None:
        """A leader that lives and begins no round, though its step's time is over, is as good as gone.

        The others hear of it: who has nothing to bring, because of what the leader grants, waits for nothing itself.
        """
        if not self._is_idle(state) or state.round is None:
            return
        leader, told = state.leader, {*self._presence.present()} - {self._context.me, state.leader}
        log.warning("stage %d step %d: %s begins no round", self._steps.chain.stage, state.step, leader[-6:])
        self._presence.unreachable(state, leader)
        state.waits_since, state.refused_since, state.ungranted = time.monotonic(), None, Ungranted()
        self._driver.carry_out(state, [SendTurned(tuple(sorted(told)), state.round.view)])

    @property
    def _step_s(self) -> float:
        """What a leader has for a step after the last word of who waits for it, and for a call to say so."""
        deadlines = self._context.settings.deadlines
        return deadlines.step_s + deadlines.call_s

    def _is_idle(self, state: StepState) -> bool:
        """Whether the step's leader should have closed it by all that this peer knows: `step_s` after its last
        microbatch, or since the leader takes no reports, and what a call may take to say so; but a step in which others
        are still at work may take as long as steps lately did, and as long again."""
        steps = self._steps
        waits = [since for since in (state.waits_since, state.refused_since) if since is not None]
        if (ungranted_s := state.ungranted.seconds(now=time.monotonic())) > 0:  # others may be at work
            waits.append(time.monotonic() - ungranted_s + UNGRANTED_TIMES * self._step_s)
        if state.round is None or state.round.is_closing or not waits:
            return False
        quiet_until = max(min(waits), steps.turned_at) + self._step_s
        usual_until = steps.turned_at + USUAL_TIMES * (steps.usual_s or 0.0)
        return time.monotonic() > max(quiet_until, usual_until) and state.leader != self._context.me

    def _closed(self, state: StepState, machine: AveragingRound, reason: str, now: float) -> list[Instruction]:
        steps, context = self._steps, self._context
        free = max(0, context.settings.limits.max_peers_per_stage - len(steps.chain.members))
        joins = [peer for peer in sorted(steps.joining) if peer not in steps.chain.members and steps.may_join(peer)][
            :free
        ]
        # Drawn, so that no neighbour can make sure of being asked.
        drawn = rank(self._neighbours(), "neighbour", steps.chain.basis.said.value)[:MAX_NEIGHBOURS_NAMED]
        unheard = [peer for peer in steps.chain.members if not state.progress.has_heard(peer)]
        return machine.close(reason=reason, joins=joins, neighbours=drawn, unheard=unheard, view=machine.view, now=now)

    def _awaits_the_late(self, state: StepState, machine: AveragingRound, now: float) -> bool:
        """Whether somebody who was left out of the last round takes its result, and is in time if others send nothing
        else meanwhile: once the round has begun it has what it lacks when the next is half made, over and over."""
        if state.late_until is None:
            silent = {peer for peer in machine.facts.late if not state.progress.has_heard(peer)}
            state.late_until = self._late_until(silent, {*machine.facts.late}, now)
            for peer, until in state.late_until.items():
                what = f"stage {self._steps.chain.stage} step {state.step}"
                log.info("%s: %s is waited for, %.0f s at most", what, peer[-6:], until - now)
        return any(
            now < until and peer in self._presence.present() and not state.progress.has_heard(peer)
            for peer, until in state.late_until.items()
        )

    def _late_until(self, silent: set[PeerId], late: set[PeerId], now: float) -> dict[PeerId, float]:
        """Until when each is waited for: once, until it contributes in time, and for no longer than others wait for
        this leader."""
        steps, usual_s = self._steps, self._steps.usual_s or 0.0
        least_idle_until = steps.turned_at + USUAL_TIMES * usual_s - self._context.settings.deadlines.call_s
        most_until = min(now + LONGEST_WAIT_SHARE * usual_s, least_idle_until)
        self._waited_for &= late
        back = {peer: self._back_in_s(peer) for peer in silent - self._waited_for}
        until = {peer: now + BACK_TIMES * back_in_s for peer, back_in_s in back.items() if back_in_s is not None}
        until = {peer: at for peer, at in until.items() if at <= most_until}
        self._waited_for |= until.keys()
        return until
