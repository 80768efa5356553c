"""An error as AdamW takes it: large where nothing was, nothing where much was; in few numbers under a seed."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from verification.audit.amplified import BUCKETS, REGIONS, TABLE, amplified, moved_bounds_for, region_sizes
from verification.audit.tolerance import CHUNK_VALUES, Grade, bounds_for, compare

EPSILON = 1e-8
SEED = bytes(range(32))


def _values(chunks: int, *, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(chunks * CHUNK_VALUES).astype(np.float32)


def test_a_bias_that_the_plain_comparison_takes_for_rounding_is_a_whole_learning_rate_where_nothing_was() -> None:
    replay = _values(8)
    replay[4 * CHUNK_VALUES :] = 0.0
    claim = np.where(replay == 0, np.float32(2e-6), replay)
    assert compare(claim, replay, bounds_for("fp32", "int8", "contribution")).grade is Grade.HONEST
    found = amplified(claim, replay, np.where(replay == 0, 0, 1).astype(np.float32), epsilon=EPSILON)
    assert found.whole == pytest.approx(math.sqrt(0.5), rel=0.01)
    assert found.worst_chunk == pytest.approx(1.0, rel=0.01)
    assert found.off == 0.5
    assert found.measured > 1.5 * max(bounds.fraud for bounds in TABLE.values())


def test_what_was_there_before_and_what_is_there_now_make_an_error_small() -> None:
    zeros = np.zeros(CHUNK_VALUES, dtype=np.float32)
    bias = np.full(CHUNK_VALUES, 1e-3, dtype=np.float32)
    assert amplified(bias, zeros, np.ones_like(zeros), epsilon=EPSILON).whole == pytest.approx(1e-3, rel=1e-3)
    assert amplified(bias + 1, zeros + 1, zeros, epsilon=EPSILON).whole == pytest.approx(1e-3 / math.sqrt(2), rel=1e-2)
    assert amplified(bias, zeros, zeros, epsilon=1.0).whole == pytest.approx(1e-3, rel=1e-2), "Adam's own epsilon"
    assert amplified(-bias, bias, None, epsilon=0.0 + EPSILON).whole == pytest.approx(math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, CHUNK_VALUES - 1, CHUNK_VALUES, 2 * CHUNK_VALUES + 5])
def test_no_value_of_any_size_of_vector_is_left_out(size: int) -> None:
    replay = np.zeros(size, dtype=np.float32)
    assert region_sizes(size).sum() == size
    for place in {0, size // 2, size - 1} if size else ():
        claim = replay.copy()
        claim[place] = 1.0
        found = amplified(claim, replay, None, epsilon=EPSILON, seed=SEED)
        assert found.whole == pytest.approx(1 / math.sqrt(size), rel=1e-6)
        assert found.sketch is not None
        assert np.abs(found.sketch).max() > 0
    assert amplified(replay, replay, None, epsilon=EPSILON, seed=SEED).measured == 0.0


def test_a_sketch_is_linear_and_as_long_as_what_it_stands_for() -> None:
    replay = _values(70)
    claims = [replay * np.float32(1 + 1e-3) + np.float32(1e-4) * _values(70, seed=seed) for seed in (1, 2)]
    found = [amplified(claim, replay, None, epsilon=EPSILON, seed=SEED) for claim in claims]
    sketches = [one.sketch for one in found if one.sketch is not None]
    assert [sketch.shape for sketch in sketches] == [(REGIONS, BUCKETS)] * 2
    sizes = region_sizes(replay.size)
    assert (len(sizes), sizes.sum()) == (REGIONS, replay.size)
    for one, sketch in zip(found, sketches, strict=True):
        length = math.sqrt(float((sizes / sizes.sum() * (sketch**2).sum(axis=1)).sum()))
        assert length == pytest.approx(one.whole, rel=0.15)
    other = amplified(claims[0], replay, None, epsilon=EPSILON, seed=bytes(32)).sketch
    assert other is not None
    assert abs(float((other * sketches[0]).sum())) < 0.3 * float((other**2).sum()), "another seed, other signs"


def test_figures_have_the_same_bits_whatever_the_memory_layout() -> None:
    replay = _values(3)
    claim = (replay * np.float32(1.001)).astype(np.float32)
    found = amplified(claim, replay, replay**2, epsilon=EPSILON)
    wide = np.zeros((replay.size, 2), dtype=np.float32)
    wide[:, 0] = claim
    assert amplified(wide[:, 0], replay, replay**2, epsilon=EPSILON) == found


def test_bounds_are_in_order_and_nobody_is_banned_by_what_was_not_calibrated() -> None:
    for bounds in TABLE.values():
        assert 0 < bounds.bias < bounds.spread < bounds.fraud
        assert not bounds.report_only
    assert moved_bounds_for("bf16", "int2").report_only
    assert moved_bounds_for("bf16", "int2").fraud >= math.sqrt(2)
