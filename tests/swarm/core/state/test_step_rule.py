"""Which certified gradients make a step: those that are numbers, and not far longer than the last ones."""

import math

import pytest

from swarm.core.state.step_rule import NUM_CERTIFIED_NORMS, median_norm, norms_after, why_skipped

USUAL = [1.0 + 0.01 * number for number in range(NUM_CERTIFIED_NORMS)]


def test_a_norm_far_beyond_the_last_ones_makes_no_step() -> None:
    median = median_norm(USUAL)
    assert median == pytest.approx(1.075)
    assert why_skipped(10 * median, USUAL, factor=10.0) is None
    reason = why_skipped(10.01 * median, USUAL, factor=10.0)
    assert reason is not None
    assert "more than 10 times 1.075" in reason


def test_no_bound_is_set_before_enough_is_known_nor_by_a_factor_of_zero() -> None:
    assert median_norm(USUAL[1:]) is None
    assert why_skipped(1e9, USUAL[1:], factor=10.0) is None
    assert why_skipped(1e9, USUAL, factor=0.0) is None


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0, None])
def test_what_is_no_gradient_makes_no_step_and_is_not_remembered(norm: float | None) -> None:
    for known in ([], USUAL):
        assert why_skipped(norm, known, factor=0.0) is not None
        assert norms_after(norm, known) == known


def test_gradients_that_have_become_longer_for_good_make_steps_again_after_eight() -> None:
    norms, skipped = USUAL, 0
    while why_skipped(100.0, norms, factor=10.0) is not None:
        norms = norms_after(100.0, norms)
        skipped += 1
    assert skipped == NUM_CERTIFIED_NORMS // 2
    assert len(norms) == NUM_CERTIFIED_NORMS


def test_the_memory_is_of_the_last_norms() -> None:
    assert norms_after(7.0, USUAL) == [*USUAL[1:], 7.0]
    assert norms_after(7.0, [1.0]) == [1.0, 7.0]
