"""Euclidean norms, in fp64, summed by a halving tree of fixed shape.

Squares of fp32 values are exact in fp64. Runs of 4096 squares (the last padded with zeros) are halved,
s[i] + s[i + w/2], until one sum is left; the runs' sums, padded to a power of two, are halved the same way. The shape
depends on the number of values alone, so the bits do not depend on vector width or threads. fp32 inputs cannot
overflow it: a norm is finite exactly when every value is.

The norm of a vector that is cut into parts halves the parts' sums of squares: whoever gets the parts one by one, in
any order, finds the same bits.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled, inlined
from kernels.threads import ONE_THREAD, Threads

RUN_VALUES = 4096
_FOURTH_ROW = RUN_VALUES // 8


def tree_norm(values: NDArray[np.float32], *, threads: Threads = ONE_THREAD) -> float:
    """Norm of `values`; 0 for none. Not finite if a value is not."""
    return math.sqrt(sum_of_squares(values, threads=threads))


def norm_of_parts(values: NDArray[np.float32], *, part_values: int, threads: Threads = ONE_THREAD) -> float:
    """`norm_of_sums` of the parts, each of `part_values` values but for the last."""
    return norm_of_runs(_sums_of_runs(values, threads), part_values=part_values)


def norm_of_runs(sums: NDArray[np.float64], *, part_values: int) -> float:
    """`norm_of_parts` of values whose runs' sums of squares, in order, are these."""
    assert part_values % RUN_VALUES == 0, f"parts of {part_values} values cut runs of {RUN_VALUES}"
    runs = part_values // RUN_VALUES
    return norm_of_sums(_halving_sum(sums[start : start + runs]) for start in range(0, sums.size, runs))


def norm_of_sums(sums: Iterable[float]) -> float:
    """Norm of arrays whose sums of squares, in order, are these."""
    return math.sqrt(_halving_sum(np.array(list(sums), dtype=np.float64)))


def halving_sum(sums: NDArray[np.float64]) -> float:
    """The runs' or the parts' sums of squares halved until one is left."""
    return float(_halving_sum(sums))


def sum_of_squares(values: NDArray[np.float32], *, threads: Threads = ONE_THREAD) -> float:
    """The square of `tree_norm`."""
    return halving_sum(_sums_of_runs(values, threads))


def _sums_of_runs(values: NDArray[np.float32], threads: Threads) -> NDArray[np.float64]:
    sums = np.empty(-(-values.size // RUN_VALUES), dtype=np.float64)

    def work(start: int, stop: int) -> None:
        _square_runs(values[start:stop], sums[start // RUN_VALUES : -(-stop // RUN_VALUES)])

    threads.over(values.size, work, grain=RUN_VALUES)
    return sums


@compiled
def _halve(scratch: NDArray[np.float64], width: int) -> float:
    while width > 1:
        width //= 2
        low = scratch[:width]
        high = scratch[width : 2 * width]
        for i in range(width):
            low[i] += high[i]
    return float(scratch[0])


@compiled
def _square(value: np.float32) -> np.float64:
    return np.float64(value) * np.float64(value)


@inlined
def square_of_run(run: NDArray[np.float32], scratch: NDArray[np.float64]) -> float:
    """Sum of 4096 squares; the tree's first three rows at once, into a `scratch` of 512."""
    for i in range(_FOURTH_ROW):
        one = (_square(run[i]) + _square(run[i + 2048])) + (_square(run[i + 1024]) + _square(run[i + 3072]))
        two = (_square(run[i + 512]) + _square(run[i + 2560])) + (_square(run[i + 1536]) + _square(run[i + 3584]))
        scratch[i] = one + two
    return _halve(scratch, _FOURTH_ROW)


@compiled
def _square_runs(values: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    scratch = np.empty(_FOURTH_ROW, dtype=np.float64)
    num_whole = values.size // RUN_VALUES
    for run in range(num_whole):
        sums[run] = square_of_run(values[run * RUN_VALUES : (run + 1) * RUN_VALUES], scratch)
    rest = values.size - num_whole * RUN_VALUES
    if rest > 0:
        padded = np.zeros(RUN_VALUES, dtype=np.float32)
        padded[:rest] = values[num_whole * RUN_VALUES :]
        sums[num_whole] = square_of_run(padded, scratch)


@compiled
def _halving_sum(sums: NDArray[np.float64]) -> float:
    width = 1
    while width < sums.size:
        width *= 2
    scratch = np.zeros(width, dtype=np.float64)
    scratch[: sums.size] = sums
    return _halve(scratch, width)
