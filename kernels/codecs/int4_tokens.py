"""Activations as int4 codes, token by token, in blocks of at most 32 values with a bf16 scale each, but for outliers.

scale = largest magnitude that is no outlier / 7, rounded up to bf16; codes -7..7 are rounded to nearest even.
Values 2i and 2i + 1 of a token are the low and the high half of its byte i, in two's complement.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import SMALLEST_SCALE, float_of_upper, scale_of
from kernels.codecs.outliers import put_aside, put_back
from kernels.compiled import compiled

BLOCK_VALUES = 32
LARGEST_SCALE = np.uint16(0x7D13)
"""bf16 bits of 2^126 / 7, rounded up."""

_LARGEST_CODE = np.float32(7.0)
_ROUND = np.float32(1.5 * 2**23)


@compiled
def encode(
    rows_TD: NDArray[np.float32],
    scales_TK: NDArray[np.uint16],
    outliers_TJ: NDArray[np.uint16],
    indices_TJ: NDArray[np.uint16],
    packed_TH: NDArray[np.uint8],
) -> bool:
    """Fill the outputs (K blocks, J outliers, H half as many bytes as values a token, rounded up).

    False if a value is not finite or is 2^126 or more.
    """
    num_tokens, width = rows_TD.shape
    row = np.empty(width, dtype=np.float32)
    largest = np.empty(scales_TK.shape[1], dtype=np.int32)
    codes = np.zeros(BLOCK_VALUES, dtype=np.uint8)
    for token in range(num_tokens):
        row[:] = rows_TD[token]
        if not put_aside(row, BLOCK_VALUES, largest, outliers_TJ[token], indices_TJ[token]):
            return False
        for block in range(largest.size):
            part = row[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
            out = packed_TH[token, block * (BLOCK_VALUES // 2) : (block + 1) * (BLOCK_VALUES // 2)]
            scale = scale_of(largest[block], _LARGEST_CODE)
            scales_TK[token, block] = scale
            if scale == 0:
                out[:] = 0
                continue
            inverse = np.float32(1.0) / float_of_upper(scale)
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

    That is a scale, a code or an index out of range, an index twice, the code of an outlier that is not 0, a code where
    the scale is 0, and a half past the last value that is not 0.
    """
    for token in range(rows_TD.shape[0]):
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
            scale = float_of_upper(bits)
            smallest = np.int32(0)
            for i in range(out.size):
                half = np.int32(part[i // 2]) >> np.int32(4 * (i % 2))
                code = np.int32(np.int32((half & np.int32(15)) ^ np.int32(8)) - np.int32(8))
                smallest = min(smallest, code)
                out[i] = np.float32(code) * scale
            if smallest == -8 or (out.size % 2 and part[part.size - 1] >> np.uint8(4) != 0):
                return False
        if not put_back(outliers_TJ[token], indices_TJ[token], rows_TD[token]):
            return False
    return True
