"""Medians, trimmed means, weighted sums and CenteredClip's moves have the bits of their plain references."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import clipping, norms, robust
from kernels.threads import SMALLEST_RANGE_VALUES, Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats

SIZES = (1, 1_023, 4_096, 9_500)


def rows(num_rows: int, size: int = 9_500) -> NDArray[np.float32]:
    """Rows with many ties and zeros of both signs."""
    rows_NV = np.stack([exact_floats(f"row {row}", size) for row in range(num_rows)])
    rows_NV[:, ::5] = np.sign(rows_NV[:, ::5])
    rows_NV[0, ::15] = -0.0
    return rows_NV


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31])
def test_median_and_trimmed_mean_equal_the_reference_when_rows_are_few_and_many(num_rows: int) -> None:
    rows_NV = rows(num_rows)
    out = np.empty(rows_NV.shape[1], dtype=np.float32)
    robust.median(rows_NV, out)
    assert out.tobytes() == reference.median(rows_NV).tobytes()
    for num_trimmed in range((num_rows + 1) // 2):
        robust.trimmed_mean(rows_NV, num_trimmed, out)
        assert out.tobytes() == reference.trimmed_mean(rows_NV, num_trimmed).tobytes()


@pytest.mark.parametrize("num_rows", range(1, 18))
def test_comparators_sort_every_column_of_zeros_and_ones(num_rows: int) -> None:
    """By the zero-one principle (Knuth 5.3.4) a network that sorts these sorts everything."""
    columns = np.arange(1 << min(num_rows, 14))
    rows_NV = np.stack([(columns >> (row % 14)) & 1 for row in range(num_rows)])
    for low, high in robust._comparators(num_rows):
        rows_NV[[low, high]] = np.minimum(rows_NV[low], rows_NV[high]), np.maximum(rows_NV[low], rows_NV[high])
    assert (np.diff(rows_NV, axis=0) >= 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_moves_and_distances_equal_the_reference_when_sizes_straddle_runs(size: int) -> None:
    rows_NV, center = rows(5, size), exact_floats("center", size)
    factors_N = np.array([0.3, 0.1, 0.05, 1e-30, 0.2], dtype=np.float32)
    assert clipping.distances(rows_NV, center) == [reference.tree_norm(row - center) for row in rows_NV]
    assert clipping.distances(rows_NV, center)[0] == norms.tree_norm(rows_NV[0] - center)
    out, lengths = clipping.moved(rows_NV, center, factors_N)
    assert out.tobytes() == reference.moved(rows_NV, center, factors_N).tobytes()
    assert lengths == [reference.tree_norm(row - out) for row in rows_NV]


@pytest.mark.parametrize("count", [2, 4])
def test_bits_stay_when_threads_share_the_columns(count: int) -> None:
    rows_NV, threads = rows(3, 2 * SMALLEST_RANGE_VALUES + 1_027), Threads(count)
    factors_N = np.array([0.3, 0.1, 0.05], dtype=np.float32)
    one, many = np.empty(rows_NV.shape[1], np.float32), np.empty(rows_NV.shape[1], np.float32)
    robust.trimmed_mean(rows_NV, 1, one)
    robust.trimmed_mean(rows_NV, 1, many, threads=threads)
    assert one.tobytes() == many.tobytes()
    alone, together = clipping.moved(rows_NV, one, factors_N), clipping.moved(rows_NV, one, factors_N, threads=threads)
    assert alone[0].tobytes() == together[0].tobytes()
    assert alone[1] == together[1] == clipping.distances(rows_NV, alone[0], threads=threads)
    robust.add_scaled(rows_NV[0], np.float32(0.3), one)
    robust.add_scaled(rows_NV[0], np.float32(0.3), many, threads=threads)
    assert one.tobytes() == many.tobytes()
    assert norms.tree_norm(one) == norms.tree_norm(one, threads=threads) == reference.tree_norm(one)


def test_sums_round_product_and_sum_apart_when_factors_are_odd() -> None:
    values, center = exact_floats("values", 5_003), exact_floats("center", 5_003)
    factor = np.float32(0.3)
    total = exact_floats("total", values.size)
    sums = total.copy()
    robust.add_scaled(values, factor, sums)
    assert sums.tobytes() == (total + values * factor).tobytes()
    fused = (total.astype(np.float64) + values.astype(np.float64) * np.float64(factor)).astype(np.float32)
    assert sums.tobytes() != fused.tobytes(), "inputs would not show a fused multiply-add"
    out, _ = clipping.moved(values[None], center, np.array([factor]))
    assert out.tobytes() == (center + (values - center) * factor).tobytes()
