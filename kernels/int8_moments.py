"""AdamW's moments in two bytes a value: a root of the second, the first's ratio to that root.

In blocks of 128 with one fp32 scale: root r of the second moment = code^2 * scale, code 0 to 255, scale = largest
root / 255^2. Squares give small roots their share of codes, over a range of 65025 to 1. First moment = ratio * r,
ratio = sign * code^2 * limit / 127^2, code -127 to 127: Adam's first moment is never longer than `limit` times the
root of the second (by Cauchy and Schwarz), so it needs no scale, and whatever rounding does, no update can be longer
than that. A second moment of code 0 has a first moment of 0.

Codes are rounded up or down at random so that second moment and ratio keep their mean: rounded to nearest, a moment
that a step moves by less than half a code would never move. Moments are rounded after the update has used them.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import draw, float_of, flushed, key_of_seed, mix64
from kernels.compiled import compiled
from kernels.optimizers import segments_within
from kernels.threads import ONE_THREAD, Threads

BLOCK_VALUES = 128

_ZERO = np.float32(0.0)
_TWO = np.float32(2.0)
_ONE = np.float32(1.0)
_LARGEST_SQUARE = np.float32(255.0**2)
_LARGEST_RATIO = np.float32(127.0**2)
_CHANCE = np.float32(2.0**-16)


def num_blocks(num_values: int) -> int:
    """Scales of that many values."""
    return -(-num_values // BLOCK_VALUES)


def adamw(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.int8],
    second: NDArray[np.uint8],
    scales: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
    seed: NDArray[np.uint64],
    *,
    block: int = 0,
    threads: Threads = ONE_THREAD,
) -> None:
    """`optimizers.adamw` on moments in codes.

    `scalars` has one more: the limit of the first moment's ratio. `seed`, four words, is another one for each step.
    `block` is which one of the whole vector the arrays begin with: chance goes by it.
    """

    def work(start: int, stop: int) -> None:
        first_block, last_block = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        within = slice(start, stop)
        _adamw(
            weights[within],
            gradient[within],
            first[within],
            second[within],
            scales[first_block:last_block],
            out[within],
            segments_within(bounds, start, stop),
            keep,
            times,
            scalars,
            seed,
            block + first_block,
        )

    threads.over(weights.size, work, grain=BLOCK_VALUES)


@compiled
def _adamw(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.int8],
    second: NDArray[np.uint8],
    scales: NDArray[np.float32],
    out: NDArray[np.float32],
    bounds: NDArray[np.int64],
    keep: NDArray[np.float32],
    times: NDArray[np.float32],
    scalars: NDArray[np.float32],
    seed: NDArray[np.uint64],
    first_block: int,
) -> None:
    clip, beta1, rest1, beta2, rest2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    unbias, epsilon, moment_share, gradient_share = scalars[5], scalars[6], scalars[7], scalars[8]
    ratio_step = scalars[9] / _LARGEST_RATIO
    seed_key = key_of_seed(seed)
    means = np.zeros(BLOCK_VALUES, dtype=np.float32)
    roots = np.zeros(BLOCK_VALUES, dtype=np.float32)
    root_bits = roots.view(np.int32)
    factors = np.zeros(BLOCK_VALUES, dtype=np.float32)
    shares = np.zeros(BLOCK_VALUES, dtype=np.float32)
    segment = 0
    for block in range(scales.size):
        start, stop = block * BLOCK_VALUES, min((block + 1) * BLOCK_VALUES, weights.size)
        filled = start
        while filled < stop:
            while bounds[segment + 1] <= filled:
                segment += 1
            until = min(stop, bounds[segment + 1])
            factors[filled - start : until - start] = keep[segment]
            shares[filled - start : until - start] = times[segment]
            filled = until
        w, g, m, v, new = (
            weights[start:stop],
            gradient[start:stop],
            first[start:stop],
            second[start:stop],
            out[start:stop],
        )
        scale = scales[block]
        for i in range(w.size):
            code = np.float32(v[i])
            root = (code * code) * scale
            ratio = np.float32(m[i])
            slope = g[i] * clip
            mean = flushed(((ratio * abs(ratio)) * ratio_step) * root * beta1 + slope * rest1)
            root = np.sqrt(flushed((root * root) * beta2 + (slope * slope) * rest2))
            update = (mean * moment_share + slope * gradient_share) / (root * unbias + epsilon)
            new[i] = flushed(w[i] * factors[i] - update * shares[i])
            means[i] = mean
            roots[i] = root
        largest_bits = np.int32(0)
        for i in range(w.size):  # roots are not negative: their bits are ordered as they are
            largest_bits = max(largest_bits, root_bits[i])
        largest = float_of(largest_bits)
        scale = largest / _LARGEST_SQUARE
        scales[block] = scale
        inverse = _LARGEST_SQUARE / largest if largest > _ZERO else _ZERO
        key = mix64(seed_key + np.uint64(first_block + block) * np.uint64(0x9E3779B97F4A7C15))
        low_key = np.uint32(key & np.uint64(0xFFFFFFFF))
        high_key = np.uint32(key >> np.uint64(32))
        for i in range(m.size):
            chance = draw(i, low_key, high_key)
            # The second moment lies between code^4 and (code + 1)^4, in units of scale^2.
            square = roots[i] * inverse
            code = np.float32(np.int32(np.sqrt(square)))
            low = code * code
            width = (_TWO * code + _ONE) * ((_TWO * code + _TWO) * code + _ONE)
            above = np.float32(np.int32(chance >> np.uint32(16))) * _CHANCE * width < (square - low) * (square + low)
            code = min(code + (_ONE if above else _ZERO), np.float32(255.0))
            # The ratio lies between code^2 and (code + 1)^2, in units of ratio_step.
            unit = (code * code) * scale * ratio_step
            ratio = min(abs(means[i]) / (unit if code > _ZERO else _ONE), _LARGEST_RATIO)
            size = np.float32(np.int32(np.sqrt(ratio)))
            above = (
                np.float32(np.int32(chance & np.uint32(0xFFFF))) * _CHANCE * (_TWO * size + _ONE) < ratio - size * size
            )
            size = size + (_ONE if above else _ZERO)
            v[i] = np.uint8(np.int32(code))
            signed = np.int32(size if means[i] > _ZERO else -size)
            m[i] = np.int8(signed if code > _ZERO else np.int32(0))
