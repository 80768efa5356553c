"""This is where fp32 values become the bits that are stored and sent: fp32 without subnormals, and bf16.

Whatever the swarm writes is zero or at least 2^-126 in magnitude, and zero has no sign, so that a machine that
flushes subnormals computes what every other does.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes sent are below it, so a difference of two never overflows."""
SMALLEST_BITS = np.int32(0x00800000)
"""Bits of 2^-126, the smallest normal fp32."""
_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled
def flush(source_bits: NDArray[np.int32], target_bits: NDArray[np.int32]) -> bool:
    """Copy fp32 bits, magnitudes below 2^-126 as +0. False if one is 2^126 or more, infinite or NaN."""
    largest = np.int32(0)
    for i in range(source_bits.size):
        bits = source_bits[i]
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        target_bits[i] = bits if magnitude >= SMALLEST_BITS else np.int32(0)
    return bool(largest < LIMIT_BITS)


@compiled
def to_bfloat16(source_bits: NDArray[np.int32], target: NDArray[np.uint16]) -> bool:
    """Upper halves of fp32 bits, rounded to nearest, ties to even; flushed and limited as by `flush`."""
    largest = np.int32(0)
    for i in range(source_bits.size):
        bits = source_bits[i]
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        even = np.int32((bits >> np.int32(16)) & np.int32(1))
        rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + even) >> np.int32(16)
        target[i] = np.uint16(rounded) if magnitude >= SMALLEST_BITS else np.uint16(0)
    return bool(largest < LIMIT_BITS)


@compiled
def from_bfloat16(source: NDArray[np.uint16], target_bits: NDArray[np.int32]) -> bool:
    """fp32 bits of bf16 values; flushed as by `flush`. False if a magnitude is above 2^126, infinite or NaN."""
    largest = np.int32(0)
    for i in range(source.size):
        bits = np.int32(np.int32(source[i]) << np.int32(16))
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        target_bits[i] = bits if magnitude >= SMALLEST_BITS else np.int32(0)
    return bool(largest <= LIMIT_BITS)
