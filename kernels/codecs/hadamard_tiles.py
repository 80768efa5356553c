"""Tiles of a token turned by a Hadamard matrix where that makes their step smaller: what stands out is spread over all.

A tile is one of int4's blocks, 32 values. Turned, it is H x / 32, and H of that is x again; the step of its codes
weighs sqrt(32) times as much in x. So it is turned where its largest magnitude times sqrt(32) is below what it was. A
tile stays as it is that holds a value which goes aside, that is shorter, or whose largest magnitude is below 2^-60 or
not below 2^60.

All sums are of two numbers and exact halves, in one order; of nothing below 2^-90, so none is below 2^-126 but 0.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import float_of
from kernels.codecs.int4_tokens import BLOCK_VALUES as TILE_VALUES
from kernels.codecs.outliers import num_outliers, put_aside
from kernels.compiled import compiled

GAIN = np.float32(32**0.5)
SMALLEST_SCALE = np.uint16(0x1D80)
"""bf16 bits of 2^-68, which is below 2^-60 / 32 / 7."""
LARGEST_SCALE = np.uint16(0x5C80)
"""bf16 bits of 2^58, which is above 2^60 / 7."""

_SMALLEST = np.float32(2.0**-60)
_LARGEST = np.float32(2.0**60)
_NOTHING = np.float32(2.0**-90)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_WHOLE = np.float32(1.0)


def turn(rows_TD: NDArray[np.float32], turned_TD: NDArray[np.float32], is_turned_TK: NDArray[np.uint8]) -> bool:
    """Fill the outputs: rows with some tiles turned, and 1 for each such tile of a token's K.

    False if a value is not finite or is 2^126 or more.
    """
    return bool(_turn(rows_TD, num_outliers(rows_TD.shape[1]), turned_TD, is_turned_TK))


@compiled
def _turn(
    rows_TD: NDArray[np.float32],
    num_aside: int,
    turned_TD: NDArray[np.float32],
    is_turned_TK: NDArray[np.uint8],
) -> bool:
    num_tokens, width = rows_TD.shape
    row = np.empty(width, dtype=np.float32)
    tile = np.empty(TILE_VALUES, dtype=np.float32)
    largest = np.empty(is_turned_TK.shape[1], dtype=np.int32)
    outliers = np.empty(num_aside, dtype=np.uint16)
    indices = np.empty(num_aside, dtype=np.uint16)
    stays = np.empty(is_turned_TK.shape[1], dtype=np.bool_)
    for token in range(num_tokens):
        row[:] = rows_TD[token]
        if not put_aside(row, TILE_VALUES, largest, outliers, indices):
            return False
        turned_TD[token] = rows_TD[token]
        is_turned_TK[token] = np.uint8(0)
        stays[:] = False
        for place in range(num_aside):
            stays[indices[place] // TILE_VALUES] = True
        for block in range(width // TILE_VALUES):
            most = float_of(largest[block])
            if stays[block] or most < _SMALLEST or most >= _LARGEST:
                continue
            start = block * TILE_VALUES
            for i in range(TILE_VALUES):
                value = row[start + i]
                tile[i] = value if abs(value) >= _NOTHING else _ZERO
            _spread(tile, _HALF)
            found = _ZERO
            for i in range(TILE_VALUES):
                found = max(found, abs(tile[i]))
            if np.float32(found * GAIN) < most:
                turned_TD[token, start : start + TILE_VALUES] = tile
                is_turned_TK[token, block] = np.uint8(1)
    return True


@compiled
def turn_back(
    scales_TK: NDArray[np.uint16],
    is_turned_TK: NDArray[np.uint8],
    indices_TJ: NDArray[np.uint16],
    rows_TD: NDArray[np.float32],
) -> bool:
    """Codes times scales, in turned tiles, to values: exact, for sums of 32 codes times a bf16 scale have 16 places.

    `indices_TJ` lie within the rows. False for a turned tile that `turn` never makes: shorter, with a value that went
    aside, or with a scale out of range.
    """
    tile = np.empty(TILE_VALUES, dtype=np.float32)
    for token in range(rows_TD.shape[0]):
        for place in range(indices_TJ.shape[1]):
            if is_turned_TK[token, indices_TJ[token, place] // TILE_VALUES] != 0:
                return False
        for block in range(is_turned_TK.shape[1]):
            if is_turned_TK[token, block] == 0:
                continue
            scale = scales_TK[token, block]
            part = rows_TD[token, block * TILE_VALUES : (block + 1) * TILE_VALUES]
            if part.size < TILE_VALUES or scale < SMALLEST_SCALE or scale > LARGEST_SCALE:
                return False
            tile[:] = part
            _spread(tile, _WHOLE)
            part[:] = tile
    return True


@compiled
def turn_orthonormal(is_turned_TK: NDArray[np.uint8], rows_TD: NDArray[np.float32]) -> None:
    """Those tiles times H / sqrt(32), in place: lengths stay as they are. The last tile, if it is shorter, is not."""
    tile = np.empty(TILE_VALUES, dtype=np.float32)
    for token in range(rows_TD.shape[0]):
        for block in range(rows_TD.shape[1] // TILE_VALUES):
            if is_turned_TK[token, block] != 0:
                part = rows_TD[token, block * TILE_VALUES : (block + 1) * TILE_VALUES]
                tile[:] = part
                _spread(tile, _HALF)
                for i in range(TILE_VALUES):
                    part[i] = tile[i] * GAIN


@compiled
def _spread(tile: NDArray[np.float32], factor: np.float32) -> None:
    """H (Sylvester's, in natural order), times the factor five times."""
    span = 1
    while span < TILE_VALUES:
        for start in range(0, TILE_VALUES, 2 * span):
            for i in range(start, start + span):
                one, other = tile[i], tile[i + span]
                tile[i] = np.float32(np.float32(one + other) * factor)
                tile[i + span] = np.float32(np.float32(one - other) * factor)
        span *= 2
