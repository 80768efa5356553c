"""This is where norms are computed: Euclidean, in fp64, summed by a halving tree of fixed shape.

Squares of fp32 values are exact in fp64. Runs of 4096 squares (the last padded with zeros) are halved,
s[i] + s[i + w/2], until one sum is left; the runs' sums, padded to a power of two, are halved the same way. The shape
depends on the number of values alone, so the bits do not depend on vector width or threads. fp32 inputs cannot
overflow it: a norm is finite exactly when every value is.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

RUN_VALUES = 4096


def tree_norm(values: NDArray[np.float32]) -> float:
    """Norm of `values`; 0 for none. Not finite if a value is not."""
    return math.sqrt(sum_of_squares(values))


def tree_norm_of_all(arrays: Iterable[NDArray[np.float32]]) -> float:
    """Norm of several arrays together: their sums of squares, in the given order, halved like runs."""
    sums = np.array([sum_of_squares(values) for values in arrays], dtype=np.float64)
    return math.sqrt(_halving_sum(sums))


def sum_of_squares(values: NDArray[np.float32]) -> float:
    """The square of `tree_norm`."""
    sums = np.empty(-(-values.size // RUN_VALUES), dtype=np.float64)
    _square_runs(values, sums)
    return float(_halving_sum(sums))


def tree_distance(values: NDArray[np.float32], center: NDArray[np.float32]) -> float:
    """Norm of the fp32 differences `values - center`."""
    sums = np.empty(-(-values.size // RUN_VALUES), dtype=np.float64)
    _difference_runs(values, center, sums)
    return math.sqrt(_halving_sum(sums))


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
def _square_runs(values: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    scratch = np.zeros(RUN_VALUES, dtype=np.float64)
    for run in range(sums.size):
        part = values[run * RUN_VALUES : (run + 1) * RUN_VALUES]
        for i in range(part.size):
            scratch[i] = np.float64(part[i]) * np.float64(part[i])
        scratch[part.size :] = 0.0
        sums[run] = _halve(scratch, RUN_VALUES)


@compiled
def _difference_runs(values: NDArray[np.float32], center: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    scratch = np.zeros(RUN_VALUES, dtype=np.float64)
    for run in range(sums.size):
        part = values[run * RUN_VALUES : (run + 1) * RUN_VALUES]
        middle = center[run * RUN_VALUES : (run + 1) * RUN_VALUES]
        for i in range(part.size):
            difference = np.float64(part[i] - middle[i])
            scratch[i] = difference * difference
        scratch[part.size :] = 0.0
        sums[run] = _halve(scratch, RUN_VALUES)


@compiled
def _halving_sum(sums: NDArray[np.float64]) -> float:
    width = 1
    while width < sums.size:
        width *= 2
    scratch = np.zeros(width, dtype=np.float64)
    scratch[: sums.size] = sums
    return _halve(scratch, width)
