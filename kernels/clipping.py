"""CenteredClip's moves of its center, and how far everyone is from it, in one pass over the rows.

A move has the bits of one addition of (row - center) * factor after the other, flushed; a distance those of
`norms.tree_norm` of the differences.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import flushed
from kernels.compiled import compiled
from kernels.norms import RUN_VALUES, norm_of_sums
from kernels.threads import ONE_THREAD, Threads

_THIRD_ROW = RUN_VALUES // 4
_TILE_VALUES = 1024


def distances(
    rows_NV: NDArray[np.float32], center: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> list[float]:
    """Norm of each row's difference from the center."""
    sums_NR = np.empty((len(rows_NV), -(-center.size // RUN_VALUES)), dtype=np.float64)
    threads.over(
        center.size,
        lambda start, stop: _distances(rows_NV, start, stop, center, sums_NR),
        grain=RUN_VALUES,
        num_rows=len(rows_NV),
    )
    return [norm_of_sums(sums) for sums in sums_NR]


def moved(
    rows_NV: NDArray[np.float32],
    center: NDArray[np.float32],
    factors_N: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> tuple[NDArray[np.float32], list[float]]:
    """center + sum of (row - center) * factor, and each row's distance from there."""
    out = np.empty_like(center)
    sums_NR = np.empty((len(rows_NV), -(-center.size // RUN_VALUES)), dtype=np.float64)
    threads.over(
        center.size,
        lambda start, stop: _moved(rows_NV, start, stop, center, factors_N, out, sums_NR),
        grain=RUN_VALUES,
        num_rows=len(rows_NV),
    )
    return out, [norm_of_sums(sums) for sums in sums_NR]


@compiled
def _square_of_difference(value: np.float32, middle: np.float32) -> np.float64:
    difference = np.float64(np.float32(value - middle))
    return difference * difference


@compiled
def _run_distance(
    row: NDArray[np.float32], center: NDArray[np.float32], half: NDArray[np.float64], scratch: NDArray[np.float64]
) -> float:
    """Sum of squared differences over a run, as in `kernels.norms`."""
    if row.size == RUN_VALUES:
        for i in range(_THIRD_ROW):
            half[i] = (
                _square_of_difference(row[i], center[i]) + _square_of_difference(row[i + 2048], center[i + 2048])
            ) + (
                _square_of_difference(row[i + 1024], center[i + 1024])
                + _square_of_difference(row[i + 3072], center[i + 3072])
            )
        width = _THIRD_ROW
        squares = half
    else:
        for i in range(row.size):
            scratch[i] = _square_of_difference(row[i], center[i])
        scratch[row.size :] = 0.0
        width = RUN_VALUES
        squares = scratch
    while width > 1:
        width //= 2
        low = squares[:width]
        high = squares[width : 2 * width]
        for i in range(width):
            low[i] += high[i]
    return float(squares[0])


@compiled
def _distances(
    rows_NV: NDArray[np.float32], first: int, last: int, center: NDArray[np.float32], sums_NR: NDArray[np.float64]
) -> None:
    half, scratch = np.empty(_THIRD_ROW, dtype=np.float64), np.empty(RUN_VALUES, dtype=np.float64)
    for start in range(first, last, RUN_VALUES):
        run, stop = start // RUN_VALUES, min(start + RUN_VALUES, last)
        for row in range(rows_NV.shape[0]):
            sums_NR[row, run] = _run_distance(rows_NV[row, start:stop], center[start:stop], half, scratch)


@compiled
def _moved(
    rows_NV: NDArray[np.float32],
    first: int,
    last: int,
    center: NDArray[np.float32],
    factors_N: NDArray[np.float32],
    out: NDArray[np.float32],
    sums_NR: NDArray[np.float64],
) -> None:
    half, scratch = np.empty(_THIRD_ROW, dtype=np.float64), np.empty(RUN_VALUES, dtype=np.float64)
    for start in range(first, last, RUN_VALUES):
        run, stop = start // RUN_VALUES, min(start + RUN_VALUES, last)
        for tile in range(start, stop, _TILE_VALUES):
            within = slice(tile, min(tile + _TILE_VALUES, stop))
            middle, total = center[within], out[within]
            total[:] = middle
            for row in range(rows_NV.shape[0]):
                part, factor = rows_NV[row, within], factors_N[row]
                for i in range(total.size):
                    total[i] = total[i] + (part[i] - middle[i]) * factor
            for i in range(total.size):
                total[i] = flushed(total[i])
        for row in range(rows_NV.shape[0]):
            sums_NR[row, run] = _run_distance(rows_NV[row, start:stop], out[start:stop], half, scratch)
