"""A token's few largest magnitudes, put aside in bf16 before its other values are encoded.

Real checkpoints have a few dimensions hundreds of times larger than the rest; in one block with them, other
values would all round to zero. For them (index, value) is kept, and their code is 0.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import LIMIT_BITS, MAGNITUDE, float_of, largest_magnitude
from kernels.compiled import compiled

_ZERO = np.float32(0.0)
_TAKEN = np.float32(1.0)
"""Stands where an outlier goes, until it is seen that no two go to one place."""
_SMALLEST_NORMAL = np.int32(0x00800000)


def num_outliers(width: int) -> int:
    """Values put aside in a token of `width` values: 4, and one more for every 256."""
    return min(width, 4 + width // 256)


@compiled
def put_aside(
    row: NDArray[np.float32],
    block_values: int,
    largest: NDArray[np.int32],
    outliers: NDArray[np.uint16],
    indices: NDArray[np.uint16],
) -> bool:
    """Outliers in falling order of magnitude, equal ones in order of index; zeros are left in their places in `row`.

    `largest` gets the bits of each block's largest magnitude that is left. False if a value is not finite or is 2^126
    or more.
    """
    bits = row.view(np.int32)
    for block in range(largest.size):
        largest[block] = largest_magnitude(bits[block * block_values : (block + 1) * block_values])
        if largest[block] >= LIMIT_BITS:
            return False
    for place in range(outliers.size):
        block = 0
        for other in range(1, largest.size):
            if largest[other] > largest[block]:
                block = other
        index = block * block_values
        while np.int32(bits[index] & MAGNITUDE) != largest[block]:
            index += 1
        outlier = bits[index]
        even = np.int32(np.int32(outlier >> np.int32(16)) & np.int32(1))
        rounded = np.int32(np.int32(np.int32(outlier + np.int32(0x7FFF)) + even) >> np.int32(16))
        normal = np.int32(outlier & MAGNITUDE) >= _SMALLEST_NORMAL
        outliers[place] = np.uint16(rounded) if normal else np.uint16(0)
        indices[place] = index
        # -1 is never a magnitude: a value put aside is not found again, even among zeros.
        bits[index] = np.int32(-1)
        part = bits[block * block_values : (block + 1) * block_values]
        largest[block] = np.int32(-1)
        for i in range(part.size):
            magnitude = np.int32(-1) if part[i] == -1 else np.int32(part[i] & MAGNITUDE)
            largest[block] = max(largest[block], magnitude)
    for place in range(indices.size):
        row[indices[place]] = _ZERO
    for block in range(largest.size):
        largest[block] = max(largest[block], np.int32(0))
    return True


@compiled
def put_back(outliers: NDArray[np.uint16], indices: NDArray[np.uint16], row: NDArray[np.float32]) -> bool:
    """Outliers in their places. False for one out of range, an index twice, or a place where something else stands."""
    for place in range(indices.size):
        index = indices[place]
        magnitude = np.int32(np.int32(np.int32(outliers[place]) << np.int32(16)) & MAGNITUDE)
        if index >= row.size or magnitude > LIMIT_BITS or row[index] != _ZERO:
            return False
        row[index] = _TAKEN
    for place in range(indices.size):
        outlier = np.int32(np.int32(outliers[place]) << np.int32(16))
        normal = np.int32(outlier & MAGNITUDE) >= _SMALLEST_NORMAL
        row[indices[place]] = float_of(outlier) if normal else _ZERO
    return True
