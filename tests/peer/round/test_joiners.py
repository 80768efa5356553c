"""Who joins shares one member's part of a donor's uplink, and less while a round is behind."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.round import joiners as joiners_module
from peer.round.joiners import (
    BEHIND_SHARE,
    FEW_LANES,
    LATE_TIMES,
    LATELY,
    LATER_SHARE,
    LEAST_HELD_BYTES_PER_S,
    LOOK_S,
    OVERDUE_TIMES,
    ROOM_TIMES,
    TAKES_S,
    Joiners,
)
from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_BYTES_PER_S, PIECE_BYTES

MEMBER, ME, NEW, BACK, THIRD, OTHER = map(PeerId, ("member", "me", "new", "back", "third", "other"))
LANES = 4
MOST_A_LOOK = 20
"""Answers that one lane has gone through meanwhile."""


@dataclass
class FakeRoster:
    left_out: tuple[str, ...] = ()


@dataclass
class FakeRound:
    is_closing: bool = True
    roster: FakeRoster | None = None


@dataclass
class FakeSteps:
    """A stage of two in the middle of a round."""

    round: FakeRound = field(default_factory=FakeRound)
    version: int = 7
    turned_at: float = 100.0
    usual_s: float | None = None
    joining: set[PeerId] = field(default_factory=set)
    members: tuple[PeerId, ...] = (MEMBER, ME)

    @property
    def chain(self) -> Any:
        return type("Chain", (), {"members": self.members})

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

    steps: FakeSteps
    wanted_bytes_per_s: float | None = None
    num_bytes: int = PIECE_BYTES
    """Of an answer."""
    bytes_to: dict[PeerId, int] = field(default_factory=dict)
    """Of an answer to these."""
    are_of_states: bool = False
    lacks_bytes: int | None = 0
    """Of the last result, as those who ask say."""
    uplink_bytes_per_s: float | None = None
    usual_lanes: int = LANES
    round_bytes_per_s: float = math.inf
    under_way: list[PeerId] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ends: list[tuple[PeerId, asyncio.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.joiners = Joiners(cast(StageSteps, self.steps), self)

    def keeps_from_others(self) -> None:
        """Nothing measures it here."""

    def ask(self, *peers: PeerId) -> None:
        self.tasks += [asyncio.ensure_future(self._hold(peer)) for peer in peers]

    async def end_one_of(self, peer: PeerId) -> None:
        next(event for of, event in self.ends if of == peer and not event.is_set()).set()
        await settled()

    async def _hold(self, peer: PeerId) -> None:
        async with self.joiners.turn(peer, is_of_state=self.are_of_states, lacks_bytes=self.lacks_bytes) as goes:
            if num_bytes := self.bytes_to.get(peer, self.num_bytes):
                goes.will_go(num_bytes)
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


def test_joiners_share_the_lanes_of_one(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps())
        crowd.ask(*[NEW] * 6)
        await settled()
        assert crowd.under_way == [NEW] * LANES
        crowd.ask(*[BACK] * 3)
        await settled()
        assert crowd.under_way.count(BACK) == 1, "one has whoever comes, however many others have"
        for _ in range(2):
            await crowd.end_one_of(NEW)
        assert (crowd.under_way.count(NEW), crowd.under_way.count(BACK)) == (2, 2), "the next is whose fewest go"
        await crowd.over()
        assert not crowd.joiners._going
        assert not crowd.joiners._waiting

    asyncio.run(main())


async def bytes_in(crowd: Crowd, clock: Clock, seconds: float, peers: Sequence[PeerId] = (NEW, BACK)) -> int:
    """That begin to go meanwhile, where each answer has gone at once and two ask for the next."""
    crowd.ask(*peers, *peers)
    num_answers = 0
    for _ in range(int(seconds / LOOK_S)):
        clock.now += LOOK_S
        crowd.joiners._begin()
        await settled()
        for _ in range(MOST_A_LOOK):
            for peer in list(crowd.under_way):
                num_answers += 1
                crowd.ask(peer)
                await crowd.end_one_of(peer)
    return num_answers * crowd.num_bytes


@pytest.mark.parametrize("num_bytes", [PIECE_BYTES // 8, PIECE_BYTES])
@pytest.mark.parametrize("why", ["it is not", "it is late", "it has lost a contribution", "it has narrow lines alone"])
def test_while_a_round_fills_the_uplink_joiners_have_a_members_part_and_less_while_it_is_behind(
    clock: Clock, why: str, num_bytes: int
) -> None:
    """By lanes a newcomer had three fifths of each uplink of a stage of three, and a round took thrice its time."""
    wanted, seconds = 10.0 * PIECE_BYTES, 60.0

    async def main() -> None:
        steps = FakeSteps(usual_s=60.0)
        crowd = Crowd(steps, wanted, num_bytes)
        if why == "it is late":
            clock.now += 2 * 60.0 * LATE_TIMES + 1  # of a member alone, with one more
        elif why == "it has lost a contribution":
            steps.round.roster = FakeRoster(("who was cut off",))
        if is_narrow := why == "it has narrow lines alone":
            crowd.round_bytes_per_s = 0.1 * wanted
        assert crowd.joiners.is_behind == (why in ("it is late", "it has lost a contribution"))
        share = BEHIND_SHARE / 2 if crowd.joiners.is_behind else 1 / 2
        share = 1 - 0.1 * ROOM_TIMES if is_narrow else share
        theirs = wanted * seconds * share
        went = await bytes_in(crowd, clock, seconds)
        assert 0.8 * theirs <= went <= theirs + LANES * PIECE_BYTES
        assert len(crowd.under_way) <= LANES
        crowd.wanted_bytes_per_s = None
        clock.now += LOOK_S
        crowd.ask(*[NEW] * LANES)
        crowd.joiners.turned(VersionTurned(cast(Any, SimpleNamespace(members=())), is_next=True))
        await settled()
        assert len(crowd.under_way) == LANES, "the round is over"
        await crowd.over()

    asyncio.run(main())


def test_a_member_that_was_cut_off_is_first_and_has_its_part_also_while_the_round_is_without_it(clock: Clock) -> None:
    async def main() -> None:
        wanted, seconds = 10.0 * PIECE_BYTES, 30.0
        crowd = Crowd(FakeSteps(FakeRound(roster=FakeRoster((MEMBER,)))), wanted)
        went = await bytes_in(crowd, clock, seconds, (MEMBER, NEW))
        theirs = wanted / 2 * seconds
        assert 0.8 * theirs <= went <= theirs + LANES * PIECE_BYTES
        num_new = [peer for peer, _ in crowd.ends].count(NEW)
        assert num_new <= len(crowd.ends) * LATER_SHARE * BEHIND_SHARE + LANES, "who is new has what a member leaves"
        assert num_new >= len(crowd.ends) * LATER_SHARE * BEHIND_SHARE / 2, "and something in any case"
        await crowd.over()

    asyncio.run(main())


def test_who_takes_longer_pieces_has_no_more_of_the_bytes(clock: Clock) -> None:
    """By answers, one in four, who took a state in pieces four times as long as a result's parts had most of them."""

    async def main() -> None:
        short = PIECE_BYTES // 4
        crowd = Crowd(FakeSteps(), PIECE_BYTES, short, bytes_to={NEW: PIECE_BYTES})
        await bytes_in(crowd, clock, 120.0, (MEMBER, NEW))
        num_to = Counter(peer for peer, _ in crowd.ends)
        new, member = num_to[NEW] * PIECE_BYTES, num_to[MEMBER] * short
        assert new <= (new + member) * LATER_SHARE + LANES * PIECE_BYTES
        assert new >= (new + member) * LATER_SHARE / 2
        await crowd.over()

    asyncio.run(main())


def test_what_goes_beside_an_answer_to_who_was_cut_off_is_a_share_and_not_half(clock: Clock) -> None:
    """On a slow line it asks for one part at a time, which is under way for as long as its share of the line is due."""

    async def main() -> None:
        wanted = PIECE_BYTES / 10
        crowd = Crowd(FakeSteps(), wanted)
        crowd.ask(MEMBER, NEW, NEW)
        num_looks = 2 * int(PIECE_BYTES / (wanted / 2) / LOOK_S)
        for _ in range(16):
            for _ in range(num_looks):
                clock.now += LOOK_S
                crowd.joiners._begin()
                await settled()
            for peer in list(crowd.under_way):
                crowd.ask(peer)
                await crowd.end_one_of(peer)
        num_to = Counter(peer for peer, _ in crowd.ends)
        theirs = 16 * num_looks * LOOK_S * wanted / 2 / PIECE_BYTES
        assert theirs * LATER_SHARE / 2 <= num_to[NEW] <= theirs * LATER_SHARE + 1
        await crowd.over()

    asyncio.run(main())


def test_who_was_a_member_lately_and_takes_results_is_on_its_way_back(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps())
        assert crowd.joiners.back_in_s(MEMBER) is None
        crowd.ask(MEMBER, MEMBER, NEW)
        await settled()
        clock.now += 2 * TAKES_S
        assert crowd.joiners.back_in_s(MEMBER) == 0.0, "on a slow line an answer is long on its way"
        assert crowd.joiners.back_in_s(BACK) is None
        assert crowd.joiners.back_in_s(NEW) is None, "who joins is waited for by nobody"
        for _ in range(2):
            await crowd.end_one_of(MEMBER)
        clock.now += TAKES_S / 2
        assert crowd.joiners.back_in_s(MEMBER) == 0.0, "it may ask for the next"
        clock.now += TAKES_S
        assert crowd.joiners.back_in_s(MEMBER) is None
        await crowd.over()

    asyncio.run(main())


@pytest.mark.parametrize("uplink", [None, 2 * LEAST_BYTES_PER_S])
def test_who_is_on_its_way_back_has_what_it_lacks_from_all_members(clock: Clock, uplink: float | None) -> None:
    async def main() -> None:
        crowd = Crowd(
            FakeSteps(members=(MEMBER, ME, THIRD, OTHER)), uplink_bytes_per_s=uplink, lacks_bytes=10 * PIECE_BYTES
        )
        crowd.ask(MEMBER)
        await settled()
        rate = 3 * (uplink or LEAST_BYTES_PER_S)
        assert crowd.joiners.back_in_s(MEMBER) == pytest.approx(10 * PIECE_BYTES / rate)
        crowd.lacks_bytes = PIECE_BYTES
        crowd.ask(MEMBER)
        await settled()
        assert crowd.joiners.back_in_s(MEMBER) == pytest.approx(PIECE_BYTES / rate)
        crowd.lacks_bytes = None
        crowd.ask(MEMBER)
        await settled()
        assert crowd.joiners.back_in_s(MEMBER) is None, "it takes another result"
        await crowd.over()

    asyncio.run(main())


def test_who_asks_for_what_nobody_has_keeps_nobody_waiting(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps(), PIECE_BYTES / 10, bytes_to={MEMBER: 0})
        crowd.ask(MEMBER)
        await settled()
        await crowd.end_one_of(MEMBER)
        assert crowd.joiners.back_in_s(MEMBER) is None
        crowd.ask(NEW)
        clock.now += LOOK_S
        crowd.joiners._begin()
        await settled()
        assert crowd.under_way == [NEW]
        await crowd.over()

    asyncio.run(main())


def test_who_takes_a_state_is_not_about_to_be_back(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps(), are_of_states=True)
        crowd.ask(MEMBER)
        await settled()
        assert crowd.under_way == [MEMBER]
        assert crowd.joiners.back_in_s(MEMBER) is None
        await crowd.over()

    asyncio.run(main())


@pytest.mark.parametrize("lanes", [FEW_LANES, 2 * FEW_LANES])
def test_beside_who_has_a_slow_line_others_have_what_is_left(clock: Clock, lanes: int) -> None:
    async def main() -> None:
        wanted = PIECE_BYTES / 2
        crowd = Crowd(FakeSteps(), wanted, usual_lanes=lanes)
        crowd.ask(MEMBER)
        await settled()
        crowd.ask(NEW)
        for _ in range(int(100.0 / LOOK_S)):  # MEMBER's answer is under way for all of it
            clock.now += LOOK_S
            crowd.joiners._begin()
            await settled()
            if NEW in crowd.under_way:
                crowd.ask(NEW)
                await crowd.end_one_of(NEW)
        num_to_new = Counter(peer for peer, _ in crowd.ends)[NEW]
        theirs = 100.0 * wanted / 2 / PIECE_BYTES
        assert 0.8 * theirs <= num_to_new <= theirs + 1
        await crowd.over()

    asyncio.run(main())


@pytest.mark.parametrize("lanes", [FEW_LANES, 2 * FEW_LANES])
def test_a_slow_line_carries_one_answer_at_a_time_while_a_round_wants_it(clock: Clock, lanes: int) -> None:
    """Four connections on 1 Mbit/s lost a fifth of their packets."""

    async def main() -> None:
        crowd = Crowd(FakeSteps(), PIECE_BYTES / 2, usual_lanes=lanes)
        members = SimpleNamespace(members=(MEMBER, ME, BACK, NEW, THIRD))
        crowd.joiners.turned(VersionTurned(cast(Any, members), is_next=True))
        due_s = 2 / (1 / 2)  # a stage of two gives half of its uplink

        async def wait(seconds: float) -> None:
            clock.now += seconds
            crowd.joiners._begin()
            await settled()

        crowd.ask(MEMBER)
        await wait(0.0)
        crowd.ask(BACK)
        await wait(due_s)
        assert crowd.under_way == ([MEMBER] if lanes == FEW_LANES else [MEMBER, BACK])
        if lanes == FEW_LANES:
            await crowd.end_one_of(MEMBER)
            assert crowd.under_way == [BACK]
            crowd.ask(NEW)
            await wait(OVERDUE_TIMES * due_s - 2 * LOOK_S)
            assert crowd.under_way == [BACK]
            await wait(2 * LOOK_S)
            assert crowd.under_way == [BACK, NEW], "nobody waits for ever for a peer with a slower line"
            crowd.wanted_bytes_per_s = None
            crowd.ask(MEMBER, THIRD)
            await wait(0.0)
            assert crowd.under_way == [BACK, NEW, MEMBER, THIRD]
        await crowd.over()

    asyncio.run(main())


def test_while_a_member_takes_what_it_lacks_others_have_their_share_and_no_more(clock: Clock) -> None:
    """A newcomer took a whole result in half a minute, while a member waited for three parts for two and a half."""

    async def main() -> None:
        rate = PIECE_BYTES / 4
        crowd = Crowd(FakeSteps(), uplink_bytes_per_s=rate, usual_lanes=FEW_LANES, round_bytes_per_s=0.0)

        async def went(seconds: float) -> int:
            before = len(crowd.ends)
            for _ in range(int(seconds / LOOK_S)):
                while crowd.under_way:
                    crowd.ask(NEW)
                    await crowd.end_one_of(crowd.under_way[0])
                    if len(crowd.ends) - before > 100:
                        return 100
                clock.now += LOOK_S
                crowd.joiners._begin()
                await settled()
            return len(crowd.ends) - before

        crowd.ask(NEW)
        await settled()
        assert await went(1.0) == 100, "nobody else wants it"
        async with crowd.joiners.member_takes():
            theirs = 60.0 * rate / 2 / PIECE_BYTES  # a stage of two gives half of its uplink
            assert await went(60.0) <= theirs + 2
        await settled()
        assert await went(1.0) == 100
        await crowd.over()

    asyncio.run(main())


def test_who_waits_longest_is_never_far_behind_on_a_slow_line(clock: Clock) -> None:
    """A newcomer's last part waited for two minutes, until a whole piece was owed."""

    async def main() -> None:
        part_bytes, wanted = PIECE_BYTES // 4, PIECE_BYTES / 8
        crowd = Crowd(FakeSteps(), wanted, num_bytes=part_bytes, usual_lanes=FEW_LANES)
        crowd.ask(MEMBER, MEMBER, NEW, NEW)
        went: list[PeerId] = []
        for _ in range(int(40 * part_bytes / (wanted / 2) / LOOK_S)):
            clock.now += LOOK_S
            while crowd.under_way:
                peer = crowd.under_way[0]
                went.append(peer)
                crowd.ask(peer)
                await crowd.end_one_of(peer)
            crowd.joiners._begin()
            await settled()
        assert len(went) >= 30
        assert LATER_SHARE / 2 <= went.count(NEW) / len(went) <= LATER_SHARE * 1.5
        at = [number for number, peer in enumerate(went) if peer == NEW]
        assert max(after - before for before, after in pairwise(at)) <= 6
        await crowd.over()

    asyncio.run(main())


def test_results_go_first_to_who_left_lately_then_to_who_asks_to_join_and_states_last(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps(joining={NEW}))
        crowd.joiners.turned(VersionTurned(cast(Any, SimpleNamespace(members=(MEMBER, ME, BACK))), is_next=True))

        def order() -> list[PeerId]:
            """In which they would go, of all that wait."""
            return [turn.peer for turn in sorted(crowd.joiners._waiting, key=crowd.joiners._kind)]

        crowd.ask(*[OTHER] * LANES)
        await settled()
        assert crowd.under_way == [OTHER] * LANES
        crowd.wanted_bytes_per_s = PIECE_BYTES / 100  # nobody may go for now
        crowd.joiners._is_ahead = lambda kind: True  # type: ignore[method-assign]
        crowd.ask(THIRD, NEW, BACK)
        await settled()
        assert order() == [BACK, NEW, THIRD]
        crowd.are_of_states = True
        crowd.ask(MEMBER)
        await settled()
        assert order() == [BACK, NEW, THIRD, MEMBER]
        for _ in range(LATELY):
            crowd.joiners.turned(VersionTurned(cast(Any, SimpleNamespace(members=(MEMBER, ME))), is_next=True))
        assert order() == [NEW, THIRD, BACK, MEMBER]
        await crowd.over()

    asyncio.run(main())


def test_between_rounds_who_comes_back_has_three_fourths_of_a_slow_line_however_few_it_asks_for(clock: Clock) -> None:
    """The next may wait for it: one that fetched a state had two thirds, for it asked for more at a time."""

    async def main() -> None:
        rate = PIECE_BYTES / 2
        crowd, went = Crowd(FakeSteps(), num_bytes=PIECE_BYTES // 4, uplink_bytes_per_s=rate), list[PeerId]()
        crowd.ask(MEMBER, *[NEW] * 8)
        await settled()
        for _ in range(int(60.0 / LOOK_S)):
            clock.now += LOOK_S
            for peer in list(crowd.under_way):
                went.append(peer)
                crowd.ask(peer)
                await crowd.end_one_of(peer)
            crowd.joiners._begin()
            await settled()
        theirs = 60.0 * rate * LATER_SHARE
        assert went.count(NEW) * PIECE_BYTES / 4 == pytest.approx(theirs, rel=0.25)
        assert went.count(MEMBER) == 60.0 / LOOK_S
        await crowd.over()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [True, False])
def test_between_rounds_who_comes_back_by_little_leaves_the_others_their_share_of_time(
    clock: Clock, hangs: bool
) -> None:
    """One real part each second, or one that drips, had a slow line for itself."""

    async def main() -> None:
        rate, small = PIECE_BYTES / 8.0, PIECE_BYTES // 64
        crowd = Crowd(FakeSteps(), uplink_bytes_per_s=rate, bytes_to={MEMBER: PIECE_BYTES // 4 if hangs else small})
        crowd.num_bytes = small
        crowd.ask(MEMBER, *[NEW] * 4)
        await settled()
        took = 0
        for look in range(int(60.0 / LOOK_S)):
            clock.now += LOOK_S
            if not hangs and look % 3 == 0 and MEMBER in crowd.under_way:
                await crowd.end_one_of(MEMBER)
                crowd.ask(MEMBER)
            for _ in range(MOST_A_LOOK):
                if NEW in crowd.under_way:
                    took += small
                    await crowd.end_one_of(NEW)
                    crowd.ask(NEW)
            crowd.joiners._begin()
            await settled()
        assert took >= LATER_SHARE * rate * 60.0 / 2
        await crowd.over()

    asyncio.run(main())


def test_what_went_long_ago_is_held_against_nobody_who_is_passed(clock: Clock) -> None:
    async def main() -> None:
        rate = PIECE_BYTES / 8.0
        crowd = Crowd(FakeSteps(), uplink_bytes_per_s=rate)
        crowd.ask(*[NEW] * 4)
        await settled()

        async def pass_s(seconds: float) -> int:
            took = 0
            for _ in range(int(seconds / 8.0)):
                clock.now += 8.0
                if NEW in crowd.under_way:
                    took += 1
                    await crowd.end_one_of(NEW)
                    crowd.ask(NEW)
                for _ in range(int(8.0 / LOOK_S)):
                    clock.now += LOOK_S
                    crowd.joiners._begin()
                    await settled()
            return took

        assert await pass_s(1600.0) == 200
        crowd.ask(MEMBER)
        for _ in range(LANES):
            if MEMBER not in crowd.under_way:
                await crowd.end_one_of(NEW)
        assert MEMBER in crowd.under_way, "its answer hangs"
        while NEW in crowd.under_way:
            await crowd.end_one_of(NEW)
        crowd.ask(*[NEW] * 4)
        assert await pass_s(800.0) >= LATER_SHARE * 100 / 2
        await crowd.over()

    asyncio.run(main())


def test_who_asks_for_ever_keeps_nobody_else_from_a_lane_nor_from_every_fourth_answer(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps(), usual_lanes=2 * FEW_LANES)
        crowd.ask(*[MEMBER] * 20)
        await settled()
        assert crowd.under_way == [MEMBER] * 2 * FEW_LANES
        crowd.ask(*[NEW] * 5, THIRD)
        await settled()
        assert {NEW, THIRD} < set(crowd.under_way), "each has one"
        begun = len(crowd.ends)
        for _ in range(40):
            await crowd.end_one_of(crowd.under_way[0])
            crowd.ask(MEMBER)
            await settled()
        assert [peer for peer, _ in crowd.ends[begun:]].count(NEW) == 4
        await crowd.over()

    asyncio.run(main())


def test_what_a_round_does_not_want_is_theirs_and_is_held_against_nobody(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps())
        assert await bytes_in(crowd, clock, 10.0) >= 4 * 10 / LOOK_S * PIECE_BYTES / 2
        crowd.wanted_bytes_per_s = 4.0 * PIECE_BYTES
        clock.now += LOOK_S
        went = await bytes_in(crowd, clock, 10.0)
        assert 15 * PIECE_BYTES <= went <= (20 + 2 * LANES) * PIECE_BYTES
        await crowd.over()

    asyncio.run(main())


def test_whoever_asks_for_what_is_not_there_keeps_nothing_from_others(clock: Clock) -> None:
    async def main() -> None:
        crowd = Crowd(FakeSteps(), wanted_bytes_per_s=2.0 * PIECE_BYTES, num_bytes=0)
        for _ in range(50):
            crowd.ask(BACK)
            await settled()
            await crowd.end_one_of(BACK)
        crowd.ask(NEW)
        await settled()
        assert crowd.under_way == [NEW]
        await crowd.over()

    asyncio.run(main())


def test_a_line_that_stands_still_for_a_moment_makes_nobody_wait_for_hours(clock: Clock) -> None:
    """What an answer weighs is bytes: seconds, reckoned at a rate of next to nothing, would last."""

    async def main() -> None:
        crowd = Crowd(FakeSteps(), wanted_bytes_per_s=10.0)
        crowd.ask(NEW, NEW)
        await settled()
        assert crowd.under_way == [NEW]
        crowd.wanted_bytes_per_s = 2.0 * PIECE_BYTES
        for _ in range(8):
            clock.now += LOOK_S
            crowd.joiners._begin()
            await settled()
        assert crowd.under_way == [NEW, NEW]
        await crowd.over()

    asyncio.run(main())


def test_no_round_is_behind_before_one_was_or_has_begun(clock: Clock) -> None:
    async def main() -> None:
        steps = FakeSteps()
        joiners = Crowd(steps).joiners
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
        crowd = Crowd(FakeSteps())
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
        assert not crowd.joiners._going

    asyncio.run(main())


def test_on_a_slow_line_what_goes_is_sent_no_faster_than_its_part(clock: Clock) -> None:
    """A piece of a state had the line for itself, and then the round, whose connections had to learn the line again."""

    async def main() -> None:
        wanted = float(PIECE_BYTES)
        crowd = Crowd(FakeSteps(), wanted)
        joiners = crowd.joiners

        def most() -> list[float]:
            return [joiners._most_of(turn) for turn in joiners._going]

        crowd.ask(NEW)
        await settled()
        assert most() == [wanted / 2], "a stage of two gives half of its uplink"
        crowd.ask(MEMBER)
        await settled()
        assert crowd.under_way == [NEW, MEMBER], "each kind has its part beside the other"
        assert most() == [LATER_SHARE * wanted / 2, (1 - LATER_SHARE) * wanted / 2]
        crowd.steps.round.roster = FakeRoster((MEMBER,))
        spared = BEHIND_SHARE * LATER_SHARE
        assert most() == [spared * wanted / 2, (1 - spared) * wanted / 2]
        crowd.wanted_bytes_per_s, crowd.uplink_bytes_per_s = None, wanted
        assert most() == [LATER_SHARE * wanted, math.inf]
        await crowd.end_one_of(MEMBER)
        clock.now += TAKES_S
        assert most() == [math.inf]
        crowd.wanted_bytes_per_s = 10.0
        assert most() == [LEAST_HELD_BYTES_PER_S], "slower it would come to nothing"
        await crowd.over()

    asyncio.run(main())


def test_a_round_that_carries_little_is_left_room_to_show_that_it_could_carry_more(clock: Clock) -> None:
    """Who joined filled the line that a round left, so that it could never carry more."""

    async def main() -> None:
        wanted = PIECE_BYTES / 10
        crowd = Crowd(FakeSteps(), wanted)
        crowd.ask(NEW)
        await settled()
        for carries in (0.05, 0.15, 0.45):
            crowd.round_bytes_per_s = carries * wanted
            most = crowd.joiners._most_of(crowd.joiners._going[0])
            assert most == pytest.approx(max(0.5, 1 - ROOM_TIMES * carries) * wanted)
        await crowd.over()

    asyncio.run(main())


def test_what_is_held_does_not_hang_for_that(clock: Clock) -> None:
    """One at a quarter was taken for hanging halfway, and its part given away as well."""

    async def main() -> None:
        wanted = 4.0 * PIECE_BYTES / 10
        crowd = Crowd(FakeSteps(), wanted, bytes_to={MEMBER: 100 * PIECE_BYTES})
        joiners = crowd.joiners
        crowd.ask(MEMBER, NEW)
        await settled()
        state = next(turn for turn in joiners._going if turn.peer == NEW)
        back = next(turn for turn in joiners._going if turn.peer == MEMBER)
        takes_s = PIECE_BYTES / (LATER_SHARE * wanted / 2)
        for _ in range(int(1.5 * takes_s / LOOK_S)):
            clock.now += LOOK_S
            joiners._begin()
            assert joiners._most_of(back) + joiners._most_of(state) == pytest.approx(wanted / 2)
        for _ in range(int(takes_s / LOOK_S)):
            clock.now += LOOK_S
            joiners._begin()
        assert joiners._is_overdue(state)
        assert joiners._most_of(back) == wanted / 2, "by now it does"
        await crowd.over()

    asyncio.run(main())
