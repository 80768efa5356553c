"""How a peer takes a step that is certified: the state that it makes, and what is written down of it."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from peer.pipeline.compute import WorkThread
from peer.pipeline.turns import Turns
from peer.round.presence import Presence
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.stage.events import Applied, VersionTurned
from peer.state.replica import NewVersion
from swarm.checkpoint.state import StageState
from swarm.core.errors import LocalError, MemoryFullError
from swarm.core.ids import Version
from swarm.core.pipeline.deadlines import AdaptiveDeadline
from swarm.core.round.contribution import Result
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import work_s
from verification.round.papers import Bytes

Made = TypeVar("Made")

log = logging.getLogger(__name__)

SHORTEST_PHASE_S, PHASE_FACTOR, PHASE_WINDOW = 1.0, 2.0, 16
"""A phase of a round is waited for twice as long as whole rounds lately took: a second at least, and so long that the
four after which members turn to the next leader are no less than a small call may take. Lines that were fast in the
last round may be full in this one."""


class StepTaking:
    """Brings a stage's peer from one version to the next, or back to an earlier one; never two at once."""

    def __init__(self, steps: StageSteps, presence: Presence, turns: Turns) -> None:
        self._steps = steps
        self._context = steps.context
        self._presence = presence
        self._turns = turns
        self.phase = round_phase(self._context.settings, steps.replica.layout.num_values)
        """How long a phase of a round is waited for."""
        self.last_round_s = 0.0
        """From the closing of the last step that this peer contributed to, to its version."""
        self._stands_until = 0.0
        """No step is taken before."""
        self._turning = asyncio.Lock()
        """Held while a version takes the place of another."""
        self._saving: asyncio.Future[None] | None = None
        """The last snapshot's, which is written from the state itself: until it is done, the moments stay."""

    async def finish(self, state: StepState, result: Result) -> None:
        """Take the step that this certified result ends; its bytes are here."""
        steps, context = self._steps, self._context
        while (left_s := self._stands_until - time.monotonic()) > 0 and steps.is_open(state):
            await steps.turned(within_s=left_s)
        async with self._turning:
            if not steps.is_open(state) or int(state.step) != steps.version:
                return
            applied, saving = await self._apply(state, result)
        await asyncio.to_thread(context.results.write, int(state.step))
        await asyncio.to_thread(self._steps.replica.past.write)
        if saving is not None:
            await asyncio.shield(saving)
        context.events.publish(applied)

    async def _apply(self, state: StepState, result: Result) -> tuple[Applied, asyncio.Future[None] | None]:
        """Take the step; what was done, and the writing of the new state where a snapshot is due."""
        steps, context, chain = self._steps, self._context, self._steps.chain
        bodies = state.parts.of_result(result)
        closed = state.accumulation  # else the compute thread is waited for, which may be at a microbatch
        if closed is None:
            closed = await self._owed(state, context.compute, lambda: steps.replica.close(state.step))
        next_chain = chain.advance(result, context.settings)
        new = await self._made(state, result, bodies, next_chain.name)
        steps.turn(new, next_chain)
        context.results.keep(result, bodies)
        given_up = state.round.given_up if state.round is not None else frozenset()
        self._presence.step_taken(result, given_up=given_up)
        seconds = time.monotonic() - (state.closed_at or time.monotonic())
        if state.closed_at is not None and state.round is not None:
            self.last_round_s = seconds
            self._say_who_is_left_out(result)
            # Also of whom was given up: else a stage whose lines became slow would give up the same ones for ever.
            if result.roster.view > state.round.facts.first_view or result.roster.leaves:
                self.phase.missed()
            else:
                self.phase.observe(seconds)
        worked_s = context.compute.busy_s - state.busy_s_at_close
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
        due = next_chain.version % context.settings.checkpoint.snapshot_every == 0 or steps.is_over
        saving = self._begin_to_save() if due else None
        context.events.publish(VersionTurned(next_chain, is_next=True))
        return applied, saving

    def _begin_to_save(self) -> asyncio.Future[None]:
        """Of the present state, while no version takes its place."""
        steps, before = self._steps, self._saving
        assert before is None or before.done(), "a snapshot was under way when the step was taken"
        self._saving = asyncio.ensure_future(self._context.snapshots.save(steps.replica.state, steps.chain))
        return self._saving

    async def save(self) -> None:
        """Put the present state on disk; no step is taken meanwhile."""
        async with self._turning:
            await self._saved()
            await asyncio.shield(self._begin_to_save())

    async def _saved(self) -> None:
        """What is being written of the state is on disk, or cannot be written: whoever began it hears why."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    def _say_who_is_left_out(self, result: Result) -> None:
        step, mine = result.roster.step, self._context.me
        for made in result.unheard:
            who = "this peer" if made.peer_id == mine else made.peer_id[-6:]
            log.warning(
                "step %d: %s is left out, %d tokens: its parts did not come in time", step, who, made.num_tokens
            )

    async def _made(self, state: StepState, result: Result, bodies: list[Bytes], name: bytes) -> NewVersion:
        """The version that this certified result makes; what reducers signed for it is kept."""
        await self._saved()
        replica, context = self._steps.replica, self._context
        weights, cap = self._steps.chain.weights_of(result.roster, self._steps.context.settings), replica.norm_cap()

        def make() -> NewVersion:
            context.reductions.keep(state, result, weights, norm_cap=cap, me=context.me)
            return replica.next_version(replica.certified_gradient(result.parts, bodies), name)

        return await self._owed(state, context.exact, make)

    async def _owed(self, state: StepState, thread: WorkThread, job: Callable[[], Made]) -> Made:
        """Without it this peer has no next version: without memory for a step's time it ends."""
        try:
            return await thread.owed(
                job, within_s=self._context.settings.deadlines.step_s, still=lambda: self._steps.is_open(state)
            )
        except MemoryFullError as error:
            raise LocalError(f"no memory for step {state.step}: {error}") from error

    async def begin_again(self, state: StageState, chain: StageChain) -> None:
        """Leave what is in flight, and go on from this state, at `chain.version`, whatever the version was here."""
        async with self._turning:
            await self._saved()
            await self._steps.turn_back(state, chain)
            self._turns.begin_again()
            self._context.results.begin_again(chain)
            self._stands_until = 0.0
            self._context.events.publish(VersionTurned(chain, is_next=False))
            self._context.snapshots.begin_anew()

    async def stand_still(self, *, for_s: float) -> Version:
        """Take no step for so long, unless the stage begins again before; the version at which it stands."""
        self._stands_until = time.monotonic() + for_s
        async with self._turning:  # a step that is being taken is taken
            return self._steps.version


def round_phase(settings: RunSettings, num_values: int) -> AdaptiveDeadline:
    limit_s = settings.deadlines.call_s + work_s(num_values)
    floor_s = min(limit_s, max(SHORTEST_PHASE_S, settings.deadlines.call_s / 4))
    return AdaptiveDeadline(limit_s=limit_s, floor_s=floor_s, factor=PHASE_FACTOR, window=PHASE_WINDOW)
