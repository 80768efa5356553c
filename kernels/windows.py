"""What a window did to the weights, and the step that its mean makes: one pass each, every operation rounded by itself.

Whatever is written is +0 or at least 2^-126 in magnitude.
"""

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

    def work(first: int, stop: int) -> None:
        within = slice(first, stop)
        _difference(start[within], end[within], out[within])

    threads.over(out.size, work, grain=_GRAIN)


def descend(
    weights: NDArray[np.float32],
    direction: NDArray[np.float32],
    rate: np.float32,
    out: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """out = weights - direction * rate."""

    def work(first: int, stop: int) -> None:
        within = slice(first, stop)
        _descend(weights[within], direction[within], rate, out[within])

    threads.over(out.size, work, grain=_GRAIN)


@compiled
def _difference(start: NDArray[np.float32], end: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(out.size):
        out[i] = flushed(start[i] - end[i])


@compiled
def _descend(
    weights: NDArray[np.float32], direction: NDArray[np.float32], rate: np.float32, out: NDArray[np.float32]
) -> None:
    for i in range(out.size):
        out[i] = flushed(weights[i] - direction[i] * rate)
