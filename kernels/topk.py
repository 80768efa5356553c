"""This is where the largest values of a vector are found: of each chunk of 4096 three in eight, marked by a bit.

Chosen are the largest magnitudes, of equal ones those that come first; a chunk's count is exact, so a vector's bytes
are known from its length. Bit i % 8 of byte i // 8 stands for value i. The values themselves go on in order, as
`kernels.int4_blocks` codes; what is not chosen is owed (`swarm.averaging.error_feedback`).
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

CHUNK_VALUES = 4096
CHOSEN, OF = 3, 8
"""So many values of so many are chosen, rounded up in the last chunk."""
LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes are below it."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_DIGITS = 1 << 11


def num_chosen(num_values: int) -> int:
    return -(-num_values * CHOSEN // OF)


@compiled
def _threshold(bits: NDArray[np.int32], wanted: int, counts: NDArray[np.int64]) -> tuple[np.int32, int]:
    """Bits of the `wanted`th largest magnitude, and how many of exactly that magnitude are among the largest.

    Digits of 11, 10 and 10 bits from the top: the digit in which that magnitude lies is found by counting.
    """
    found = np.int32(0)
    known = np.int32(0)
    for shift in (20, 10, 0):
        mask = np.int32(_DIGITS - 1 if shift == 20 else 1023)
        counts[:] = 0
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            if np.int32(magnitude & known) == found:
                counts[np.int32(magnitude >> np.int32(shift)) & mask] += 1
        digit = _DIGITS - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        found = np.int32(found | np.int32(np.int32(digit) << np.int32(shift)))
        known = np.int32(_MAGNITUDE & np.int32(~((1 << shift) - 1)))
    return found, wanted


@compiled
def select(values: NDArray[np.float32], marks: NDArray[np.uint8], chosen: NDArray[np.float32]) -> bool:
    """Fill `marks` (a bit a value, zero past the end) and `chosen` (`num_chosen` values, in order).

    False if a value is not finite or is 2^126 or more.
    """
    counts = np.empty(_DIGITS, dtype=np.int64)
    marks[:] = 0
    at = 0
    for start in range(0, values.size, CHUNK_VALUES):
        part = values[start : start + CHUNK_VALUES]
        bits = part.view(np.int32)
        largest = np.int32(0)
        for i in range(bits.size):
            largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
        if largest >= LIMIT_BITS:
            return False
        threshold, num_equal = _threshold(bits, (part.size * CHOSEN + OF - 1) // OF, counts)
        for i in range(part.size):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            if magnitude < threshold or (magnitude == threshold and num_equal == 0):
                continue
            if magnitude == threshold:
                num_equal -= 1
            place = start + i
            marks[place // 8] = np.uint8(marks[place // 8] | np.uint8(1 << (place % 8)))
            chosen[at] = part[i]
            at += 1
    return True


@compiled
def scatter(marks: NDArray[np.uint8], chosen: NDArray[np.float32], values: NDArray[np.float32]) -> bool:
    """The chosen values in their places, 0 elsewhere. False for marks that `select` never writes."""
    at = 0
    for start in range(0, values.size, CHUNK_VALUES):
        part = values[start : start + CHUNK_VALUES]
        end = at + (part.size * CHOSEN + OF - 1) // OF
        for i in range(part.size):
            place = start + i
            part[i] = np.float32(0.0)
            if (marks[place // 8] >> np.uint8(place % 8)) & np.uint8(1):
                if at == end:
                    return False
                part[i] = chosen[at]
                at += 1
        if at != end:
            return False
    past_end = values.size % 8
    return past_end == 0 or marks[marks.size - 1] >> np.uint8(past_end) == 0
