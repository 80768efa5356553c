"""What a window did to weights and moments, and what the next one begins with: each operation rounded by itself.

Means of rows and columns are fp64 sums in the order of places, divided and rounded to fp32 once. Whatever is written
is +0 or at least 2^-126 in magnitude.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kernels.bits import flushed
from kernels.compiled import compiled
from kernels.threads import ONE_THREAD, Threads

_GRAIN = 16


def difference(
    start: NDArray[np.float32], end: NDArray[np.float32], out: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """out = start - end."""
    _over(threads, _difference, start, end, out)


def move(
    values: NDArray[np.float32],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """values += after - before."""
    _over(threads, _move, values, before, after)


def add_share(
    values: NDArray[np.float32], more: NDArray[np.float32], share: np.float32, *, threads: Threads = ONE_THREAD
) -> None:
    """values += share * more."""
    _over(threads, lambda values, more: _add_share(values, more, share), values, more)


def at_least_zero(values: NDArray[np.float32], *, threads: Threads = ONE_THREAD) -> None:
    """What is below zero becomes zero."""
    _over(threads, lambda values: np.maximum(values, 0.0, out=values), values)


def shorten(
    first: NDArray[np.float32], second: NDArray[np.float32], ratio: np.float32, *, threads: Threads = ONE_THREAD
) -> None:
    """Cut each of `first` to at most `ratio` times the root of its `second`, which is not negative."""
    _over(threads, lambda first, second: _shorten(first, second, ratio), first, second)


def _over(threads: Threads, function: Callable[..., object], *vectors: NDArray[np.float32]) -> None:
    """The function, of ranges of vectors that are equally long."""

    def work(start: int, stop: int) -> None:
        function(*(vector[start:stop] for vector in vectors))

    threads.over(vectors[0].size, work, grain=_GRAIN)


def means(
    matrix_RC: NDArray[np.float32],
    rows: NDArray[np.float32],
    columns: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """Each row's mean into `rows`, each column's into `columns`."""
    threads.over(len(rows), lambda start, stop: _row_means(matrix_RC[start:stop], rows[start:stop]), grain=1)
    threads.over(len(columns), lambda start, stop: _column_means(matrix_RC, start, columns[start:stop]), grain=_GRAIN)


def product_of_means(
    rows: NDArray[np.float32],
    columns: NDArray[np.float32],
    out_RC: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """out = row's mean * column's mean / mean of all, worked out in fp64; zeros where the mean of all is 0."""
    scale = _inverse_mean(rows)
    threads.over(
        len(rows), lambda start, stop: _product_of_means(rows[start:stop], columns, scale, out_RC[start:stop]), grain=1
    )


@compiled
def _difference(start: NDArray[np.float32], end: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(out.size):
        out[i] = flushed(start[i] - end[i])


@compiled
def _move(values: NDArray[np.float32], before: NDArray[np.float32], after: NDArray[np.float32]) -> None:
    for i in range(values.size):
        values[i] = flushed(values[i] + flushed(after[i] - before[i]))


@compiled
def _add_share(values: NDArray[np.float32], more: NDArray[np.float32], share: np.float32) -> None:
    for i in range(values.size):
        values[i] = flushed(values[i] + flushed(share * more[i]))


@compiled
def _shorten(first: NDArray[np.float32], second: NDArray[np.float32], ratio: np.float32) -> None:
    for i in range(first.size):
        most = np.float32(np.sqrt(second[i])) * ratio
        first[i] = flushed(max(min(first[i], most), -most))


@compiled
def _row_means(matrix_RC: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    for row in range(rows.size):
        values, total = matrix_RC[row], 0.0
        for i in range(values.size):
            total += np.float64(values[i])
        rows[row] = flushed(np.float32(total / values.size))


@compiled
def _column_means(matrix_RC: NDArray[np.float32], first: int, columns: NDArray[np.float32]) -> None:
    totals = np.zeros(columns.size, dtype=np.float64)
    for row in range(matrix_RC.shape[0]):
        values = matrix_RC[row, first : first + columns.size]
        for i in range(totals.size):
            totals[i] += np.float64(values[i])
    for i in range(totals.size):
        columns[i] = flushed(np.float32(totals[i] / matrix_RC.shape[0]))


@compiled
def _inverse_mean(rows: NDArray[np.float32]) -> np.float64:
    total = 0.0
    for row in range(rows.size):
        total += np.float64(rows[row])
    return np.float64(rows.size / total) if total > 0.0 else np.float64(0.0)


@compiled
def _product_of_means(
    rows: NDArray[np.float32], columns: NDArray[np.float32], scale: np.float64, out_RC: NDArray[np.float32]
) -> None:
    for row in range(rows.size):
        out, factor = out_RC[row], np.float64(rows[row]) * scale
        for i in range(out.size):
            out[i] = flushed(np.float32(factor * np.float64(columns[i])))
