"""A vector as int4 codes, two a byte, in blocks of 64 with a bf16 scale each: 0.531 bytes a value.

scale = largest magnitude / 7, rounded up to bf16; code = value / scale in -7..7, rounded up or down at random with the
probabilities that make its mean the value, as in `codecs.int8_blocks`: zeros stay zero, errors of many peers cancel.
Values 2i and 2i + 1 are the low and the high half of byte i, in two's complement; the half past the last value is 0.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import LIMIT_BITS, SMALLEST_SCALE, draw, float_of_upper, largest_magnitude, mix64, scale_of
from kernels.compiled import compiled

BLOCK_VALUES = 64
LARGEST_SCALE = np.uint16(0x7D13)
"""bf16 bits of 2^126 / 7, rounded up."""

_LARGEST_CODE = np.float32(7.0)
_POINT = np.float32(65536.0)
_OFFSET = np.float32(8 * 65536.0)


@compiled
def encode(
    values: NDArray[np.float32], seed: NDArray[np.uint64], scales: NDArray[np.uint16], packed: NDArray[np.uint8]
) -> bool:
    """Fill `scales` (bf16, one a block) and `packed` (one byte for two values); `seed` is four words.

    False if a value is not finite or is 2^126 or more.
    """
    codes = np.zeros(BLOCK_VALUES, dtype=np.uint8)
    for block in range(scales.size):
        part = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        out = packed[block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
        largest = largest_magnitude(part.view(np.int32))
        if largest >= LIMIT_BITS:
            return False
        scale = scale_of(largest, _LARGEST_CODE)
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
            # value / scale + 8 in steps of 2^-16: a whole code plus chance never reaches the next one.
            fixed = np.int32(np.float32(np.float32(np.float32(part[i] * inverse) * _POINT) + _OFFSET))
            code = np.int32(np.int32(fixed + np.int32(chance >> np.uint32(16))) >> np.int32(16)) - np.int32(8)
            # The rounded inverse may carry an extreme value past 7, as when decoded values are encoded again.
            codes[i] = np.uint8(max(min(np.int32(code), np.int32(7)), np.int32(-7)) & np.int32(15))
        for i in range(out.size):
            out[i] = np.uint8(codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4)))
    return True


@compiled
def decode(scales: NDArray[np.uint16], packed: NDArray[np.uint8], values: NDArray[np.float32]) -> bool:
    """values = code * scale, exact. False for a scale, a code or a last half that `encode` never writes."""
    for block in range(scales.size):
        bits = scales[block]
        part = packed[block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
        out = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        if bits == 0:
            used = np.uint8(0)
            for i in range(part.size):
                used |= part[i]
            if used != 0:
                return False
            out[:] = np.float32(0.0)
            continue
        if bits < SMALLEST_SCALE or bits > LARGEST_SCALE:
            return False
        scale = float_of_upper(bits)
        smallest = np.int32(0)
        for i in range(out.size // 2):
            byte = np.int32(part[i]) ^ np.int32(0x88)
            low = np.int32((byte & np.int32(15)) - np.int32(8))
            high = np.int32((byte >> np.int32(4)) - np.int32(8))
            smallest = min(smallest, low, high)
            out[2 * i] = np.float32(low) * scale
            out[2 * i + 1] = np.float32(high) * scale
        if out.size % 2:
            last = np.int32(np.int32((np.int32(part[part.size - 1]) & np.int32(15)) ^ np.int32(8)) - np.int32(8))
            smallest = min(smallest, last)
            out[out.size - 1] = np.float32(last) * scale
        if smallest == -8 or (out.size % 2 and part[part.size - 1] >> np.uint8(4) != 0):
            return False
    return True


@compiled
def is_valid(scales: NDArray[np.uint16], packed: NDArray[np.uint8], num_values: int) -> bool:
    """Whether `decode` takes them."""
    is_bad = np.uint8(0)
    for block in range(scales.size):
        bits = scales[block]
        part = packed[block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
        if bits != 0 and (bits < SMALLEST_SCALE or bits > LARGEST_SCALE):
            return False
        used = np.uint8(0)
        for i in range(part.size):
            used |= part[i]
            # A half is -8 where its highest bit is set and no other: 7 added to those carries into the highest.
            others = np.uint8(np.uint8(part[i] & np.uint8(0x77)) + np.uint8(0x77))
            is_bad |= np.uint8(part[i] & np.uint8(0x88) & np.uint8(~others))
        if bits == 0 and used != 0:
            return False
    past_end = np.uint8(packed[packed.size - 1] >> np.uint8(4)) if num_values % 2 else np.uint8(0)
    return bool(is_bad == 0 and past_end == 0)
