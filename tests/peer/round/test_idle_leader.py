"""When a leader that lives is passed over: not while a step takes as long as steps do, and never without a word. And
how long a leader waits for members that were left out lately."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from peer.round import step_progress as progress_module
from peer.round.step_progress import ABSENT_SHARE, BACK_TIMES, USUAL_TIMES, ProgressCalls
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import SendTurned
from swarm.core.round.lead import LONGEST_PHASES
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


def waits_for(peer: PeerId, back_in_s: list[float | None], heard_in: int | None = None) -> list[float | None]:
    """So many phases it is waited for, in one round after another, if it would be back so soon; None: as others."""
    facts = facts_of(4)
    facts = replace(facts, late=(facts.members[0],))
    nothing, asked = cast(Any, Around()), list[float | None]()
    calls = ProgressCalls(nothing, nothing, nothing, nothing, set, lambda _: False, lambda _: asked[-1])
    waits = []
    for number, soon in enumerate(back_in_s):
        asked.append(soon)
        progress = type("Progress", (), {"has_heard": lambda _, said=number == heard_in: said})
        state: Any = type("State", (), {"progress": progress})
        waits.append(calls._late_s(state, facts).get(facts.members[0]))
    return [None if waited_s is None else waited_s / facts.phase_s for waited_s in waits]


def test_who_is_on_its_way_back_has_the_time_that_it_needs() -> None:
    phase_s, late = facts_of(4).phase_s, facts_of(4).members[0]
    just_s = LONGEST_PHASES * phase_s / BACK_TIMES
    assert waits_for(late, [just_s]) == [LONGEST_PHASES]
    assert waits_for(late, [0.0]) == [1.0], "a phase, as who is there and late"
    assert waits_for(late, [1.01 * just_s, None]) == [ABSENT_SHARE] * 2


def test_who_was_waited_for_in_vain_is_not_again_before_it_is_heard_of() -> None:
    late = facts_of(4).members[0]
    assert waits_for(late, [0.0, 0.0, 0.0]) == [1.0, ABSENT_SHARE, ABSENT_SHARE]
    assert waits_for(late, [0.0, 0.0, 0.0], heard_in=1) == [1.0, None, 1.0]
