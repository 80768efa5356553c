"""What compiled code says of memory beforehand: nothing but time may depend on it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cache_hints import CACHE_LINE_BYTES, prefetch, stream, streamed, zeros_on_lines
from kernels.compiled import compiled


@compiled
def fetched(flat: NDArray[np.float64], square: NDArray[np.int32], index: int) -> int:
    prefetch(flat, index)
    prefetch(square, (index, 0))
    return index


def test_prefetching_changes_nothing_and_takes_any_index() -> None:
    flat, square = np.arange(40.0), np.arange(12, dtype=np.int32).reshape(3, 4)
    for index in (0, 2, -1, 1 << 40):
        assert fetched(flat, square, index) == index
    assert (flat == np.arange(40.0)).all()
    assert (square.ravel() == np.arange(12)).all()


@compiled
def copied(source: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    stream(source, target)
    streamed()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 100, 4096, 5001])
@pytest.mark.parametrize("shift", [0, 1, 7, 15, 16])
def test_what_is_streamed_arrives_and_nothing_beside_it(size: int, shift: int) -> None:
    source, whole = np.arange(1, size + 3, dtype=np.float32), np.zeros(size + 40, dtype=np.float32)
    copied(source[2:], whole[shift : shift + size])
    assert whole[shift : shift + size].tobytes() == source[2:].tobytes()
    assert not whole[:shift].any()
    assert not whole[shift + size :].any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_zeros_begin_where_a_line_does(dtype: type[np.float32] | type[np.uint8]) -> None:
    for count in (1, 1000):
        zeros = zeros_on_lines(count, dtype)
        assert (zeros.ctypes.data % CACHE_LINE_BYTES, zeros.shape, zeros.dtype) == (0, (count,), dtype)
        assert not zeros.any()
