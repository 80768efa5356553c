"""This is where a vector becomes its largest values: of each chunk of 4096 one in 32, in int4 with a bf16 scale.

Kept are the largest magnitudes, of equal ones those that come first. A kept value is one 16-bit word, its place in the
chunk (12 bits) above its code (4 bits, two's complement); words stand in order of place. scale = largest magnitude / 7,
rounded up to bf16; codes are rounded up or down at random as in `kernels.int4_blocks`, so a decoded kept value is right
in the mean. 0.063 bytes a value; what is not kept decodes as 0, and is owed (`swarm.averaging.error_feedback`).
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

CHUNK_VALUES = 4096
KEPT_OF = 32
"""One value in so many is kept, rounded up."""
LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes are below it, so a difference of two decoded values never overflows."""
LARGEST_SCALE = np.uint16(0x7D13)
"""bf16 bits of 2^126 / 7, rounded up."""
SMALLEST_SCALE = np.uint16(0x0080)
"""bf16 bits of 2^-126. A chunk whose scale would be smaller is written as zeros in the first places, with scale 0."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.float32(2.0**-126)
_POINT = np.float32(65536.0)
_OFFSET = np.float32(8 * 65536.0)
_DIGITS = 1 << 11


def num_chunks(num_values: int) -> int:
    return -(-num_values // CHUNK_VALUES)


def num_kept(num_values: int) -> int:
    """Words of a vector: a 32nd of each chunk, rounded up."""
    return -(-num_values // KEPT_OF)


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
def _threshold(bits: NDArray[np.int32], kept: int, counts: NDArray[np.int64]) -> tuple[np.int32, int]:
    """The `kept`th largest magnitude's bits, and how many of exactly that magnitude are among the kept.

    Three digits of 11, 10 and 10 bits from the top: the digit in which the `kept`th lies is found by counting.
    """
    found = np.int32(0)
    wanted = kept
    known = np.int32(0)
    for shift in (20, 10, 0):
        counts[:] = 0
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            if np.int32(magnitude & known) == found:
                counts[np.int32(magnitude >> np.int32(shift)) & np.int32(_DIGITS - 1 if shift == 20 else 1023)] += 1
        digit = _DIGITS - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        found = np.int32(found | np.int32(np.int32(digit) << np.int32(shift)))
        known = np.int32(_MAGNITUDE & np.int32(~((1 << shift) - 1)))
    return found, wanted


@compiled
def encode(
    values: NDArray[np.float32], seed: NDArray[np.uint64], scales: NDArray[np.uint16], words: NDArray[np.uint16]
) -> bool:
    """Fill `scales` (bf16, one a chunk) and `words` (`num_kept`); `seed` is four words.

    False if a value is not finite or is 2^126 or more.
    """
    counts = np.empty(_DIGITS, dtype=np.int64)
    kept_of_chunk = CHUNK_VALUES // KEPT_OF
    for chunk in range(scales.size):
        part = values[chunk * CHUNK_VALUES : (chunk + 1) * CHUNK_VALUES]
        bits = part.view(np.int32)
        out = words[chunk * kept_of_chunk : (chunk + 1) * kept_of_chunk]
        largest = np.int32(0)
        for i in range(bits.size):
            largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
        if largest >= LIMIT_BITS:
            return False
        exact_scale = _float_of(largest) / np.float32(7.0)
        if exact_scale < _SMALLEST:
            scales[chunk] = 0
            for place in range(out.size):
                out[place] = np.uint16(place << 4)
            continue
        scale = np.uint16(np.int32(_bits_of(exact_scale) + np.int32(0xFFFF)) >> np.int32(16))
        scales[chunk] = scale
        inverse = np.float32(1.0) / _float_of(np.int32(np.int32(scale) << np.int32(16)))
        key = np.uint64(chunk) * np.uint64(0x9E3779B97F4A7C15)
        for word in range(4):
            key = _mix64(np.uint64(key ^ seed[word]))
        low = np.uint32(key & np.uint64(0xFFFFFFFF))
        high = np.uint32(key >> np.uint64(32))
        threshold, num_equal = _threshold(bits, out.size, counts)
        place = 0
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            if magnitude < threshold:
                continue
            if magnitude == threshold:
                if num_equal == 0:
                    continue
                num_equal -= 1
            # Two rounds of a 32-bit mixer (lowbias32), the chunk's key entering before each; its upper half is used.
            chance = np.uint32(np.uint32(np.uint32(i) * np.uint32(0x9E3779B9)) + low)
            chance = np.uint32(np.uint32(chance ^ np.uint32(chance >> np.uint32(16))) * np.uint32(0x7FEB352D))
            chance = np.uint32(chance ^ high)
            chance = np.uint32(np.uint32(chance ^ np.uint32(chance >> np.uint32(15))) * np.uint32(0x846CA68B))
            fixed = np.int32(np.float32(np.float32(np.float32(part[i] * inverse) * _POINT) + _OFFSET))
            code = np.int32(np.int32(fixed + np.int32(chance >> np.uint32(16))) >> np.int32(16)) - np.int32(8)
            code = max(min(np.int32(code), np.int32(7)), np.int32(-7))
            out[place] = np.uint16(np.int32(np.int32(i) << np.int32(4)) | np.int32(code & np.int32(15)))
            place += 1
    return True


@compiled
def decode(scales: NDArray[np.uint16], words: NDArray[np.uint16], values: NDArray[np.float32]) -> bool:
    """code * scale in its place, exact, 0 elsewhere. False for a scale, place, order or code never written."""
    kept_of_chunk = CHUNK_VALUES // KEPT_OF
    for chunk in range(scales.size):
        bits = scales[chunk]
        part = words[chunk * kept_of_chunk : (chunk + 1) * kept_of_chunk]
        out = values[chunk * CHUNK_VALUES : (chunk + 1) * CHUNK_VALUES]
        out[:] = np.float32(0.0)
        if bits == 0:
            for place in range(part.size):
                if part[place] != np.uint16(place << 4):
                    return False
            continue
        if bits < SMALLEST_SCALE or bits > LARGEST_SCALE:
            return False
        scale = _float_of(np.int32(np.int32(bits) << np.int32(16)))
        before = np.int32(-1)
        for place in range(part.size):
            index = np.int32(np.int32(part[place]) >> np.int32(4))
            code = np.int32(np.int32((np.int32(part[place]) & np.int32(15)) ^ np.int32(8)) - np.int32(8))
            if index <= before or index >= out.size or code == -8:
                return False
            out[index] = np.float32(code) * scale
            before = index
    return True
