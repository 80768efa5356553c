"""The bits in which fp32 values are stored and sent: fp32 without subnormals, and bf16.

Whatever the swarm writes is zero or at least 2^-126 in magnitude, and zero has no sign, so that a machine that
flushes subnormals computes what every other does. What was sent can also be added up without being written first.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled
from kernels.threads import ONE_THREAD, Threads

LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes sent are below it, so a difference of two never overflows."""
SMALLEST_BITS = np.int32(0x00800000)
"""Bits of 2^-126, the smallest normal fp32."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
_GRAIN = 16


def flush(source_bits: NDArray[np.int32], target_bits: NDArray[np.int32], *, threads: Threads = ONE_THREAD) -> bool:
    """Copy fp32 bits, magnitudes below 2^-126 as +0. False if one is 2^126 or more, infinite or NaN."""
    return all(
        threads.over(
            source_bits.size,
            lambda start, stop: _flush(source_bits[start:stop], target_bits[start:stop]),
            grain=_GRAIN,
        )
    )


def flush_in_place(bits: NDArray[np.int32], *, threads: Threads = ONE_THREAD) -> bool:
    """`flush` onto itself. Two names for the same memory would keep its loop from being vectorised."""
    return all(threads.over(bits.size, lambda start, stop: _flush_in_place(bits[start:stop]), grain=_GRAIN))


def to_bfloat16(source_bits: NDArray[np.int32], target: NDArray[np.uint16], *, threads: Threads = ONE_THREAD) -> bool:
    """Upper halves of fp32 bits, rounded to nearest, ties to even; flushed and limited as by `flush`."""
    return all(
        threads.over(
            source_bits.size,
            lambda start, stop: _to_bfloat16(source_bits[start:stop], target[start:stop]),
            grain=_GRAIN,
        )
    )


def from_bfloat16(source: NDArray[np.uint16], target_bits: NDArray[np.int32], *, threads: Threads = ONE_THREAD) -> bool:
    """fp32 bits of bf16 values; flushed as by `flush`. False if a magnitude is above 2^126, infinite or NaN."""
    return all(
        threads.over(
            source.size,
            lambda start, stop: _from_bfloat16(source[start:stop], target_bits[start:stop]),
            grain=_GRAIN,
        )
    )


def is_valid_fp32(bits: NDArray[np.int32]) -> bool:
    """Whether `flush` would give True."""
    return bool(_largest_fp32(bits) < LIMIT_BITS)


def is_valid_bfloat16(halves: NDArray[np.uint16]) -> bool:
    """Whether `from_bfloat16` would give True."""
    return bool(_largest_bfloat16(halves) << 16 <= LIMIT_BITS)


def add_fp32(
    bits: NDArray[np.int32], factor: np.float32, total: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """total += flushed values * factor, as `flush` and `robust.add_scaled` do. The input `is_valid_fp32`."""
    threads.over(total.size, lambda start, stop: _add_fp32(bits[start:stop], factor, total[start:stop]), grain=_GRAIN)


def add_bfloat16(
    halves: NDArray[np.uint16], factor: np.float32, total: NDArray[np.float32], *, threads: Threads = ONE_THREAD
) -> None:
    """total += values * factor, as `from_bfloat16` and `robust.add_scaled` do. The input `is_valid_bfloat16`."""
    threads.over(
        total.size, lambda start, stop: _add_bfloat16(halves[start:stop], factor, total[start:stop]), grain=_GRAIN
    )


@compiled
def _float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@compiled
def _flush(source_bits: NDArray[np.int32], target_bits: NDArray[np.int32]) -> bool:
    largest = np.int32(0)
    for i in range(source_bits.size):
        bits = source_bits[i]
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        target_bits[i] = bits if magnitude >= SMALLEST_BITS else np.int32(0)
    return bool(largest < LIMIT_BITS)


@compiled
def _flush_in_place(bits: NDArray[np.int32]) -> bool:
    largest = np.int32(0)
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        largest = max(largest, magnitude)
        bits[i] = bits[i] if magnitude >= SMALLEST_BITS else np.int32(0)
    return bool(largest < LIMIT_BITS)


@compiled
def _to_bfloat16(source_bits: NDArray[np.int32], target: NDArray[np.uint16]) -> bool:
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
def _from_bfloat16(source: NDArray[np.uint16], target_bits: NDArray[np.int32]) -> bool:
    largest = np.int32(0)
    for i in range(source.size):
        bits = np.int32(np.int32(source[i]) << np.int32(16))
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        target_bits[i] = bits if magnitude >= SMALLEST_BITS else np.int32(0)
    return bool(largest <= LIMIT_BITS)


@compiled
def _largest_fp32(bits: NDArray[np.int32]) -> int:
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return int(largest)


@compiled
def _largest_bfloat16(halves: NDArray[np.uint16]) -> int:
    largest = np.uint16(0)
    for i in range(halves.size):
        largest = max(largest, np.uint16(halves[i] & np.uint16(0x7FFF)))
    return int(largest)


@compiled
def _add_fp32(bits: NDArray[np.int32], factor: np.float32, total: NDArray[np.float32]) -> None:
    for i in range(total.size):
        kept = bits[i] if (bits[i] & _MAGNITUDE) >= SMALLEST_BITS else np.int32(0)
        total[i] = total[i] + _float_of(kept) * factor


@compiled
def _add_bfloat16(halves: NDArray[np.uint16], factor: np.float32, total: NDArray[np.float32]) -> None:
    for i in range(total.size):
        bits = np.int32(np.int32(halves[i]) << np.int32(16))
        kept = bits if (bits & _MAGNITUDE) >= SMALLEST_BITS else np.int32(0)
        total[i] = total[i] + _float_of(kept) * factor
