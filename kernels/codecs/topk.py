"""The largest values of a vector: of each chunk of 4096 three in eight, marked by a bit.

Chosen are the largest magnitudes, of equal ones those that come first; a chunk's count is exact, so a vector's bytes
are known from its length. Bit i % 8 of byte i // 8 stands for value i. The values themselves go on in order, as
`codecs.int4_blocks` codes; what is not chosen is owed (`swarm.averaging.error_feedback`).

Which of the values are chosen is as good as chance: where a branch would ask, a processor guesses wrong every third
time, so loops here write always and step on by 0 or 1.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.bits import LIMIT_BITS, MAGNITUDE
from kernels.compiled import compiled

CHUNK_VALUES = 4096
CHOSEN, OF = 3, 8
"""So many values of so many are chosen, rounded up in the last chunk."""


def num_chosen(num_values: int) -> int:
    return -(-num_values * CHOSEN // OF)


@compiled
def _bound(magnitudes: NDArray[np.int32], largest: np.int32, wanted: int) -> tuple[np.int32, np.uint32]:
    """(bits of a magnitude, how many of exactly that magnitude to choose): all above it are chosen besides.

    By halving, until so many as are wanted are at or above the bound, or it is the `wanted`th largest magnitude.
    """
    low, high = np.int32(0), np.int32(largest + np.int32(1))
    above = np.int32(0)
    while high - low > 1:
        middle = np.int32(low + (high - low) // np.int32(2))
        count = np.int32(0)
        for i in range(magnitudes.size):
            count += np.int32(magnitudes[i] >= middle)
        if count == wanted:
            return middle, np.uint32(count)
        if count > wanted:
            low = middle
        else:
            high, above = middle, count
    return low, np.uint32(wanted - above)


@compiled
def select(values: NDArray[np.float32], marks: NDArray[np.uint8], chosen: NDArray[np.float32]) -> bool:
    """Fill `marks` (a bit a value, zero past the end) and `chosen` (`num_chosen` values, in order).

    False if a value is not finite or is 2^126 or more.
    """
    held = np.empty(CHUNK_VALUES, dtype=np.float32)
    magnitudes = np.empty(CHUNK_VALUES, dtype=np.int32)
    found = np.empty(CHUNK_VALUES + 1, dtype=np.float32)
    at = 0
    for start in range(0, values.size, CHUNK_VALUES):
        size = min(CHUNK_VALUES, values.size - start)
        held[:size] = values[start : start + size]
        held[size:] = np.float32(0.0)  # after all zeros that are equally small, and so never chosen
        bits = held.view(np.int32)
        largest = np.int32(0)
        for i in range(CHUNK_VALUES):
            magnitudes[i] = np.int32(bits[i] & MAGNITUDE)
            largest = max(largest, magnitudes[i])
        if largest >= LIMIT_BITS:
            return False
        wanted = (size * CHOSEN + OF - 1) // OF
        bound, num_equal = _bound(magnitudes[:size], largest, wanted)
        num_found = np.uint64(0)
        for byte in range((size + 7) // 8):
            mark = np.uint32(0)
            for bit in range(8):
                place = np.uint64(8 * byte + bit)
                is_equal = np.uint32(magnitudes[place] == bound) & np.uint32(num_equal > np.uint32(0))
                is_chosen = np.uint32(np.uint32(magnitudes[place] > bound) | is_equal)
                num_equal = np.uint32(num_equal - is_equal)
                found[num_found] = held[place]
                num_found += np.uint64(is_chosen)
                mark = np.uint32(mark | (is_chosen << np.uint32(bit)))
            marks[start // 8 + byte] = np.uint8(mark)
        chosen[at : at + wanted] = found[:wanted]
        at += wanted
    return True


@compiled
def is_valid(marks: NDArray[np.uint8], num_values: int) -> bool:
    """Whether `select` writes such marks: as many in each chunk as it chooses, none past the end."""
    for start in range(0, num_values, CHUNK_VALUES):
        size = min(CHUNK_VALUES, num_values - start)
        part = marks[start // 8 : (start + size + 7) // 8]
        num_marked = np.int32(0)
        for i in range(part.size):
            # Bits of a byte, counted in pairs, fours and eights.
            byte = np.int32(part[i])
            byte = np.int32(byte - ((byte >> np.int32(1)) & np.int32(0x55)))
            byte = np.int32((byte & np.int32(0x33)) + ((byte >> np.int32(2)) & np.int32(0x33)))
            num_marked += np.int32((byte + (byte >> np.int32(4))) & np.int32(0x0F))
        if num_marked != (size * CHOSEN + OF - 1) // OF:
            return False
    past_end = num_values % 8
    return past_end == 0 or marks[marks.size - 1] >> np.uint8(past_end) == 0


@compiled
def scatter(marks: NDArray[np.uint8], chosen: NDArray[np.float32], values: NDArray[np.float32]) -> bool:
    """The chosen values in their places, 0 elsewhere. False for marks that `select` never writes."""
    if not is_valid(marks, values.size):
        return False
    bits, out = chosen.view(np.uint32), values.view(np.uint32)
    at, last = np.uint64(0), np.uint64(max(0, chosen.size - 1))
    whole = values.size // 8
    for byte in range(whole):
        mark = np.uint32(marks[byte])
        for bit in range(8):
            is_chosen = np.uint32((mark >> np.uint32(bit)) & np.uint32(1))
            out[np.uint64(8 * byte + bit)] = bits[min(at, last)] & np.uint32(np.uint32(0) - is_chosen)
            at += np.uint64(is_chosen)
    for i in range(8 * whole, values.size):
        is_chosen = np.uint32((np.uint32(marks[whole]) >> np.uint32(i - 8 * whole)) & np.uint32(1))
        out[i] = bits[min(at, last)] & np.uint32(np.uint32(0) - is_chosen)
        at += np.uint64(is_chosen)
    return True
