"""Optimizer steps: each one pass over the values, in fp32, every operation rounded by itself.

A step covers consecutive segments, `bounds[s]` to `bounds[s + 1]`, which differ in weight decay and learning rate:
first weight * keep[s], then the update * times[s]. The gradient is multiplied by `clip`. Scalars come in fp32, worked
out in fp64 by the caller. Whatever is written is +0 or at least 2^-126 in magnitude.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import flushed
from kernels.cache_hints import stream, streamed
from kernels.compiled import compiled
from kernels.threads import ONE_THREAD, Threads

_GRAIN = 16
_TILE = 1024
"""New weights on their way past the cache: nobody reads them before all are there."""


def adamw(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """AdamW and, with another mix of moment and gradient, NAdamW.

    `scalars`: clip, beta1, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), epsilon, share of the moment and share
    of the gradient in the update (both hold the learning rate and the correction of the first moment's bias).
    """

    def work(start: int, stop: int) -> None:
        within, inner = slice(start, stop), segments_within(bounds, start, stop)
        _adamw(
            weights[within], gradient[within], first[within], second[within], out[within], inner, keep, times, scalars
        )

    threads.over(weights.size, work, grain=_GRAIN)


def sgd(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    velocity: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """SGD with momentum (velocity = momentum * velocity + gradient). `scalars`: clip, momentum, learning rate."""

    def work(start: int, stop: int) -> None:
        within, inner = slice(start, stop), segments_within(bounds, start, stop)
        _sgd(weights[within], gradient[within], velocity[within], out[within], inner, keep, times, scalars)

    threads.over(weights.size, work, grain=_GRAIN)


def nesterov(
    gradient: NDArray[np.float32],
    momentum: NDArray[np.float32],
    out: NDArray[np.float32],
    scalars: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """Muon's momentum, mu * momentum + (1 - mu) * gradient, and in `out` what it turns: the same mean of the new one
    and the gradient. `scalars` as of `adamw`, then mu and 1 - mu."""
    threads.over(
        out.size,
        lambda start, stop: _nesterov(gradient[start:stop], momentum[start:stop], out[start:stop], scalars),
        grain=_GRAIN,
    )


def extrapolate(
    new: NDArray[np.float32], old: NDArray[np.float32], out: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """out = new + (new - old)."""
    threads.over(
        out.size, lambda start, stop: _extrapolate(new[start:stop], old[start:stop], out[start:stop]), grain=_GRAIN
    )


def divide(
    total: NDArray[np.float32], count: np.float32, out: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """out = total / count."""
    threads.over(out.size, lambda start, stop: _divide(total[start:stop], count, out[start:stop]), grain=_GRAIN)


def segments_within(bounds: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Bounds of the same segments cut to [start, stop), counted from `start`; those outside become empty."""
    return np.clip(bounds, start, stop) - start


@compiled
def _adamw(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
) -> None:
    clip, beta1, rest1, beta2, rest2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    unbias, epsilon, moment_share, gradient_share = scalars[5], scalars[6], scalars[7], scalars[8]
    tile = np.empty(_TILE, dtype=np.float32)
    for segment in range(keep.size):
        factor, share = keep[segment], times[segment]
        for start in range(bounds[segment], bounds[segment + 1], _TILE):
            stop = min(start + _TILE, bounds[segment + 1])
            # Slices, so that the loop counts from 0: an index that might be negative keeps it from being vectorised.
            w, g, m, v = weights[start:stop], gradient[start:stop], first[start:stop], second[start:stop]
            new = tile[: w.size]
            for i in range(w.size):
                slope = g[i] * clip
                mean = flushed(m[i] * beta1 + slope * rest1)
                square = flushed(v[i] * beta2 + (slope * slope) * rest2)
                divisor = np.sqrt(square) * unbias + epsilon
                update = (mean * moment_share + slope * gradient_share) / divisor
                m[i] = mean
                v[i] = square
                new[i] = flushed(w[i] * factor - update * share)
            stream(new, out[start:stop])
    streamed()


@compiled
def _sgd(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    velocity: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
) -> None:
    clip, momentum, rate = scalars[0], scalars[1], scalars[2]
    for segment in range(keep.size):
        factor, share = keep[segment], times[segment]
        start, stop = bounds[segment], bounds[segment + 1]
        w, g, v, new = weights[start:stop], gradient[start:stop], velocity[start:stop], out[start:stop]
        for i in range(w.size):
            speed = flushed(v[i] * momentum + g[i] * clip)
            v[i] = speed
            new[i] = flushed(w[i] * factor - (speed * rate) * share)


@compiled
def _nesterov(
    gradient: NDArray[np.float32],
    momentum: NDArray[np.float32],
    out: NDArray[np.float32],
    scalars: NDArray[np.float32],
) -> None:
    clip, kept, rest = scalars[0], scalars[9], scalars[10]
    for i in range(out.size):
        slope = gradient[i] * clip
        mean = flushed(momentum[i] * kept + slope * rest)
        momentum[i] = mean
        out[i] = flushed(mean * kept + slope * rest)


@compiled
def lessened(
    weights: NDArray[np.float32],
    update: NDArray[np.float32],
    out: NDArray[np.float32],
    keep: np.float32,
    share: np.float32,
) -> None:
    """out = keep * weights - share * update. Once it has begun nothing ends it: it takes no memory and no thread."""
    for i in range(out.size):
        out[i] = flushed(weights[i] * keep - update[i] * share)


@compiled
def _extrapolate(new: NDArray[np.float32], old: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(out.size):
        out[i] = flushed(new[i] + (new[i] - old[i]))


@compiled
def _divide(total: NDArray[np.float32], count: np.float32, out: NDArray[np.float32]) -> None:
    for i in range(out.size):
        out[i] = flushed(total[i] / count)
