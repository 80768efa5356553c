"""A window's difference, means and shortened moments have the bits of plain numpy, whoever shares the work."""

from functools import reduce

import numpy as np
import pytest

from kernels import windows
from kernels.threads import SMALLEST_RANGE_VALUES, Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats, exact_scales

SIZE = 2 * SMALLEST_RANGE_VALUES + 77


@pytest.mark.parametrize("count", [1, 3])
def test_difference_and_shortened_moments_equal_numpy_when_values_are_of_every_magnitude(count: int) -> None:
    threads = Threads(count)
    one = exact_floats("one", SIZE) * exact_scales("one", SIZE)
    other = exact_floats("other", SIZE) * exact_scales("two", SIZE)
    out = np.empty_like(one)
    windows.difference(one, other, out, threads=threads)
    assert out.tobytes() == reference.flushed(one - other).tobytes()
    out[:], most = one, np.sqrt(np.abs(other)) * np.float32(0.7)
    windows.shorten(out, np.abs(other), np.float32(0.7), threads=threads)
    assert out.tobytes() == reference.flushed(np.clip(one, -most, most)).tobytes()


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_moved_and_added_equals_numpy_when_values_are_of_every_magnitude(count: int) -> None:
    threads = Threads(count)
    one, other, third = (exact_floats(name, SIZE) * exact_scales(name, SIZE) for name in ("one", "two", "three"))
    out = one.copy()
    windows.move(out, other, third, threads=threads)
    assert out.tobytes() == reference.flushed(one + reference.flushed(third - other)).tobytes()
    out, share = one.copy(), np.float32(-0.3)
    windows.add_share(out, other, share, threads=threads)
    assert out.tobytes() == reference.flushed(one + reference.flushed(share * other)).tobytes()
    windows.at_least_zero(out, threads=threads)
    assert out.min() == 0.0
    assert out.max() > 0.0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (900, 5), (64, 64)])
def test_means_and_their_products_equal_numpy_when_threads_share_them(shape: tuple[int, int], count: int) -> None:
    threads = Threads(count)
    matrix_RC = np.square(exact_floats("matrix", shape[0] * shape[1])).reshape(shape)
    matrix_RC *= exact_scales("rows", shape[0])[:, None] * np.float32(2.0**-20)
    rows, columns = np.empty(shape[0], np.float32), np.empty(shape[1], np.float32)
    windows.means(matrix_RC, rows, columns, threads=threads)
    wide_RC = matrix_RC.astype(np.float64)
    sums_R = [reduce(lambda total, value: total + value, row, np.float64(0)) for row in wide_RC]
    sums_C = reduce(lambda total, row: total + row, wide_RC, np.zeros(shape[1]))
    assert rows.tobytes() == reference.flushed((np.array(sums_R) / shape[1]).astype(np.float32)).tobytes()
    assert columns.tobytes() == reference.flushed((sums_C / shape[0]).astype(np.float32)).tobytes()
    out_RC = np.empty_like(matrix_RC)
    windows.product_of_means(rows, columns, out_RC, threads=threads)
    total = reduce(lambda total, value: total + np.float64(value), rows, np.float64(0))
    factors_R1 = (rows.astype(np.float64) * (shape[0] / total))[:, None]
    assert out_RC.tobytes() == reference.flushed((factors_R1 * columns).astype(np.float32)).tobytes()


def test_products_are_zero_when_all_means_are() -> None:
    out_RC = np.full((3, 5), np.nan, dtype=np.float32)
    windows.product_of_means(np.zeros(3, np.float32), np.zeros(5, np.float32), out_RC)
    assert not out_RC.any()
