"""This is where contributions are combined: coordinate medians and weighted sums in a fixed order of contributors."""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

_TILE_VALUES = 1024
_SMALLEST = np.float32(2.0**-126)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)


@compiled
def _flushed(value: np.float32) -> np.float32:
    return _ZERO if abs(value) < _SMALLEST else value


@compiled
def median(rows_NV: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Median of each column; for an even number of rows half the lower middle plus half the upper middle.

    Odd-even transposition sort: its comparisons do not depend on the values, so whole runs of columns are
    compared at once.
    """
    num_rows, num_values = rows_NV.shape
    tile = np.empty((num_rows, _TILE_VALUES), dtype=np.float32)
    for start in range(0, num_values, _TILE_VALUES):
        count = min(_TILE_VALUES, num_values - start)
        for row in range(num_rows):
            tile[row, :count] = rows_NV[row, start : start + count]
        for turn in range(num_rows):
            for row in range(turn % 2, num_rows - 1, 2):
                lower = tile[row]
                upper = tile[row + 1]
                for i in range(_TILE_VALUES):
                    one = lower[i]
                    other = upper[i]
                    lower[i] = one if one < other else other
                    upper[i] = other if one < other else one
        low_middle = tile[(num_rows - 1) // 2]
        high_middle = tile[num_rows // 2]
        target = out[start : start + count]
        for i in range(count):
            target[i] = _flushed(low_middle[i] * _HALF + high_middle[i] * _HALF)


@compiled
def add_scaled(values: NDArray[np.float32], factor: np.float32, total: NDArray[np.float32]) -> None:
    """total += values * factor."""
    for i in range(total.size):
        total[i] = total[i] + values[i] * factor


@compiled
def add_scaled_difference(
    values: NDArray[np.float32], center: NDArray[np.float32], factor: np.float32, total: NDArray[np.float32]
) -> None:
    """total += (values - center) * factor."""
    for i in range(total.size):
        total[i] = total[i] + (values[i] - center[i]) * factor
