"""This is where activations become int4 codes, token by token, in blocks of at most 32 values with a bf16 scale each.

As in `kernels.int8_tokens` each token's few largest magnitudes are put aside in bf16 first: for them (index, value) is
kept, and their code is 0. scale = largest of the rest / 7, rounded up to bf16; codes -7..7 are rounded to nearest even.
Values 2i and 2i + 1 of a token are the low and the high half of its byte i, in two's complement.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled

BLOCK_VALUES = 32
LIMIT_BITS = np.int32(0x7E800000)
"""Bits of 2^126: magnitudes are below it."""
LARGEST_SCALE = np.uint16(0x7D13)
"""bf16 bits of 2^126 / 7, rounded up."""
SMALLEST_SCALE = np.uint16(0x0080)
"""bf16 bits of 2^-126. A block whose scale would be smaller is written as zeros, with scale 0."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.float32(2.0**-126)
_ROUND = np.float32(1.5 * 2**23)


def num_outliers(width: int) -> int:
    """Values put aside in a token of `width` values: 4, and one more for every 256."""
    return min(width, 4 + width // 256)


@compiled
def _float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@compiled
def _bits_of(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@compiled
def _largest(bits: NDArray[np.int32]) -> np.int32:
    """Largest magnitude; -1 stands for a value put aside and is none."""
    largest = np.int32(-1)
    for i in range(bits.size):
        magnitude = np.int32(-1) if bits[i] == -1 else np.int32(bits[i] & _MAGNITUDE)
        largest = max(largest, magnitude)
    return largest


@compiled
def encode(
    rows_TD: NDArray[np.float32],
    scales_TK: NDArray[np.uint16],
    outliers_TJ: NDArray[np.uint16],
    indices_TJ: NDArray[np.uint16],
    packed_TH: NDArray[np.uint8],
) -> bool:
    """Fill the outputs (K blocks, J outliers, H half as many bytes as values a token, rounded up).

    False if a value is not finite or is 2^126 or more. Outliers stand in falling order of magnitude, equal ones in
    order of index.
    """
    num_tokens, width = rows_TD.shape
    num_blocks = scales_TK.shape[1]
    row = np.empty(width, dtype=np.float32)
    bits = row.view(np.int32)
    largest = np.empty(num_blocks, dtype=np.int32)
    codes = np.zeros(BLOCK_VALUES, dtype=np.uint8)
    for token in range(num_tokens):
        row[:] = rows_TD[token]
        for i in range(width):
            if np.int32(bits[i] & _MAGNITUDE) >= LIMIT_BITS:
                return False
        for block in range(num_blocks):
            largest[block] = _largest(bits[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES])
        for place in range(outliers_TJ.shape[1]):
            block = 0
            for other in range(1, num_blocks):
                if largest[other] > largest[block]:
                    block = other
            index = block * BLOCK_VALUES
            while bits[index] == -1 or np.int32(bits[index] & _MAGNITUDE) != largest[block]:
                index += 1
            outlier = bits[index]
            even = np.int32(np.int32(outlier >> np.int32(16)) & np.int32(1))
            rounded = np.int32(np.int32(np.int32(outlier + np.int32(0x7FFF)) + even) >> np.int32(16))
            normal = np.int32(outlier & _MAGNITUDE) >= np.int32(0x00800000)
            outliers_TJ[token, place] = np.uint16(rounded) if normal else np.uint16(0)
            indices_TJ[token, place] = index
            bits[index] = np.int32(-1)
            largest[block] = _largest(bits[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES])
        for place in range(indices_TJ.shape[1]):
            row[indices_TJ[token, place]] = np.float32(0.0)
        for block in range(num_blocks):
            part = row[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
            out = packed_TH[token, block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
            exact_scale = _float_of(max(np.int32(largest[block]), np.int32(0))) / np.float32(7.0)
            if exact_scale < _SMALLEST:
                scales_TK[token, block] = 0
                out[:] = 0
                continue
            scale = np.uint16(np.int32(_bits_of(exact_scale) + np.int32(0xFFFF)) >> np.int32(16))
            scales_TK[token, block] = scale
            inverse = np.float32(1.0) / _float_of(np.int32(np.int32(scale) << np.int32(16)))
            codes[part.size :] = 0
            for i in range(part.size):
                # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to a whole number.
                whole = np.float32(np.float32(np.float32(part[i] * inverse) + _ROUND) - _ROUND)
                codes[i] = np.uint8(np.int32(whole) & np.int32(15))
            for i in range(out.size):
                out[i] = np.uint8(codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4)))
    return True


@compiled
def decode(
    scales_TK: NDArray[np.uint16],
    outliers_TJ: NDArray[np.uint16],
    indices_TJ: NDArray[np.uint16],
    packed_TH: NDArray[np.uint8],
    rows_TD: NDArray[np.float32],
) -> bool:
    """code * scale, exact, then the outliers in their places. False for what `encode` never writes.

    That is a scale, a code or an index out of range, the code of an outlier that is not 0 (so no index twice, were it
    not for zeros), a code where the scale is 0, and a half past the last value that is not 0.
    """
    num_tokens, width = rows_TD.shape
    for token in range(num_tokens):
        for block in range(scales_TK.shape[1]):
            bits = scales_TK[token, block]
            part = packed_TH[token, block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
            out = rows_TD[token, block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
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
            for i in range(out.size):
                half = np.int32(part[i // 2]) >> np.int32(4 * (i % 2))
                code = np.int32(np.int32((half & np.int32(15)) ^ np.int32(8)) - np.int32(8))
                smallest = min(smallest, code)
                out[i] = np.float32(code) * scale
            if smallest == -8 or (out.size % 2 and part[part.size - 1] >> np.uint8(4) != 0):
                return False
        for place in range(indices_TJ.shape[1]):
            index = indices_TJ[token, place]
            outlier = np.int32(np.int32(outliers_TJ[token, place]) << np.int32(16))
            magnitude = np.int32(outlier & _MAGNITUDE)
            if index >= width or magnitude > LIMIT_BITS or rows_TD[token, index] != np.float32(0.0):
                return False
            rows_TD[token, index] = _float_of(outlier) if magnitude >= 0x00800000 else np.float32(0.0)
    return True
