"""The microbatches that a source may start: it waits for them here, and says what became of them."""

import asyncio
from collections.abc import Callable, Mapping

from peer.pipeline.grants import StepGrants, Turn, take_next
from peer.round.step_state import StepState
from swarm.core.ids import MicrobatchId, Step


class Turns:
    """What leaders granted a member of stage 0, over all open steps."""

    def __init__(
        self,
        steps: Mapping[Step, StepState],
        leased: Callable[[], list[MicrobatchId]],
        accepts: Callable[[Step], bool],
        can_compute: Callable[[Step], bool],
    ) -> None:
        """`steps`: those that are open. `leased`: the ids this member may start, in order; none while it is none.
        `can_compute`: whether the weights of a step are there."""
        self._steps = steps
        self._leased = leased
        self._accepts = accepts
        self._can_compute = can_compute
        self.wanted = 0
        """How many more microbatches the source could start now."""
        self._tries: dict[MicrobatchId, int] = {}
        self._used: set[MicrobatchId] = set()
        self._available = asyncio.Event()

    def want(self, num_slots: int) -> None:
        """The source could start this many more microbatches now."""
        if num_slots != self.wanted:
            self.wanted = num_slots
            for state in self._steps.values():
                state.dirty.set()

    def look_again(self) -> None:
        """More may have been granted, or leased."""
        self._available.set()

    async def next(self) -> Turn:
        """The next microbatch this member may start; waits for a grant."""
        while True:
            grants = [self._steps[step].grants for step in sorted(self._steps) if self._can_compute(step)]
            turn = take_next(grants, self._leased(), self._used, self._tries, self._accepts)
            if turn is not None:
                # Its slot is spoken for: a report made before the source says so must not ask for one more.
                self.wanted = max(0, self.wanted - 1)
                return turn
            self._available.clear()
            await self._available.wait()

    def passed_on(self, turn: Turn) -> None:
        """The microbatch leaves for the next stage."""
        state = self._open_step(turn)
        if state is not None:
            state.grants.passed_on.add(turn.microbatch_id)

    def done(self, turn: Turn) -> None:
        """The microbatch's gradient is in the step's sum."""
        state = self._open_step(turn)
        if state is not None:
            state.grants.in_flight.discard(turn.microbatch_id)
            state.grants.passed_on.discard(turn.microbatch_id)
            state.grants.done.add(turn.microbatch_id)
            state.dirty.set()
            self._tries.pop(turn.microbatch_id, None)

    def failed(self, turn: Turn, *, step_is_over: bool) -> None:
        """The microbatch did not make it in this try; its id is free again."""
        state = self._open_step(turn)
        if state is not None:  # else its ids are free by now, and may have been taken again
            self._tries[turn.microbatch_id] = self._tries.get(turn.microbatch_id, 0) + 1
            self._used.discard(turn.microbatch_id)
            state.grants.in_flight.discard(turn.microbatch_id)
            state.grants.passed_on.discard(turn.microbatch_id)
            if step_is_over:
                state.grants.over = True
                state.is_over = True
            state.dirty.set()
        self._available.set()

    def _open_step(self, turn: Turn) -> StepState | None:
        """The step that granted the turn, while it is open."""
        state = self._steps.get(turn.step)
        return state if state is not None and state.grants is turn.of else None

    def step_is_over(self, grants: StepGrants) -> None:
        """The step is not open any more: its ids are free."""
        self._used -= grants.in_flight | grants.done

    def begin_again(self) -> None:
        """No step is open, and every id is free."""
        self._used.clear()
