"""This is where int8 blocks are decoded and squared for their norm in one pass: with the bits of both steps."""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled
from kernels.int8_blocks import BLOCK_VALUES, LARGEST_SCALE, SMALLEST_SCALE
from kernels.prefetching import CACHE_LINE_BYTES, prefetch
from kernels.threads import ONE_THREAD, Threads

RUN_BLOCKS = 32
"""Blocks in a run of `kernels.norms`."""

_LINE_VALUES = CACHE_LINE_BYTES // 4

_PLUS_ZERO = np.float32(0.0)


def decode_and_square(
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    values: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> float | None:
    """Fill `values` and give their `norms.sum_of_squares`. None for a scale or code that no encoder writes."""
    sums = np.empty(-(-codes.size // (RUN_BLOCKS * BLOCK_VALUES)), dtype=np.float64)

    def work(start: int, stop: int) -> bool:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        runs = slice(first // RUN_BLOCKS, -(-last // RUN_BLOCKS))
        return _decode_and_square(scales[first:last], codes[start:stop], values[start:stop], sums[runs])

    valid = all(threads.over(values.size, work, grain=RUN_BLOCKS * BLOCK_VALUES))
    return float(_halving_sum(sums)) if valid else None


@compiled
def _float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@compiled
def _decode(scales: NDArray[np.uint16], codes: NDArray[np.int8], values: NDArray[np.float32]) -> bool:
    valid = True
    smallest = np.int8(0)
    for block in range(scales.size):
        bits = scales[block]
        valid &= bits == 0 or (bits >= SMALLEST_SCALE and bits <= LARGEST_SCALE)
        part = codes[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        out = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        scale = _float_of(np.int32(np.int32(bits) << np.int32(16)))
        for i in range(part.size):
            smallest = min(smallest, part[i])
            out[i] = np.float32(part[i]) * scale + _PLUS_ZERO  # no -0, see `int8_blocks`
    return bool(valid and smallest > -128)


@compiled
def _halving_sum(sums: NDArray[np.float64]) -> float:
    """As in `kernels.norms`."""
    width = 1
    while width < sums.size:
        width *= 2
    scratch = np.zeros(width, dtype=np.float64)
    scratch[: sums.size] = sums
    return _halve(scratch, width)


@compiled
def _halve(scratch: NDArray[np.float64], width: int) -> float:
    while width > 1:
        width //= 2
        low, high = scratch[:width], scratch[width : 2 * width]
        for i in range(width):
            low[i] += high[i]
    return float(scratch[0])


@compiled
def _square(value: np.float32) -> np.float64:
    return np.float64(value) * np.float64(value)


@compiled
def _decode_and_square(
    scales: NDArray[np.uint16], codes: NDArray[np.int8], values: NDArray[np.float32], sums: NDArray[np.float64]
) -> bool:
    valid = True
    padded = np.zeros(RUN_BLOCKS * BLOCK_VALUES, dtype=np.float32)
    scratch = np.empty(512, dtype=np.float64)
    for run in range(sums.size):
        blocks = slice(run * RUN_BLOCKS, min((run + 1) * RUN_BLOCKS, scales.size))
        start, stop = run * padded.size, min((run + 1) * padded.size, codes.size)
        part = values[start:stop]
        for i in range(stop, stop + padded.size, _LINE_VALUES):
            prefetch(values, i)
        valid &= _decode(scales[blocks], codes[start:stop], part)
        if part.size < padded.size:
            padded[: part.size] = part
            part = padded
        # The tree's first three rows at once.
        for i in range(512):
            one = (_square(part[i]) + _square(part[i + 2048])) + (_square(part[i + 1024]) + _square(part[i + 3072]))
            two = (_square(part[i + 512]) + _square(part[i + 2560])) + (
                _square(part[i + 1536]) + _square(part[i + 3584])
            )
            scratch[i] = one + two
        sums[run] = _halve(scratch, 512)
    return valid
