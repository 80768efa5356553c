"""A window's difference and its outer step have the bits of plain numpy, whoever shares the work."""

import numpy as np
import pytest

from kernels import windows
from kernels.threads import SMALLEST_RANGE_VALUES, Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats, exact_scales

SIZE = 2 * SMALLEST_RANGE_VALUES + 77


@pytest.mark.parametrize("count", [1, 3])
def test_difference_and_descent_equal_numpy_when_values_are_of_every_magnitude(count: int) -> None:
    threads = Threads(count)
    one = exact_floats("one", SIZE) * exact_scales("one", SIZE)
    other = exact_floats("other", SIZE) * exact_scales("two", SIZE)
    out = np.empty_like(one)
    windows.difference(one, other, out, threads=threads)
    assert out.tobytes() == reference.flushed(one - other).tobytes()
    windows.descend(one, other, np.float32(0.7), out, threads=threads)
    assert out.tobytes() == reference.flushed(one - other * np.float32(0.7)).tobytes()
