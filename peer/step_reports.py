"""This is where members tell a step's leader how far they are, and where the leader grants more or closes the step.

`swarm.core.step_progress` counts; this carries messages and sees who has fallen silent. All of it runs on the event
loop of `peer.rounds`.
"""

import logging
import time
from typing import TYPE_CHECKING

from peer.step_state import StepState
from swarm.core.averaging_round import AveragingRound, Instruction
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, peer_item
from swarm.core.ids import PeerId, Step
from swarm.core.ranking import rank
from swarm.core.step_progress import MemberReport
from swarm.network.loop import happened
from swarm.network.transport import Message

if TYPE_CHECKING:
    from peer.rounds import StageRounds

log = logging.getLogger(__name__)

PROGRESS = "progress"
MAX_NEIGHBOURS_NAMED = 6
"""Voters a stage of few members takes from its neighbours."""
MAX_JOINS_TOLD = 64
"""Peers that want to join, in one report to the leader: the others are in a later one."""
REPORT_EVERY_S = 0.25


class StepReports:
    """The reports of this stage's open steps: those that this peer makes, and those it gets where it leads."""

    def __init__(self, stage: "StageRounds") -> None:
        self._stage = stage

    def serve(self) -> None:
        """Begin to answer."""
        self._stage.transport.serve(PROGRESS, self._on_progress, max_body_bytes=0)

    async def report_while_open(self, state: StepState) -> None:
        """Tell the step's leader, whoever that is, until the step has a roster or is over."""
        stage = self._stage
        while stage.open_step(state.step) is state:
            if stage.is_member and (state.round is None or state.round.roster is None):
                await self._report(state)
            await happened(state.dirty, within_s=REPORT_EVERY_S)
            state.dirty.clear()

    async def _report(self, state: StepState) -> None:
        stage = self._stage
        is_source = stage.chain.stage == 0
        num_done, grants = stage.replica.num_done(state.step), state.grants
        # A gradient is in the sum a moment before its ticket is done: counted once, or one too many is granted.
        num_in_flight = max(0, grants.started - num_done) if is_source else 0
        report = MemberReport(
            num_done=num_done,
            num_in_flight=num_in_flight,
            num_wanted=stage.tickets.wanted if is_source else 0,
            num_passed_on=min(len(grants.passed_on), num_in_flight),
            saw_next=state.saw_next,
        )
        leader = state.leader
        if leader == stage.me:
            granted, exhausted = self._take_report(state, stage.me, report)
        else:
            meta: dict[str, Value] = {
                "stage": stage.chain.stage,
                "step": state.step,
                "view": state.round.view if state.round is not None else state.view,
                "done": report.num_done,
                "in_flight": report.num_in_flight,
                "wanted": report.num_wanted,
                "passed_on": report.num_passed_on,
                "saw_next": report.saw_next,
                "joins": [*sorted(stage.joining)[:MAX_JOINS_TOLD]],
            }
            try:
                reply = await stage.transport.call(
                    leader, PROGRESS, Message(meta), timeout_s=stage.settings.deadlines.call_s, max_body_bytes=0
                )
                fields = Fields("progress answer", reply.meta)
                granted, exhausted = fields.integer("granted"), fields.boolean("exhausted")
                if fields.boolean("over"):
                    stage.on_behind(leader)
                    return
            except (UnreachableError, RemoteError) as error:
                log.info("stage %d step %d: leader %s: %s", stage.chain.stage, state.step, leader[-6:], error)
                if await stage.is_gone(leader):
                    stage.unreachable(state, leader)
                return
            except TransientError as error:  # alive, but not ready for this step yet: report again
                log.debug("stage %d step %d: leader %s: %s", stage.chain.stage, state.step, leader[-6:], error)
                return
        if (granted, exhausted) != (grants.granted, grants.exhausted):
            grants.granted, grants.exhausted = granted, exhausted
            stage.tickets.look_again()

    def _take_report(self, state: StepState, member: PeerId, report: MemberReport) -> tuple[int, bool]:
        now = state.heard_at[member] = time.monotonic()
        granted = state.progress.report(member, report, now=now)
        self.close_if_due(state)
        return granted, state.progress.is_exhausted

    async def _on_progress(self, sender: PeerId, request: Message) -> Message:
        stage = self._stage
        fields = Fields("progress", request.meta)
        stage.check_stage(sender, fields.integer("stage"))
        step, view = Step(fields.integer("step")), fields.integer("view", high=1 << 20)
        report = MemberReport(
            num_done=fields.integer("done", high=1 << 20),
            num_in_flight=fields.integer("in_flight", high=1 << 20),
            num_wanted=fields.integer("wanted", high=1 << 10),
            num_passed_on=fields.integer("passed_on", high=1 << 20),
            saw_next=fields.boolean("saw_next"),
        )
        joins = fields.items("joins", peer_item, max_items=MAX_JOINS_TOLD)
        fields.done()
        if int(step) < stage.chain.version:
            return Message({"granted": 0, "exhausted": True, "over": True})
        state = await stage.step_state(step)
        if sender not in stage.chain.members and int(step) == stage.chain.version:
            raise RemoteError("standing", f"{sender} is no member of stage {stage.chain.stage}", sender)
        if sender not in stage.chain.members and sender not in stage.joining:
            raise TransientError(f"{sender[-6:]} is not known here as a member after step {stage.chain.version}")
        if state.leader != stage.me:
            await self._take_over(state, view)
        # Whom nobody may let in takes no place of those who may.
        told = [peer for peer in joins if stage.may_join(peer)]
        stage.joining.update(told[: max(0, stage.settings.limits.max_peers_per_stage - len(stage.joining))])
        stage.heard_of(sender)
        granted, exhausted = self._take_report(state, sender, report)
        return Message({"granted": granted, "exhausted": exhausted, "over": False})

    async def _take_over(self, state: StepState, view: int) -> None:
        """A member takes this peer for the leader of a later view: true only if the present leader is gone."""
        stage = self._stage
        mine = state.round.view if state.round is not None else state.view
        if view <= mine or state.leaders[view % len(state.leaders)] != stage.me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step}, not this peer")
        leader = state.leader
        if not await stage.is_gone(leader):
            raise TransientError(f"leader {leader[-6:]} of step {state.step} is alive")
        stage.unreachable(state, leader)
        if state.leader != stage.me:
            raise TransientError(f"{state.leader[-6:]} leads step {state.step} now")

    def close_if_due(self, state: StepState) -> None:
        """Begin the round, where this peer leads the step and nothing more can come."""
        stage = self._stage
        if state.round is None or state.leader != stage.me or state.closed_at is not None:
            return
        now = time.monotonic()
        synchronous = stage.settings.delay_at(state.step + 1) == 0
        closing = state.progress.closing(now=now, synchronous=synchronous)
        if closing is None:
            return
        log.debug("stage %d step %d closes: %s", stage.chain.stage, state.step, closing.reason)
        view = state.round.view
        stage.driver.carry_out(state, self._closed(state.round, closing.reason, view, now))

    def look_for_the_silent(self, state: StepState) -> None:
        """Members report several times a second: who does not for long may be stopped, and what it was granted waits.

        Its open calls say so much later: nothing breaks.
        """
        stage = self._stage
        if state.leader != stage.me or state.closed_at is not None:
            return
        now = time.monotonic()
        for member in stage.present():
            if member != stage.me and now > state.heard_at.setdefault(member, now) + stage.settings.deadlines.call_s:
                state.heard_at[member] = now
                stage.peer_lost(member)

    def _closed(self, machine: AveragingRound, reason: str, view: int, now: float) -> list[Instruction]:
        stage = self._stage
        free = max(0, stage.settings.limits.max_peers_per_stage - len(stage.chain.members))
        joins = [peer for peer in sorted(stage.joining) if peer not in stage.chain.members and stage.may_join(peer)][
            :free
        ]
        # Drawn, so that no neighbour can make sure of being asked.
        drawn = rank(stage.neighbours(), "neighbour", stage.chain.name)[:MAX_NEIGHBOURS_NAMED]
        return machine.close(reason=reason, joins=joins, neighbours=drawn, view=view, now=now)
