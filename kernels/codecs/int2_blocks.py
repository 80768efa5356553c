"""Values in 2-bit codes: a bf16 scale for each 64, rounded up or down by chance so that they are right in the mean.

A code c, 0 to 3, stands for (2 c - 3) * scale, which is a third of the block's largest magnitude, rounded up: four
even levels and none of them 0, whose error is a fraction of that of the levels -1, 0 and 1. A block of zeros, or of
what is below 2^-126 for a scale, has scale 0 and codes 0. Four codes a byte, lowest bits first; those past the last
value are 0. Bits do not depend on the machine: see `kernels.codecs.int4_blocks`.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import LIMIT_BITS, SMALLEST_SCALE, draw, float_of_upper, largest_magnitude, mix64, scale_of
from kernels.compiled import compiled

BLOCK_VALUES = 64
LARGEST_SCALE = np.uint16(0x7DAB)
"""bf16 bits of 2^126 / 3, rounded up."""

_LARGEST = np.float32(3.0)
_HALF_POINT = np.float32(32768.0)
_OFFSET = np.float32(3 * 32768.0)


@compiled
def encode(
    values: NDArray[np.float32], seed: NDArray[np.uint64], scales: NDArray[np.uint16], packed: NDArray[np.uint8]
) -> bool:
    """Fill `scales` (bf16, one a block) and `packed` (one byte for four values); `seed` is four words.

    False if a value is not finite or is 2^126 or more.
    """
    codes = np.zeros(BLOCK_VALUES, dtype=np.uint8)
    for block in range(scales.size):
        part = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        out = packed[block * (BLOCK_VALUES // 4) : (block + 1) * (BLOCK_VALUES // 4)]
        largest = largest_magnitude(part.view(np.int32))
        if largest >= LIMIT_BITS:
            return False
        scale = scale_of(largest, _LARGEST)
        scales[block] = scale
        if scale == 0:
            out[:] = 0
            continue
        inverse = np.float32(1.0) / float_of_upper(scale)
        key = np.uint64(block) * np.uint64(0x9E3779B97F4A7C15)
        for word in range(4):
            key = mix64(np.uint64(key ^ seed[word]))
        low = np.uint32(key & np.uint64(0xFFFFFFFF))
        high = np.uint32(key >> np.uint64(32))
        codes[part.size :] = 0
        for i in range(part.size):
            chance = draw(i, low, high)
            # (value / scale + 3) / 2 in steps of 2^-16.
            fixed = np.int32(np.float32(np.float32(np.float32(part[i] * inverse) * _HALF_POINT) + _OFFSET))
            code = np.int32(np.int32(fixed + np.int32(chance >> np.uint32(16))) >> np.int32(16))
            # The rounded inverse may carry an extreme value past 3, as when decoded values are encoded again.
            codes[i] = np.uint8(max(min(code, np.int32(3)), np.int32(0)))
        for i in range(out.size):
            low_half = np.uint8(codes[4 * i] | np.uint8(codes[4 * i + 1] << np.uint8(2)))
            high_half = np.uint8(codes[4 * i + 2] | np.uint8(codes[4 * i + 3] << np.uint8(2)))
            out[i] = np.uint8(low_half | np.uint8(high_half << np.uint8(4)))
    return True


@compiled
def decode(scales: NDArray[np.uint16], packed: NDArray[np.uint8], values: NDArray[np.float32]) -> bool:
    """values = (2 code - 3) * scale, exact. False for what `encode` never writes."""
    if not is_valid(scales, packed, values.size):
        return False
    for block in range(scales.size):
        scale = float_of_upper(scales[block])
        part = packed[block * (BLOCK_VALUES // 4) : (block + 1) * (BLOCK_VALUES // 4)]
        out = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        if scales[block] == 0:
            out[:] = np.float32(0.0)
            continue
        for i in range(out.size // 4):
            byte = np.int32(part[i])
            out[4 * i] = np.float32(np.int32(2 * (byte & 3)) - np.int32(3)) * scale
            out[4 * i + 1] = np.float32(np.int32(2 * ((byte >> 2) & 3)) - np.int32(3)) * scale
            out[4 * i + 2] = np.float32(np.int32(2 * ((byte >> 4) & 3)) - np.int32(3)) * scale
            out[4 * i + 3] = np.float32(np.int32(2 * (byte >> 6)) - np.int32(3)) * scale
        for i in range(out.size // 4 * 4, out.size):
            code = (np.int32(part[i // 4]) >> np.int32(2 * (i % 4))) & np.int32(3)
            out[i] = np.float32(np.int32(2 * code) - np.int32(3)) * scale
    return True


@compiled
def is_valid(scales: NDArray[np.uint16], packed: NDArray[np.uint8], num_values: int) -> bool:
    """Whether `decode` takes them."""
    for block in range(scales.size):
        bits = scales[block]
        if bits == 0:
            part = packed[block * (BLOCK_VALUES // 4) : (block + 1) * (BLOCK_VALUES // 4)]
            used = np.uint8(0)
            for i in range(part.size):
                used |= part[i]
            if used != 0:
                return False
        elif bits < SMALLEST_SCALE or bits > LARGEST_SCALE:
            return False
    past_end = np.int32(packed[packed.size - 1]) >> np.int32(2 * (num_values % 4)) if num_values % 4 else np.int32(0)
    return bool(past_end == 0)
