"""Memory that is asked for early: nothing but time may depend on it."""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled
from kernels.prefetching import prefetch


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
