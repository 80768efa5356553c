"""The halving tree has one shape, whatever computes it."""

import math

import numpy as np
import pytest

from kernels import norms
from kernels.threads import Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats


@pytest.mark.parametrize("size", [0, 1, 2, 4095, 4096, 4097, 8192, 50_001])
def test_norm_equals_the_reference_when_sizes_straddle_runs(size: int) -> None:
    values = exact_floats("norm", size)
    assert norms.tree_norm(values) == reference.tree_norm(values)


def test_norm_is_the_euclidean_norm_when_values_span_the_range_of_fp32() -> None:
    values = np.array([3e38, -4e38 / 2, 1e-38, 0.0], dtype=np.float32)
    expected = math.sqrt(math.fsum(float(value) ** 2 for value in values))
    assert norms.tree_norm(values) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_norm_is_not_finite_when_one_value_is_not(bad: float) -> None:
    values = exact_floats("norm", 10_000)
    values[7_777] = bad
    assert not math.isfinite(norms.tree_norm(values))


def test_norm_of_all_depends_on_order_alone_when_arrays_are_cut_elsewhere() -> None:
    values = exact_floats("norm", 30_000)
    whole = norms.tree_norm(values)
    arrays = [values[:10], values[10:20_000], values[20_000:]]
    sums = np.array([norms.sum_of_squares(array) for array in arrays])
    assert norms.norm_of_sums(sums) == pytest.approx(whole, rel=1e-14)
    assert norms.norm_of_sums(sums) == pytest.approx(math.sqrt(reference.halving_sum(sums)), rel=1e-15)
    assert norms.norm_of_sums([]) == 0.0


@pytest.mark.parametrize("size", [0, 1, 8_192, 8_193, 40_000])
def test_norm_of_parts_is_found_from_parts_when_they_come_one_by_one(size: int) -> None:
    values = exact_floats("parts", size)
    sums = [norms.sum_of_squares(values[start : start + 8_192]) for start in range(0, size, 8_192)]
    whole = norms.norm_of_parts(values, part_values=8_192)
    assert whole == norms.norm_of_sums(sums) == norms.norm_of_parts(values, part_values=8_192, threads=Threads(2))
    assert whole == math.sqrt(reference.halving_sum(np.array(sums)))
