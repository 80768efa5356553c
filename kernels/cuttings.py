"""A text cut where classes of its characters say so, each cutting looked up among known ones; and ids put end to end.

A cut is between two characters, the last of one cutting and the first of the next,

* after a WORD character, before an ASCII one that is none; before an apostrophe only where something of ASCII follows
  that begins no contraction,
* after two MARKs, or a SPACE and a MARK, before a LETTER,
* after a BLANK, before a space that something visible follows, no digit.

Known cuttings are a hash table with open addressing: slots that hold a number or -1, at least one of them -1, as many
as a power of two; and of each number its hash, its bytes in `keys` and where they end. Slots may hold numbers that are
not among these keys, as where another thread is entering more: they are passed over.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled, inlined

WORD, LETTER, ASCII, MARK, SPACE, BLANK, CONTRACTION = (np.uint8(1 << bit) for bit in range(7))
"""Classes of a character. ASCII: of those that are no WORD. CONTRACTION: what one may begin with, of ASCII."""

_APOSTROPHE, _SPACE = np.uint8(0x27), np.uint8(0x20)
_BASIS, _PRIME, _HIGH = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3), np.uint64(32)

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int32]
Places = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@compiled
def cut(
    text: Bytes,
    classes: Bytes,
    slots: Numbers,
    hashes: Hashes,
    key_ends: Places,
    keys: Bytes,
    ends: Places,
    which: Numbers,
) -> int:
    """How many cuttings there are of a text in UTF-8; where each ends into `ends`, its number or -1 into `which`.

    `classes` are of the first code points; all others have none. `ends` and `which` have room for each byte.
    """
    count, start, at = 0, 0, 0
    before, last = np.uint8(0), np.uint8(0)
    while at < text.size:
        first = text[at]
        width, own = 1, np.uint8(0)
        if first < 0x80:
            own = classes[first]
        elif first < 0xE0:
            width = 2
            code = (np.int64(first & 0x1F) << 6) | np.int64(text[at + 1] & 0x3F)
            if code < classes.size:
                own = classes[code]
        else:
            width = 3 if first < 0xF0 else 4
        if at > start and _is_cut(text, classes, at, before, last, own):
            ends[count] = at
            which[count] = _number_of(text, start, at, slots, hashes, key_ends, keys)
            count += 1
            start = at
        before, last = last, own
        at += width
    if at > start:
        ends[count] = at
        which[count] = _number_of(text, start, at, slots, hashes, key_ends, keys)
        count += 1
    return count


@compiled
def numbers_of(
    cuttings: Bytes,
    cutting_ends: Places,
    slots: Numbers,
    hashes: Hashes,
    key_ends: Places,
    keys: Bytes,
    which: Numbers,
) -> None:
    """The number of each cutting, or -1, into `which`."""
    start = 0
    for i in range(cutting_ends.size):
        stop = cutting_ends[i]
        which[i] = _number_of(cuttings, start, stop, slots, hashes, key_ends, keys)
        start = stop


@compiled
def remember(keys: Bytes, key_ends: Places, first: int, hashes: Hashes, slots: Numbers) -> None:
    """Keys from number `first` on into the slots, and their hashes. None of them is there, and no two are equal."""
    mask = np.int64(slots.size - 1)
    for number in range(first, key_ends.size):
        found = _hash_of(keys, key_ends[number - 1] if number else 0, key_ends[number])
        hashes[number] = found
        slot = np.int64(found ^ (found >> _HIGH)) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = number


@compiled
def joined(which: Numbers, id_ends: Places, ids: Numbers, out: Numbers) -> None:
    """The ids of each number, end to end."""
    at = 0
    for number in which:
        for place in range(id_ends[number - 1] if number else 0, id_ends[number]):
            out[at] = ids[place]
            at += 1


@inlined
def _is_cut(text: Bytes, classes: Bytes, at: int, before: np.uint8, last: np.uint8, own: np.uint8) -> bool:
    first = text[at]
    if last & WORD and own & ASCII:
        if first != _APOSTROPHE:
            return True
        return at + 1 < text.size and text[at + 1] < 0x80 and not classes[text[at + 1]] & CONTRACTION
    if own & LETTER:
        return bool(last & MARK and before & (MARK | SPACE))
    if first != _SPACE or not last & BLANK or at + 1 >= text.size:
        return False
    after = text[at + 1]
    return 0x20 < after < 0x7F and not 0x30 <= after < 0x3A


@inlined
def _hash_of(text: Bytes, start: int, stop: int) -> np.uint64:
    """FNV-1a, in 64 bits."""
    found = _BASIS
    for place in range(start, stop):
        found = (found ^ np.uint64(text[place])) * _PRIME
    return found


@inlined
def _number_of(
    text: Bytes, start: int, stop: int, slots: Numbers, hashes: Hashes, key_ends: Places, keys: Bytes
) -> int:
    mask, found = np.int64(slots.size - 1), _hash_of(text, start, stop)
    slot = np.int64(found ^ (found >> _HIGH)) & mask
    while slots[slot] >= 0:
        number = slots[slot]
        if number < key_ends.size and hashes[number] == found:
            first = key_ends[number - 1] if number else 0
            if key_ends[number] - first == stop - start:
                same = 0
                while same < stop - start and keys[first + same] == text[start + same]:
                    same += 1
                if same == stop - start:
                    return int(number)
        slot = (slot + 1) & mask
    return -1
