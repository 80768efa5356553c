"""Which microbatch a source starts next: of the earliest step of which more may be granted."""

import pytest

from peer.pipeline.grants import StepGrants, take_next
from swarm.core.ids import MicrobatchId, Step

LEASED = [MicrobatchId(number) for number in range(10, 14)]


def steps(*granted: int) -> list[StepGrants]:
    return [StepGrants(Step(4 + index), granted=number) for index, number in enumerate(granted)]


def taken(open_steps: list[StepGrants], *, closed: tuple[int, ...] = ()) -> tuple[int, int] | None:
    used = {number for step in open_steps for number in step.in_flight | step.done}
    turn = take_next(open_steps, LEASED, used, {}, lambda step: int(step) not in closed)
    return (turn.step, turn.microbatch_id) if turn is not None else None


def test_the_earlier_step_comes_first_when_both_are_granted() -> None:
    open_steps = steps(1, 2)
    open_steps[0].exhausted = True
    assert [taken(open_steps) for _ in range(4)] == [(4, 10), (5, 11), (5, 12), None]


def test_the_next_step_waits_while_more_of_this_one_may_be_granted() -> None:
    """Its leader may just have died: a stage that saw the next step begin would close this one without its work."""
    assert taken(steps(0, 2)) is None


@pytest.mark.parametrize("reason", ["exhausted", "over", "closed"])
def test_the_next_step_begins_when_nothing_more_of_this_one_will_be_granted(reason: str) -> None:
    open_steps = steps(0, 2)
    open_steps[0].exhausted = reason == "exhausted"
    open_steps[0].over = reason == "over"
    assert taken(open_steps, closed=(4,) if reason == "closed" else ()) == (5, 10)


def test_what_a_dead_member_held_is_granted_again_before_the_next_step_goes_on() -> None:
    open_steps = steps(1, 3)
    open_steps[0].exhausted = True
    assert [taken(open_steps), taken(open_steps)] == [(4, 10), (5, 11)]
    open_steps[0].granted, open_steps[0].exhausted = 2, False
    assert taken(open_steps) == (4, 12)
    assert taken(open_steps) is None


def test_no_id_is_taken_twice() -> None:
    open_steps = steps(9)
    assert [taken(open_steps) for _ in range(5)] == [(4, 10), (4, 11), (4, 12), (4, 13), None]
