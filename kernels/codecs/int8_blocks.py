"""A vector as int8 codes in blocks of 128 with a bf16 scale each: 1.016 bytes a value.

scale = largest magnitude / 127, rounded up to bf16; code = value / scale, rounded up or down at random with the
probabilities that make its mean the value ("stochastic rounding"), so that errors of many peers and steps cancel.
The chance is a counter-based generator: 15 bits for each value, a function of (seed, index) only.

For speed a few blocks are taken together, in three loops: largest magnitudes, scales and keys, codes.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels import norms
from kernels.bits import LIMIT_BITS, MAGNITUDE, bits_of, draw, float_of, float_of_upper, key_of_seed, mix64
from kernels.cache_hints import CACHE_LINE_BYTES, prefetch
from kernels.compiled import compiled, inlined
from kernels.threads import ONE_THREAD, Threads

BLOCK_VALUES = 128
RUN_BLOCKS = norms.RUN_VALUES // BLOCK_VALUES
LARGEST_SCALE = np.uint16(0x7B02)
"""bf16 bits of 2^126 / 127, rounded up."""
SMALLEST_SCALE = np.uint16(0x0880)
"""bf16 bits of 2^-110. A block whose scale would be smaller is written as zeros, with scale 0."""

_SMALLEST = np.float32(2.0**-110)
_TILE_BLOCKS = 8
_HALF_BLOCK = 64
_POINT = np.float32(2.0**15)
_WHOLE = np.float32(1.5 * 2.0**23)
_U128 = np.uint64(128)
_U64 = np.uint64(64)
_ZERO_CODE = np.int32(0x80)
_LINE_VALUES = CACHE_LINE_BYTES // 4
_AHEAD_VALUES = 2 * _TILE_BLOCKS * BLOCK_VALUES
"""What is so far ahead is fetched while a tile is worked on."""
_ONE = np.float32(1.0)
_PLUS_ZERO = np.float32(0.0)
"""Added where a code not 0 under scale 0, which no honest encoder writes, would give -0."""


def encode(
    values: NDArray[np.float32],
    seed: NDArray[np.uint64],
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    *,
    divisor: np.float32 = _ONE,
    threads: Threads = ONE_THREAD,
) -> bool:
    """Fill `scales` (bf16, one a block) and `codes`, of values / divisor; `seed` is four words.

    False if one of them is not finite or is 2^126 or more.
    """

    def work(start: int, stop: int) -> bool:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        return _encode(values[start:stop], divisor, seed, first, scales[first:last], codes[start:stop])

    return all(threads.over(values.size, work, grain=BLOCK_VALUES))


def encode_parts(
    values: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    parts: NDArray[np.uint8],
    *,
    part_values: int,
    divisor: np.float32 = _ONE,
) -> int:
    """As `encode` of one part after the other, of so many values each, the last of the rest, and a row of `seeds` each.

    Scales and then codes are filled in from the beginning of each one's row of `parts`. How many were encoded before
    one that is refused.
    """
    return int(_encode_parts(values, divisor, seeds, parts, part_values))


def encode_sum(
    terms: "Terms",
    factors: NDArray[np.float32],
    seed: NDArray[np.uint64],
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    *,
    threads: Threads = ONE_THREAD,
) -> bool:
    """As `encode` of the sum of decoded terms * their factors, in their order; no vector of floats is written.

    Each is of the size of what is made, and valid.
    """
    scale_places = terms.places
    code_places = scale_places + np.uint64(2 * scales.size)

    def work(start: int, stop: int) -> bool:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        here = scales[first:last], codes[start:stop]
        return _encode_sum(scale_places, code_places, factors, seed, first, *here)

    return all(threads.over(codes.size, work, grain=BLOCK_VALUES, num_rows=max(1, scale_places.size)))


def add_decoded(
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    factor: np.float32,
    total: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> None:
    """total += decoded * factor, as `robust.add_scaled` does. The input `is_valid`."""

    def work(start: int, stop: int) -> None:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        _add_decoded(scales[first:last], codes[start:stop], factor, total[start:stop])

    threads.over(total.size, work, grain=BLOCK_VALUES)


def decode(
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    values: NDArray[np.float32],
    *,
    threads: Threads = ONE_THREAD,
) -> bool:
    """values = code * scale, exact. False for a scale or code that `encode` never writes."""

    def work(start: int, stop: int) -> bool:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        return _decode(scales[first:last], codes[start:stop], values[start:stop])

    return all(threads.over(values.size, work, grain=BLOCK_VALUES))


def sum_of_squares(
    scales: NDArray[np.uint16], codes: NDArray[np.int8], *, threads: Threads = ONE_THREAD
) -> float | None:
    """`norms.sum_of_squares` of what `decode` gives, which is written nowhere; None for what no encoder writes."""
    sums = np.empty(-(-codes.size // (RUN_BLOCKS * BLOCK_VALUES)), dtype=np.float64)

    def work(start: int, stop: int) -> bool:
        first, last = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
        runs = slice(first // RUN_BLOCKS, -(-last // RUN_BLOCKS))
        return _square_runs(scales[first:last], codes[start:stop], sums[runs])

    valid = all(threads.over(codes.size, work, grain=RUN_BLOCKS * BLOCK_VALUES))
    return norms.halving_sum(sums) if valid else None


def is_valid(scales: NDArray[np.uint16], codes: NDArray[np.int8]) -> bool:
    """Whether every scale and code is one that `encode` writes."""
    return _is_valid(scales, codes)


class Terms:
    """Encoded vectors of one size, each its scales and then its codes."""

    def __init__(self, vectors: Sequence[NDArray[np.uint8]]) -> None:
        """Contiguous, from where a scale may lie."""
        self.places = np.array([vector.ctypes.data for vector in vectors], dtype=np.uint64)
        """Where each begins."""
        self._vectors = vectors
        """There as long as their places are."""

    def are_valid(self, num_values: int) -> NDArray[np.bool_]:
        """`is_valid` of each."""
        found = np.empty(self.places.size, dtype=np.bool_)
        _are_valid(self.places, num_values, found)
        return found


def _pointer_code(typing_context: Any, place: Any) -> tuple[Any, Callable[..., Any]]:
    """The pointer to where an array begins."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


_pointer = cast("Callable[[np.uint64], Any]", intrinsic(_pointer_code))


@compiled
def _encode(
    values: NDArray[np.float32],
    divisor: np.float32,
    seed: NDArray[np.uint64],
    first: int,
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
) -> bool:
    """`values`, over `divisor` if that is not 1, begin with block `first` of their vector."""
    seed_key = key_of_seed(seed)
    largest, factors = np.empty(_TILE_BLOCKS, dtype=np.int32), np.empty(_TILE_BLOCKS, dtype=np.float32)
    keys = np.empty(_TILE_BLOCKS, dtype=np.uint64)
    quotients = np.empty(_TILE_BLOCKS * BLOCK_VALUES, dtype=np.float32)
    num_whole, worst = values.size // BLOCK_VALUES, np.int32(0)
    for tile in range(0, num_whole, _TILE_BLOCKS):
        num_blocks = min(_TILE_BLOCKS, num_whole - tile)
        at, size = tile * BLOCK_VALUES, num_blocks * BLOCK_VALUES
        for i in range(at + _AHEAD_VALUES, at + _AHEAD_VALUES + size, _LINE_VALUES):
            prefetch(values, i)
        here, there, number = scales[tile : tile + num_blocks], codes[at : at + size], first + tile
        if divisor == _ONE:
            found = _encode_tile(values[at : at + size], seed_key, number, here, there, largest, factors, keys)
        else:
            tile_values = values[at : at + size]
            for i in range(tile_values.size):
                quotients[i] = tile_values[i] / divisor
            found = _encode_tile(quotients, seed_key, number, here, there, largest, factors, keys)
        worst = max(worst, found)
    rest = values.size - num_whole * BLOCK_VALUES
    if rest > 0:
        padded, padded_codes = np.zeros(BLOCK_VALUES, dtype=np.float32), np.empty(BLOCK_VALUES, dtype=np.int8)
        for i in range(rest):
            padded[i] = values[num_whole * BLOCK_VALUES + i] / divisor
        number = first + num_whole
        found = _encode_tile(padded, seed_key, number, scales[num_whole:], padded_codes, largest, factors, keys)
        worst = max(worst, found)
        codes[num_whole * BLOCK_VALUES :] = padded_codes[:rest]
    return bool(worst < LIMIT_BITS)


@compiled
def _encode_parts(
    values: NDArray[np.float32],
    divisor: np.float32,
    seeds: NDArray[np.uint64],
    parts: NDArray[np.uint8],
    part_values: int,
) -> int:
    for part in range(len(parts)):
        here = values[part * part_values : (part + 1) * part_values]
        num_blocks = -(-here.size // BLOCK_VALUES)
        scales, codes = parts[part, : 2 * num_blocks], parts[part, 2 * num_blocks : 2 * num_blocks + here.size]
        if not _encode(here, divisor, seeds[part], 0, scales.view(np.uint16), codes.view(np.int8)):
            return part
    return len(parts)


@compiled
def _encode_sum(
    scale_places: NDArray[np.uint64],
    code_places: NDArray[np.uint64],
    factors: NDArray[np.float32],
    seed: NDArray[np.uint64],
    first: int,
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
) -> bool:
    """`scales` and `codes` begin with block `first` of their vector; the places are where those of the terms begin.

    Sums below 2^-126 need not be made zero: their codes are those of zero.
    """
    seed_key = key_of_seed(seed)
    largest, factors_of_tile = np.empty(_TILE_BLOCKS, dtype=np.int32), np.empty(_TILE_BLOCKS, dtype=np.float32)
    keys = np.empty(_TILE_BLOCKS, dtype=np.uint64)
    sums = np.empty(_TILE_BLOCKS * BLOCK_VALUES, dtype=np.float32)
    made = np.empty(_TILE_BLOCKS * BLOCK_VALUES, dtype=np.int8)
    worst = np.int32(0)
    for tile in range(0, scales.size, _TILE_BLOCKS):
        num_blocks, at = min(_TILE_BLOCKS, scales.size - tile), tile * BLOCK_VALUES
        num_values, number = min(num_blocks * BLOCK_VALUES, codes.size - at), first + tile
        sums[:] = _PLUS_ZERO
        for term in range(factors.size):
            their_scales = carray(_pointer(scale_places[term]), (number + num_blocks,), np.uint16)[number:]
            beginning = number * BLOCK_VALUES
            their_codes = carray(_pointer(code_places[term]), (beginning + num_values,), np.int8)[beginning:]
            _add_decoded(their_scales, their_codes, factors[term], sums)
        here = scales[tile : tile + num_blocks]
        worst = max(worst, _encode_tile(sums, seed_key, number, here, made, largest, factors_of_tile, keys))
        codes[at : at + num_values] = made[:num_values]
    return bool(worst < LIMIT_BITS)


@compiled
def _add_decoded(
    scales: NDArray[np.uint16], codes: NDArray[np.int8], factor: np.float32, sums: NDArray[np.float32]
) -> None:
    for block in range(scales.size):
        part = codes[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        here = sums[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        scale = float_of_upper(scales[block])
        for i in range(part.size):
            here[i] = here[i] + np.float32(np.float32(part[i]) * scale + _PLUS_ZERO) * factor


@inlined
def _encode_tile(
    values: NDArray[np.float32],
    seed_key: np.uint64,
    first: int,
    scales: NDArray[np.uint16],
    codes: NDArray[np.int8],
    largest: NDArray[np.int32],
    factors: NDArray[np.float32],
    keys: NDArray[np.uint64],
) -> np.int32:
    """Whole blocks, as many as there are scales, from block `first` of their vector on; the largest magnitude's bits.

    The last three are for it to work in.
    """
    # Indices are unsigned: one that might be negative keeps a loop from being vectorised.
    bits = values.view(np.int32)
    worst = np.int32(0)
    for j in range(scales.size):
        at = np.uint64(j) * _U128
        magnitude = np.int32(0)
        for i in range(BLOCK_VALUES):
            magnitude = max(magnitude, np.int32(bits[at + np.uint64(i)] & MAGNITUDE))
        largest[j] = magnitude
    for j in range(scales.size):
        worst = max(worst, largest[j])
        exact_scale = float_of(largest[j]) / np.float32(127.0)
        is_zero = exact_scale < _SMALLEST
        upper = np.int32(np.int32(bits_of(exact_scale) + np.int32(0xFFFF)) >> np.int32(16))
        scale = np.int32(0) if is_zero else upper
        scales[j] = np.uint16(scale)
        factors[j] = np.float32(0.0) if is_zero else _POINT / float_of(np.int32(scale << np.int32(16)))
        keys[j] = mix64(seed_key + np.uint64(first + j) * np.uint64(0x9E3779B97F4A7C15))
    for j in range(scales.size):
        at = np.uint64(j) * _U128
        middle = at + _U64
        factor = factors[j]
        low = np.uint32(keys[j] & np.uint64(0xFFFFFFFF))
        high = np.uint32(keys[j] >> np.uint64(32))
        for i in range(_HALF_BLOCK):
            # value / scale in steps of 2^-15. Added to 1.5 * 2^23 it is rounded to whole steps, which then are
            # the sum's lower bits; an extreme value, 127 but for the factor's rounding, becomes 127 again. Bits
            # 15 to 22 hold code + 128: a whole code plus chance never reaches the next one.
            one = bits_of(np.float32(values[at + np.uint64(i)] * factor) + _WHOLE)
            two = bits_of(np.float32(values[middle + np.uint64(i)] * factor) + _WHOLE)
            chance = draw(i, low, high)
            one = np.int32(np.int32(one + np.int32(chance >> np.uint32(17))) >> np.int32(15))
            two = np.int32(np.int32(two + np.int32(chance & np.uint32(0x7FFF))) >> np.int32(15))
            codes[at + np.uint64(i)] = np.int8(one ^ _ZERO_CODE)
            codes[middle + np.uint64(i)] = np.int8(two ^ _ZERO_CODE)
    return worst


@compiled
def _is_valid(scales: NDArray[np.uint16], codes: NDArray[np.int8]) -> bool:
    valid = True
    for block in range(scales.size):
        bits = scales[block]
        valid &= bits == 0 or (bits >= SMALLEST_SCALE and bits <= LARGEST_SCALE)
    smallest = np.int8(0)
    for i in range(codes.size):
        smallest = min(smallest, codes[i])
    return bool(valid and smallest > -128)


@compiled
def _are_valid(places: NDArray[np.uint64], num_values: int, found: NDArray[np.bool_]) -> None:
    num_blocks = -(-num_values // BLOCK_VALUES)
    for term in range(places.size):
        scales = carray(_pointer(places[term]), (num_blocks,), np.uint16)
        codes = carray(_pointer(places[term] + np.uint64(2 * num_blocks)), (num_values,), np.int8)
        found[term] = _is_valid(scales, codes)


@compiled
def _decode(scales: NDArray[np.uint16], codes: NDArray[np.int8], values: NDArray[np.float32]) -> bool:
    valid = True
    smallest = np.int8(0)
    for block in range(scales.size):
        bits = scales[block]
        valid &= bits == 0 or (bits >= SMALLEST_SCALE and bits <= LARGEST_SCALE)
        part = codes[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        out = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        scale = float_of_upper(bits)
        for i in range(part.size):
            smallest = min(smallest, part[i])
            out[i] = np.float32(part[i]) * scale + _PLUS_ZERO
    return bool(valid and smallest > -128)


@compiled
def _square_runs(scales: NDArray[np.uint16], codes: NDArray[np.int8], sums: NDArray[np.float64]) -> bool:
    valid = True
    part = np.empty(RUN_BLOCKS * BLOCK_VALUES, dtype=np.float32)
    scratch = np.empty(norms.RUN_VALUES // 8, dtype=np.float64)
    for run in range(sums.size):
        blocks = slice(run * RUN_BLOCKS, min((run + 1) * RUN_BLOCKS, scales.size))
        start, stop = run * part.size, min((run + 1) * part.size, codes.size)
        valid &= _decode(scales[blocks], codes[start:stop], part)
        part[stop - start :] = _PLUS_ZERO
        sums[run] = norms.square_of_run(part, scratch)
    return valid
