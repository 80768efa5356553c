"""Contributions combined: coordinate medians, trimmed means, weighted sums.

Sums run over the contributors in the given order, or over a coordinate's values in rising order.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kernels.bits import flushed
from kernels.compiled import compiled
from kernels.threads import ONE_THREAD, Threads

_TILE_VALUES = 1024
_ZERO = np.float32(0.0)


def median(rows_NV: NDArray[np.float32], out: NDArray[np.float32], *, threads: Threads = ONE_THREAD) -> None:
    """Median of each column; for an even number of rows half the lower middle plus half the upper middle."""
    trimmed_mean(rows_NV, (len(rows_NV) - 1) // 2, out, threads=threads)


def trimmed_mean(
    rows_NV: NDArray[np.float32], num_trimmed: int, out: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """Each column's mean without its `num_trimmed` lowest and highest values: sum of fp32(1 / kept) * value.

    `rows_NV` is contiguous.
    """
    num_rows = len(rows_NV)
    kept = num_rows - 2 * num_trimmed
    assert kept >= 1, f"{num_trimmed} at each end are trimmed from {num_rows} rows"
    comparators, share = _comparators(num_rows), np.float32(1.0 / kept)
    threads.over(
        out.size,
        lambda start, stop: _trimmed_mean(rows_NV, start, stop, comparators, num_trimmed, share, out),
        grain=_TILE_VALUES,
        num_rows=num_rows,
    )


def add_scaled(
    values: NDArray[np.float32], factor: np.float32, total: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """total += values * factor."""
    threads.over(total.size, lambda start, stop: _add_scaled(values[start:stop], factor, total[start:stop]), grain=16)


@cache
def _comparators(num_rows: int) -> NDArray[np.int64]:
    """Pairs (low, high) that sort any column: Batcher's odd-even merge sort (Knuth 5.2.2, algorithm M)."""
    pairs = []
    top = 1 << max(0, (num_rows - 1).bit_length() - 1)
    step = top
    while step > 0:
        width, offset, distance = top, 0, step
        while True:
            pairs += [(low, low + distance) for low in range(num_rows - distance) if low & step == offset]
            if width == step:
                break
            distance, width, offset = width - step, width // 2, step
        step //= 2
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@compiled
def _trimmed_mean(
    rows_NV: NDArray[np.float32],
    first: int,
    last: int,
    comparators: NDArray[np.int64],
    num_trimmed: int,
    share: np.float32,
    out: NDArray[np.float32],
) -> None:
    # A network's comparisons do not depend on the values, so whole runs of columns are compared at once.
    num_rows = rows_NV.shape[0]
    tile = np.zeros((num_rows, _TILE_VALUES), dtype=np.float32)
    for start in range(first, last, _TILE_VALUES):
        count = min(_TILE_VALUES, last - start)
        for row in range(num_rows):
            tile[row, :count] = rows_NV[row, start : start + count]
        for pair in range(comparators.shape[0]):
            lower = tile[comparators[pair, 0]]
            upper = tile[comparators[pair, 1]]
            for i in range(_TILE_VALUES):
                one = lower[i]
                other = upper[i]
                lower[i] = one if one < other else other
                upper[i] = other if one < other else one
        target = out[start : start + count]
        target[:] = _ZERO
        for row in range(num_trimmed, num_rows - num_trimmed):
            ordered = tile[row]
            for i in range(count):
                target[i] = target[i] + ordered[i] * share
        for i in range(count):
            target[i] = flushed(target[i])


@compiled
def _add_scaled(values: NDArray[np.float32], factor: np.float32, total: NDArray[np.float32]) -> None:
    for i in range(total.size):
        total[i] = total[i] + values[i] * factor
