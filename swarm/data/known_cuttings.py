"""Cuttings of texts whose ids are known, found by a kernel: what several threads read while one of them learns more."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels import cuttings as kernel

Numbers = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

_FEWEST_SLOTS = 1 << 16


class CutText(NamedTuple):
    """A text in UTF-8, where its cuttings end, and the number of each, or -1."""

    text: bytes
    ends: Places
    which: Numbers

    def cuttings(self) -> list[bytes]:
        """All of them, in order."""
        return _parts(self.text, np.append(0, self.ends)[:-1], self.ends)

    def unknown(self) -> list[bytes]:
        """Those without a number, in order."""
        (places,) = np.nonzero(self.which < 0)
        return _parts(self.text, np.where(places > 0, self.ends[places - 1], 0), self.ends[places])


@dataclass(frozen=True, eq=False)
class KnownCuttings:
    """Numbers from 0 on, each with a cutting and its ids.

    `more` gives one in which each number means the same, and leaves this one as it is for whoever reads it.
    """

    slots: Numbers = field(default_factory=lambda: np.full(_FEWEST_SLOTS, -1, np.int32))
    """Shared with what came of this: a number past the end is of those, and the kernel passes it over."""
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    key_ends: Places = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    id_ends: Places = field(default_factory=lambda: np.zeros(0, np.int64))
    ids: Numbers = field(default_factory=lambda: np.zeros(0, np.int32))
    forebear: object = field(default_factory=object)
    """The same for all that came of one: their numbers mean the same."""

    def __len__(self) -> int:
        return len(self.key_ends)

    def cut(self, text: bytes, classes: npt.NDArray[np.uint8]) -> CutText:
        """Takes 12 bytes of memory for each byte of the text, for as long as it lasts."""
        ends, which = np.empty(len(text), np.int64), np.empty(len(text), np.int32)
        table = self.slots, self.hashes, self.key_ends, self.keys
        count = kernel.cut(np.frombuffer(text, np.uint8), classes, *table, ends, which)
        return CutText(text, ends[:count].copy(), which[:count].copy())

    def numbers_of(self, cuttings: Sequence[bytes]) -> Numbers:
        """Of each, or -1."""
        ends, which = np.cumsum(_sizes(cuttings)), np.empty(len(cuttings), np.int32)
        table = self.slots, self.hashes, self.key_ends, self.keys
        kernel.numbers_of(np.frombuffer(b"".join(cuttings), np.uint8), ends, *table, which)
        return which

    def more(self, cuttings: Sequence[bytes], counts: Places, ids: Numbers) -> "KnownCuttings":
        """With these too, which differ and are unknown: how many ids each has, and all ids end to end."""
        key_ends = np.concatenate([self.key_ends, _last(self.key_ends) + np.cumsum(_sizes(cuttings))])
        known, first, slots = len(key_ends), len(self), self.slots
        if 2 * known > len(slots):
            first, slots = 0, np.full(1 << (4 * known).bit_length(), -1, np.int32)
        found = KnownCuttings(
            slots=slots,
            hashes=np.concatenate([self.hashes, np.zeros(len(cuttings), np.uint64)]),
            key_ends=key_ends,
            keys=np.concatenate([self.keys, np.frombuffer(b"".join(cuttings), np.uint8)]),
            id_ends=np.concatenate([self.id_ends, _last(self.id_ends) + np.cumsum(counts)]),
            ids=np.concatenate([self.ids, ids]),
            forebear=self.forebear,
        )
        kernel.remember(found.keys, found.key_ends, first, found.hashes, slots)
        return found

    def ids_of(self, which: Numbers) -> Numbers:
        """Of these numbers, end to end."""
        starts = np.where(which > 0, self.id_ends[which - 1], 0)
        out = np.empty(int((self.id_ends[which] - starts).sum()), np.int32)
        kernel.joined(which, self.id_ends, self.ids, out)
        return out


def _parts(text: bytes, starts: Places, ends: Places) -> list[bytes]:
    return [text[start:stop] for start, stop in zip(starts.tolist(), ends.tolist(), strict=True)]


def _sizes(cuttings: Sequence[bytes]) -> Places:
    return np.fromiter(map(len, cuttings), np.int64, len(cuttings))


def _last(ends: Places) -> int:
    return int(ends[-1]) if len(ends) else 0
