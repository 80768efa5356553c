"""Whose word closes a step for the stage after."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from peer.pipeline.closed_steps import ClosedSteps
from peer.stage.events import PeersChanged, StepClosed
from peer.stage.tasks import Tasks
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork

STEP = Step(5)
FIRST = [Identity.from_seed(bytes([number] * 32)) for number in range(3)]
LISTENER = Identity.from_seed(bytes([9] * 32))


class Kept(Tasks):
    """Work that is begun when the test says so."""

    def __init__(self, stage: StageIndex) -> None:
        super().__init__(stage)
        self.works: list[Coroutine[Any, Any, None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.works.append(work)


class Line:
    """Three peers of stage 0, and one of stage 1 that listens."""

    def __init__(self, *, loss: float = 0.0) -> None:
        self.network = MemoryNetwork(random.Random(0), loss=loss)
        self.tasks = Kept(StageIndex(0))
        self.live = {identity.peer_id for identity in FIRST}
        self.listener = self._made(LISTENER, 1, before=self.live, after=set())
        self.listener.serve(Version(0))
        self.first = [self._made(identity, 0, before=set(), after={LISTENER.peer_id}) for identity in FIRST]
        for peer in self.first:
            peer.serve(Version(0))

    def _made(self, me: Identity, stage: int, *, before: set[PeerId], after: set[PeerId]) -> ClosedSteps:
        return ClosedSteps(
            transport=self.network.transport(me),
            tasks=self.tasks,
            stage=StageIndex(stage),
            call_s=0.05,
            era=lambda: 0,
            before=lambda: before,
            after=lambda: after,
        )

    async def say(self, number: int, step: int) -> None:
        """And wait until it is heard."""
        self.first[number].closed(StepClosed(Step(step)))
        await self.heard()

    async def heard(self) -> None:
        """All that was begun to be said or asked is."""
        await asyncio.gather(*(self.tasks.works.pop() for _ in range(len(self.tasks.works))))


def test_most_of_the_stage_before_close_a_step() -> None:
    async def listen() -> None:
        line = Line()
        await line.say(0, 1 << 40)
        assert not line.listener.is_closed_before(STEP), "one of three, whatever it says"
        await line.say(1, 4)
        assert not line.listener.is_closed_before(STEP), "the other is not as far"
        await line.say(1, 5)
        assert line.listener.is_closed_before(STEP)
        assert not line.listener.is_closed_before(Step(6))
        line.live -= {FIRST[1].peer_id}
        assert not line.listener.is_closed_before(STEP), "those that are gone do not count"

    asyncio.run(listen())


def test_who_has_begun_the_next_step_has_closed_this_one() -> None:
    async def listen() -> None:
        line = Line()
        line.listener.begun(FIRST[0].peer_id, Step(6))
        line.listener.begun(LISTENER.peer_id, Step(6))
        assert not line.listener.is_closed_before(STEP)
        line.listener.begun(FIRST[2].peer_id, Step(6))
        assert line.listener.is_closed_before(STEP)

    asyncio.run(listen())


def test_a_word_that_was_lost_is_said_again() -> None:
    async def listen() -> None:
        line = Line(loss=0.2)
        for number in range(3):
            await line.say(number, STEP)
        assert line.listener.is_closed_before(STEP)

    asyncio.run(listen())


def test_who_came_after_a_step_was_closed_asks_and_is_told() -> None:
    async def listen(*, asks: bool) -> None:
        line = Line()
        there = frozenset(line.live)
        line.live.clear()  # it has come a moment ago, and knows nobody yet
        for number in range(2):
            await line.say(number, STEP)
        line.live |= there
        assert not line.listener.is_closed_before(STEP)
        if asks:
            line.listener.changed(PeersChanged(0, there))
        else:
            for peer in line.first:
                peer.changed(PeersChanged(1, frozenset({LISTENER.peer_id})))
        await line.heard()
        assert line.listener.is_closed_before(STEP)
        assert not line.listener.is_closed_before(Step(6))
        line.listener.changed(PeersChanged(0, there))
        assert not line.tasks.works or not asks, "nobody is asked twice"
        await line.heard()

    asyncio.run(listen(asks=True))
    asyncio.run(listen(asks=False))
