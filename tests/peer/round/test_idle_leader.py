"""When a leader that lives is passed over: not while a step takes as long as steps do, and never without a word. And
how long a leader waits for members that were left out lately."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.round import step_progress as progress_module
from peer.round.step_progress import (
    BACK_TIMES,
    LONGEST_WAIT_SHARE,
    UNGRANTED_TIMES,
    USUAL_TIMES,
    ProgressCalls,
)
from peer.round.step_state import Ungranted
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import SendTurned
from tests.peer.round.test_joiners import Clock
from tests.swarm.core.round.round_world import facts_of

ME, LEADER, OTHER = map(PeerId, ("me", "leader", "other"))
STEP_S, CALL_S = 120.0, 10.0


@dataclass
class Around:
    """All that a member's reports stand on, at the beginning of a version at time 0."""

    view: int = 0
    is_closing: bool = False
    waits_since: float | None = None
    refused_since: float | None = None
    ungranted: Ungranted = field(default_factory=Ungranted)
    usual_s: float | None = None
    turned_at: float = 0.0
    said: list[Any] = field(default_factory=list)
    step: int = 3

    @property
    def leader(self) -> PeerId:
        return (LEADER, OTHER)[self.view]

    @property
    def round(self) -> "Around":
        return self

    @property
    def context(self) -> Any:
        deadlines = type("Deadlines", (), {"step_s": STEP_S, "call_s": CALL_S})
        return type("Context", (), {"me": ME, "settings": type("Settings", (), {"deadlines": deadlines})})

    @property
    def chain(self) -> Any:
        return type("Chain", (), {"stage": 0})

    def present(self) -> list[PeerId]:
        return [ME, LEADER, OTHER]

    def unreachable(self, _: Any, leader: PeerId) -> None:
        assert leader == self.leader
        self.view += 1

    def carry_out(self, _: Any, instructions: list[Any]) -> None:
        self.said += instructions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.0)
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def passed_over_at(around: Around, clock: Clock, *, until: float) -> float | None:
    """When a member, who looks every second, passes the leader over."""
    what = cast(Any, around)
    calls = ProgressCalls(what, what, what, what, set, lambda _: False, lambda _: None)
    while clock.now < until:
        clock.now += 1.0
        calls.pass_over_the_idle(what)
        if around.view:
            return clock.now
    return None


def test_a_leader_has_a_steps_time_from_what_was_last_brought_and_others_hear_of_it(clock: Clock) -> None:
    around = Around(waits_since=500.0)
    clock.now = 500.0
    assert passed_over_at(around, clock, until=1e4) == 500.0 + STEP_S + CALL_S + 1
    assert around.said == [SendTurned((OTHER,), 1)]
    assert around.waits_since == clock.now, "the next one has as long"


def test_a_leader_that_refuses_all_reports_or_grants_nothing_is_passed_over_too(clock: Clock) -> None:
    around = Around(refused_since=500.0)
    clock.now = 500.0
    assert passed_over_at(around, clock, until=1e4) == 500.0 + STEP_S + CALL_S + 1
    assert around.refused_since is None, "the next one has refused nothing"
    around = Around()
    around.ungranted.look(LEADER, has_some=False, now=500.0)
    clock.now = 500.0
    assert passed_over_at(around, clock, until=1e4) == 500.0 + (1 + UNGRANTED_TIMES) * (STEP_S + CALL_S) + 1


def test_a_leader_that_grants_a_little_now_and_then_holds_no_step_up(clock: Clock) -> None:
    ungranted = Ungranted()
    while clock.now < 1000.0:
        ungranted.look(LEADER, has_some=True, now=clock.now)
        ungranted.look(LEADER, has_some=False, now=clock.now + 1.0)
        clock.now += STEP_S
    assert ungranted.seconds(now=clock.now) == pytest.approx(clock.now * (STEP_S - 1.0) / STEP_S, abs=0.1)
    assert passed_over_at(Around(ungranted=ungranted), clock, until=clock.now + 1.0) is not None
    ungranted.look(OTHER, has_some=False, now=clock.now)
    assert ungranted.seconds(now=clock.now) == 0.0, "the next leader has as long"


def test_nobody_waits_for_a_round_before_the_version_it_starts_from(clock: Clock) -> None:
    # The first microbatch of the next step was done while the round of this one took its minutes.
    around = Around(waits_since=20.0, turned_at=400.0)
    clock.now = 400.0
    assert passed_over_at(around, clock, until=1e4) == 400.0 + STEP_S + CALL_S + 1


def test_who_is_done_early_lets_a_step_take_as_long_as_steps_do(clock: Clock) -> None:
    around = Around(waits_since=60.0, usual_s=600.0)
    assert passed_over_at(around, clock, until=1e4) == USUAL_TIMES * 600.0 + 1


def test_who_has_nothing_to_bring_and_hears_of_nobody_waits_for_nothing(clock: Clock) -> None:
    assert passed_over_at(Around(), clock, until=1e4) is None
    assert passed_over_at(Around(waits_since=0.0, is_closing=True), clock, until=2e4) is None


@dataclass
class Leader:
    """That has all of a step's microbatches, of which a member was left out lately; each second it looks again."""

    clock: Clock
    back_in_s: float | None
    """Of the late member, as it is at first."""
    usual_s: float | None = 200.0
    around: Any = field(default_factory=Around)

    def __post_init__(self) -> None:
        self.late, facts = facts_of(4).members[0], facts_of(4)
        self.facts, self.heard = replace(facts, late=(self.late,)), set[PeerId]()
        self.there = [*facts.members]
        around: Any = self.around
        steps: Any = SimpleNamespace(
            usual_s=self.usual_s, context=around.context, turned_at=self.clock.now, chain=around.chain
        )
        presence: Any = SimpleNamespace(present=lambda: self.there)
        nothing = self.around
        self.calls = ProgressCalls(steps, presence, nothing, nothing, set, lambda _: False, lambda peer: self.back_in_s)

    def waits_s(self, *, heard_after_s: float = math.inf, gone_after_s: float = math.inf) -> float:
        """Before it closes the step."""
        progress = SimpleNamespace(has_heard=lambda peer: peer in self.heard)
        state: Any = SimpleNamespace(progress=progress, late_until=None, step=3, heard_at={})
        machine: Any = SimpleNamespace(facts=self.facts)
        began = self.clock.now
        while self.calls._awaits_the_late(state, machine, self.clock.now):
            self.clock.now += 1.0
            if self.clock.now >= began + heard_after_s:
                self.heard.add(self.late)
            if self.clock.now >= began + gone_after_s:
                self.there.remove(self.late)
        return self.clock.now - began


def test_who_is_on_its_way_back_has_the_time_that_it_needs_if_that_is_not_long(clock: Clock) -> None:
    just_s = LONGEST_WAIT_SHARE * 200.0 / BACK_TIMES
    assert Leader(clock, 40.0).waits_s() == 40.0 * BACK_TIMES
    assert Leader(clock, just_s).waits_s() == pytest.approx(BACK_TIMES * just_s, abs=1.0)
    assert Leader(clock, 1.01 * just_s).waits_s() == 0.0
    assert Leader(clock, None).waits_s() == 0.0, "it takes no result"
    assert Leader(clock, 1.0, usual_s=None).waits_s() == 0.0, "nobody knows what is long"


@pytest.mark.parametrize("back_in_s", [None, 40.0])
def test_the_round_begins_when_nobody_is_waited_for(clock: Clock, back_in_s: float | None) -> None:
    leader = Leader(clock, back_in_s)
    leader.calls._closed = lambda *given: cast(Any, ["it begins"])  # type: ignore[method-assign]
    progress = SimpleNamespace(has_heard=lambda _: False, closing=lambda *, now: SimpleNamespace(reason="all are in"))
    machine: Any = SimpleNamespace(facts=leader.facts)
    state: Any = SimpleNamespace(progress=progress, late_until=None, step=3, round=machine, leader=ME, closed_at=None)
    leader.calls.close_if_due(state)
    assert leader.around.said == ([] if back_in_s else ["it begins"])
    clock.now += 40.0 * BACK_TIMES
    leader.calls.close_if_due(state)
    assert leader.around.said[-1:] == ["it begins"]


def test_a_wait_ends_when_who_was_waited_for_is_there_or_gone(clock: Clock) -> None:
    assert Leader(clock, 40.0).waits_s(heard_after_s=5.0) == 5.0
    assert Leader(clock, 40.0).waits_s(gone_after_s=7.0) == 7.0


def test_who_is_late_is_waited_for_once_until_it_contributes_in_time(clock: Clock) -> None:
    leader = Leader(clock, 40.0)
    assert leader.waits_s(heard_after_s=5.0) == 5.0
    leader.heard.clear()
    assert leader.waits_s() == 0.0
    with_it = leader.facts
    leader.facts = replace(with_it, late=())
    assert leader.waits_s() == 0.0
    leader.facts = with_it
    leader.calls._steps.turned_at = clock.now
    assert leader.waits_s() > 0.0


def test_nobody_is_waited_for_until_others_pass_the_leader_over(clock: Clock) -> None:
    leader = Leader(clock, 40.0)
    clock.now += USUAL_TIMES * 200.0 - CALL_S - 40.0 * BACK_TIMES
    assert leader.waits_s() == 40.0 * BACK_TIMES
    leader = Leader(clock, 40.0)
    clock.now += USUAL_TIMES * 200.0 - CALL_S - 40.0 * BACK_TIMES + 1.0
    assert leader.waits_s() == 0.0
