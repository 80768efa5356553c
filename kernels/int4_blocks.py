"""This is where a vector becomes int4 codes, two a byte, in blocks of 64 with a bf16 scale each: 0.531 bytes a value.

scale = largest magnitude / 7, rounded up to bf16; code = value / scale in -7..7, rounded up or down at random with the
probabilities that make its mean the value, as in `kernels.int8_blocks`: zeros stay zero, errors of many peers cancel.
Values 2i and 2i + 1 are the low and the high half of byte i, in two's complement; the half past the last value is 0.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

BLOCK_VALUES = 64
LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes are below it, so a difference of two decoded values never overflows."""
LARGEST_SCALE = np.uint16(0x7D13)
"""bf16 bits of 2^126 / 7, rounded up."""
SMALLEST_SCALE = np.uint16(0x0080)
"""bf16 bits of 2^-126. A block whose scale would be smaller is written as zeros, with scale 0."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.float32(2.0**-126)
_POINT = np.float32(65536.0)
_OFFSET = np.float32(8 * 65536.0)


@compiled
def _float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@compiled
def _bits_of(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@compiled
def _mix64(state: np.uint64) -> np.uint64:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    state = np.uint64(state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = np.uint64(state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(state ^ (state >> np.uint64(31)))


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
        bits = part.view(np.int32)
        out = packed[block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
        largest = np.int32(0)
        for i in range(bits.size):
            largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
        if largest >= LIMIT_BITS:
            return False
        exact_scale = _float_of(largest) / np.float32(7.0)
        if exact_scale < _SMALLEST:
            scales[block] = 0
            out[:] = 0
            continue
        scale = np.uint16(np.int32(_bits_of(exact_scale) + np.int32(0xFFFF)) >> np.int32(16))
        scales[block] = scale
        inverse = np.float32(1.0) / _float_of(np.int32(np.int32(scale) << np.int32(16)))
        key = np.uint64(block) * np.uint64(0x9E3779B97F4A7C15)
        for word in range(4):
            key = _mix64(np.uint64(key ^ seed[word]))
        low = np.uint32(key & np.uint64(0xFFFFFFFF))
        high = np.uint32(key >> np.uint64(32))
        codes[part.size :] = 0
        for i in range(part.size):
            # Two rounds of a 32-bit mixer (lowbias32), the block's key entering before each; its upper half is used.
            chance = np.uint32(np.uint32(np.uint32(i) * np.uint32(0x9E3779B9)) + low)
            chance = np.uint32(np.uint32(chance ^ np.uint32(chance >> np.uint32(16))) * np.uint32(0x7FEB352D))
            chance = np.uint32(chance ^ high)
            chance = np.uint32(np.uint32(chance ^ np.uint32(chance >> np.uint32(15))) * np.uint32(0x846CA68B))
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
        scale = _float_of(np.int32(np.int32(bits) << np.int32(16)))
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
