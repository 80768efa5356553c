"""fp32 values by their bits, and chance that is a function of a seed and a place: what many kernels work with."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.compiled import compiled

MAGNITUDE = np.int32(0x7FFFFFFF)
LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: encoded magnitudes are below it, so a difference of two decoded values never overflows."""
SMALLEST = np.float32(2.0**-126)
SMALLEST_SCALE = np.uint16(0x0080)
"""bf16 bits of 2^-126. A block whose scale would be smaller is written as zeros, with scale 0."""

_ZERO = np.float32(0.0)


@compiled
def float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@compiled
def bits_of(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@compiled
def float_of_upper(bits: np.uint16) -> np.float32:
    """The value whose bf16 bits these are."""
    return float_of(np.int32(np.int32(bits) << np.int32(16)))


@compiled
def flushed(value: np.float32) -> np.float32:
    """+0 for what is below 2^-126 in magnitude."""
    return _ZERO if abs(value) < SMALLEST else value


@compiled
def largest_magnitude(bits: NDArray[np.int32]) -> np.int32:
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@compiled
def scale_of(largest: np.int32, largest_code: np.float32) -> np.uint16:
    """bf16 bits of a block's scale, rounded up: the largest magnitude, whose bits are given, over the largest code."""
    exact_scale = float_of(largest) / largest_code
    if exact_scale < SMALLEST:
        return np.uint16(0)
    return np.uint16(np.int32(bits_of(exact_scale) + np.int32(0xFFFF)) >> np.int32(16))


@compiled
def mix64(state: np.uint64) -> np.uint64:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    state = np.uint64(state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = np.uint64(state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(state ^ (state >> np.uint64(31)))


@compiled
def key_of_seed(seed: NDArray[np.uint64]) -> np.uint64:
    """The four words of a seed mixed to one."""
    key = np.uint64(0)
    for word in range(4):
        key = mix64(np.uint64(key ^ seed[word]))
    return key


def _draw_code(typing_context: Any, lane: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """Two rounds of a 32-bit mixer (lowbias32), the block's key entering before each.

    Written out for LLVM, because numba widens 32-bit integers to 64, which have no fast multiplication.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def number(value: int) -> Any:
            return ir.Constant(ir.IntType(32), value)

        lane, low, high = arguments
        state = builder.add(builder.mul(builder.trunc(lane, ir.IntType(32)), number(0x9E3779B9)), low)
        state = builder.mul(builder.xor(state, builder.lshr(state, number(16))), number(0x7FEB352D))
        state = builder.xor(state, high)
        state = builder.mul(builder.xor(state, builder.lshr(state, number(15))), number(0x846CA68B))
        return builder.xor(state, builder.lshr(state, number(16)))

    return types.uint32(types.int64, types.uint32, types.uint32), generate


draw = cast("Callable[[int, np.uint32, np.uint32], np.uint32]", intrinsic(_draw_code))
"""32 bits for a value of a block: its place there, and the halves of the block's key."""
