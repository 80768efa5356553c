"""Who joins shares one member's lanes of a donor's uplink; while a round is behind, each has one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from peer.round import joiners as joiners_module
from peer.round.joiners import BEHIND_SHARE, LATE_TIMES, LONGEST_REST_S, Joiners
from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.ids import PeerId

MEMBER, NEW, BACK, THIRD = map(PeerId, ("member", "new", "back", "third"))
LANES = 4


@dataclass
class FakeRoster:
    left_out: tuple[str, ...] = ()


@dataclass
class FakeRound:
    is_closing: bool = True
    roster: FakeRoster | None = None


@dataclass
class FakeSteps:
    """A stage of one member in the middle of a round."""

    round: FakeRound = field(default_factory=FakeRound)
    version: int = 7
    turned_at: float = 100.0
    usual_s: float | None = None
    last_roster: FakeRoster = field(default_factory=FakeRoster)

    @property
    def context(self) -> Any:
        last = type("Result", (), {"roster": self.last_roster})
        return type("Context", (), {"results": {self.version - 1: (last, [])}})

    @property
    def chain(self) -> Any:
        return type("Chain", (), {"members": (MEMBER,)})

    def open_step(self, step: int) -> Any:
        assert step == self.version
        return self


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(joiners_module, "time", clock)
    return clock


@dataclass
class Crowd:
    """Answers under way, and those that wait."""

    joiners: Joiners
    under_way: list[PeerId] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ends: list[tuple[PeerId, asyncio.Event]] = field(default_factory=list)

    def ask(self, *peers: PeerId) -> None:
        self.tasks += [asyncio.ensure_future(self._hold(peer)) for peer in peers]

    async def end_one_of(self, peer: PeerId) -> None:
        next(event for of, event in self.ends if of == peer and not event.is_set()).set()
        await settled()

    async def _hold(self, peer: PeerId) -> None:
        async with self.joiners.turn(peer):
            event = asyncio.Event()
            self.under_way.append(peer)
            self.ends.append((peer, event))
            try:
                await event.wait()
            finally:
                self.under_way.remove(peer)

    async def over(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def crowd_of(steps: FakeSteps) -> Crowd:
    return Crowd(Joiners(cast(StageSteps, steps), lambda: LANES))


def test_joiners_share_the_lanes_of_one_and_members_wait_for_nobody(clock: Clock) -> None:
    async def main() -> None:
        crowd = crowd_of(FakeSteps())
        crowd.ask(*[NEW] * 6)
        await settled()
        assert crowd.under_way == [NEW] * LANES
        crowd.ask(*[BACK] * 3, *[MEMBER] * 20)
        await settled()
        assert crowd.under_way.count(MEMBER) == 20
        assert crowd.under_way.count(BACK) == 1, "one has whoever comes, however many others have"
        for _ in range(2):
            await crowd.end_one_of(NEW)
        assert (crowd.under_way.count(NEW), crowd.under_way.count(BACK)) == (2, 2), "the next is whose fewest go"
        await crowd.over()
        assert not crowd.joiners._busy
        assert not crowd.joiners._waiting

    asyncio.run(main())


@pytest.mark.parametrize("why", ["it is late", "it has lost a contribution", "the one before it has"])
def test_while_a_round_is_behind_each_has_one_lane(clock: Clock, why: str) -> None:
    async def main() -> None:
        steps = FakeSteps()
        crowd = crowd_of(steps)
        steps.usual_s = 60.0
        clock.now += 2 * 60.0  # of a member alone, with one more
        assert not crowd.joiners.is_behind
        if why == "it is late":
            clock.now += 2 * 60.0 * (LATE_TIMES - 1) + 1
        elif why == "it has lost a contribution":
            steps.round.roster = FakeRoster(("who was cut off",))
        else:
            steps.last_roster = FakeRoster(("who was cut off",))
        assert crowd.joiners.is_behind
        crowd.ask(*[NEW] * 3, *[BACK] * 3)
        await settled()
        assert sorted(crowd.under_way) == [BACK, NEW]
        clock.now += 0.5
        await crowd.end_one_of(NEW)
        assert crowd.under_way == [BACK], "it rests"
        rest_s = min(LONGEST_REST_S, 0.5 * (2 / BEHIND_SHARE - 1))
        for later_s, under_way in ((rest_s - 0.1, [BACK]), (0.2, [BACK, NEW])):
            clock.now += later_s
            crowd.joiners._begin()
            await settled()
            assert sorted(crowd.under_way) == under_way
        steps.round, steps.turned_at, steps.last_roster = FakeRound(), clock.now, FakeRoster()
        crowd.joiners.turned(VersionTurned(cast(Any, None), is_next=True))
        await settled()
        assert len(crowd.under_way) == LANES, "the round is over"
        await crowd.over()

    asyncio.run(main())


def test_no_round_is_behind_before_one_was_or_has_begun(clock: Clock) -> None:
    async def main() -> None:
        steps = FakeSteps()
        joiners = crowd_of(steps).joiners
        clock.now += 1e6
        assert not joiners.is_behind, "nobody knows how long rounds take"
        steps.usual_s = 1.0
        steps.round.is_closing = False
        clock.now += 1e6
        assert not joiners.is_behind, "the stage is at work"
        steps.round.is_closing = True
        assert joiners.is_behind

    asyncio.run(main())


def test_who_goes_while_it_waits_keeps_nobody_from_its_place(clock: Clock) -> None:
    async def main() -> None:
        crowd = crowd_of(FakeSteps())
        crowd.ask(*[NEW] * LANES, BACK, THIRD)
        await settled()
        crowd.ask(BACK, BACK)
        await settled()
        waiting, last = crowd.tasks[-2:]
        waiting.cancel()
        for _ in range(3):
            await crowd.end_one_of(NEW)
        assert crowd.under_way.count(BACK) == 2
        assert waiting.cancelled()
        assert not last.done()
        await crowd.over()
        assert not crowd.joiners._busy

    asyncio.run(main())
