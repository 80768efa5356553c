"""Deadlines learn from what was measured and never pass their limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.pipeline.deadlines import AdaptiveDeadline


def test_the_limit_holds_until_something_is_measured() -> None:
    deadline = AdaptiveDeadline(limit_s=60.0, floor_s=1.0)
    for _ in range(2):
        deadline.observe(0.1)
        assert deadline.seconds == 60.0
    deadline.observe(0.1)
    assert deadline.seconds == 1.0


def test_it_is_a_multiple_of_the_median_so_that_one_slow_wait_changes_little() -> None:
    deadline = AdaptiveDeadline(limit_s=60.0, floor_s=1.0, factor=5.0)
    for duration_s in (2.0, 2.0, 2.0, 2.0, 50.0):
        deadline.observe(duration_s)
    assert deadline.seconds == 10.0


def test_old_measurements_are_forgotten() -> None:
    deadline = AdaptiveDeadline(limit_s=60.0, floor_s=1.0, factor=5.0, window=8)
    for duration_s in [10.0] * 8 + [1.0] * 5:
        deadline.observe(duration_s)
    assert deadline.seconds == 5.0


def test_waits_that_are_cut_off_lengthen_it_until_they_end_well_again() -> None:
    """All peers became 20 times slower: without `missed` no answer would ever be awaited long enough to be seen."""
    deadline = AdaptiveDeadline(limit_s=60.0, floor_s=0.1, factor=5.0)
    for _ in range(32):
        deadline.observe(0.5)
    now_takes_s, num_missed = 10.0, 0
    for _ in range(100):
        if deadline.seconds >= now_takes_s:
            deadline.observe(now_takes_s)
        else:
            deadline.missed()
            num_missed += 1
    assert deadline.seconds == 50.0
    assert num_missed < 6


@given(
    st.lists(st.one_of(st.none(), st.floats(0.0, 1e6)), max_size=60),
    st.floats(0.01, 10.0),
    st.floats(1.0, 20.0),
)
def test_it_stays_between_floor_and_limit(waits: list[float | None], floor_s: float, factor: float) -> None:
    deadline = AdaptiveDeadline(limit_s=floor_s * 7, floor_s=floor_s, factor=factor)
    for wait_s in waits:
        if wait_s is None:
            deadline.missed()
        else:
            deadline.observe(wait_s)
        assert floor_s <= deadline.seconds <= floor_s * 7


def test_a_floor_above_the_limit_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        AdaptiveDeadline(limit_s=1.0, floor_s=2.0)
