"""The run's data order: which tokens a microbatch id holds, as a pure function.

The training tokens are cut into *slices*, a MiB each where there is enough, and all slices of the set are permuted anew
in each pass over it ("lap"). In a mixture each source's slices are, and its weight says how many of each cycle of
slices are its own. The next few slices in this order, from as many places of the set, are a *chunk*, the unit of
leases; its windows of `sequence_length` inputs (the last target reads one token on) are permuted once more, and dealt
out to its microbatches. Where documents are packed whole into samples, these are the windows, the same in each lap.
Microbatch ids count through the chunks, lap after lap, so a chunk's ids are consecutive and any id can be recomputed by
anyone.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import gcd

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.permutation import permuted
from swarm.core.settings import RunSettings

SLICES = 16
"""In a chunk, where it is long enough to be cut into as many."""

Run = tuple[int, int]
"""Tokens [start, stop) of the training file."""


@dataclass(frozen=True)
class DataOrder:
    """Arithmetic of ids. Raises ValueError if the data does not hold one microbatch."""

    num_tokens: int
    sequence_length: int
    microbatch_size: int
    chunk_tokens: int
    seed: int
    mixture: tuple[tuple[int, int, int], ...] = ()
    """First token, number of tokens and weight of each source; empty: all tokens are one."""
    overlap: int = 1
    """Tokens of the next sample that one reads: the last target. 0 where samples end with a document."""

    def __post_init__(self) -> None:
        fewest = min(self._num_slices(source) for source in range(len(self._sources)))
        if not self.microbatches_per_chunk or fewest < 1 or self.microbatches_per_lap < 1:
            raise ValueError(
                f"{self.num_tokens} tokens hold no microbatch of {self.microbatch_size} samples of "
                f"{self.sequence_length} tokens in chunks of {self.chunk_tokens}; add text or shorten them"
            )

    @classmethod
    def of_run(cls, settings: RunSettings) -> "DataOrder":
        """The training order of a run."""
        data = settings.data
        return cls(
            data.num_train_tokens,
            data.sequence_length,
            settings.batch.microbatch_size,
            data.chunk_tokens,
            data.seed,
            data.mixture,
            data.sample_tokens - data.sequence_length,
        )

    # -- sizes --------------------------------------------------------------------------------------------

    @property
    def slice_tokens(self) -> int:
        tokens = max(self.sequence_length + self.overlap, self.chunk_tokens // SLICES)
        return tokens if self.overlap else tokens - tokens % self.sequence_length

    @property
    def slices_per_chunk(self) -> int:
        return self.chunk_tokens // self.slice_tokens

    @property
    def windows_per_slice(self) -> int:
        return (self.slice_tokens - self.overlap) // self.sequence_length

    @property
    def microbatches_per_chunk(self) -> int:
        return self.slices_per_chunk * self.windows_per_slice // self.microbatch_size

    @property
    def num_slices(self) -> int:
        """Whole slices of all sources; a shorter rest at the end of a source is left out."""
        return sum(self._num_slices(source) for source in range(len(self._sources)))

    @property
    def microbatches_per_lap(self) -> int:
        """As many as the set has windows for."""
        return self.num_slices * self.windows_per_slice // self.microbatch_size

    # -- ids ----------------------------------------------------------------------------------------------

    def chunk_of(self, microbatch_id: MicrobatchId) -> int:
        """Position of the id's chunk in the endless permuted order: the unit of leases."""
        return microbatch_id // self.microbatches_per_chunk

    def ids_of_chunk(self, position: int) -> range:
        """Ids of the chunk at `position` of the endless permuted order."""
        return range(position * self.microbatches_per_chunk, (position + 1) * self.microbatches_per_chunk)

    def slices_of_chunk(self, position: int) -> tuple[Run, ...]:
        """Where the chunk's tokens lie."""
        return tuple((start, start + self.slice_tokens) for start, _ in _slices(self, position))

    def sample_starts(self, microbatch_id: MicrobatchId) -> list[int]:
        """First token of each sample of the microbatch; a sample spans `sequence_length + overlap` tokens."""
        position, index = divmod(microbatch_id, self.microbatches_per_chunk)
        slices, key = _slices(self, position), _key("windows", self.seed, position)
        num_windows, first = self.slices_per_chunk * self.windows_per_slice, index * self.microbatch_size
        starts = []
        for place in range(first, first + self.microbatch_size):
            which, window = divmod(permuted(place, num_windows, key), self.windows_per_slice)
            start, skipped = slices[which]
            starts.append(start + skipped + window * self.sequence_length)
        return starts

    def runs(self, microbatch_id: MicrobatchId) -> list[Run]:
        """The tokens that the microbatch reads."""
        return [(start, start + self.sequence_length + self.overlap) for start in self.sample_starts(microbatch_id)]

    def spans(self, ids: Iterable[MicrobatchId]) -> list["Span"]:
        """The ids as runs within a chunk, with the tokens that they are drawn from."""
        runs: list[tuple[int, int]] = []
        for number in sorted(set(ids)):
            if runs and runs[-1][1] == number and self.chunk_of(MicrobatchId(runs[-1][0])) == self.chunk_of(number):
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return [Span(first, stop, self._tokens(first, stop)) for first, stop in runs]

    def _tokens(self, first: int, stop: int) -> tuple[Run, ...]:
        """Of the microbatches [first, stop) of one chunk: its slices, where they hold more windows than it has."""
        if (stop - first) * self.microbatch_size > self.slices_per_chunk:
            found = sorted(self.slices_of_chunk(self.chunk_of(MicrobatchId(first))))
        else:
            found = sorted(run for number in range(first, stop) for run in self.runs(MicrobatchId(number)))
        merged: list[Run] = []
        for start, end in found:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return tuple(merged)

    # -- slices -------------------------------------------------------------------------------------------

    @property
    def _sources(self) -> tuple[tuple[int, int, int], ...]:
        return self.mixture or ((0, self.num_tokens, 1),)

    def _num_slices(self, source: int) -> int:
        return self._sources[source][1] // self.slice_tokens

    def _slice_at(self, place: int) -> tuple[int, int]:
        """First token of the slice at a place of the endless order, and how many are passed over before its first
        window: so that windows do not begin at the same tokens in each lap."""
        weights = [weight for _, _, weight in self._sources]
        ends = list(accumulate(weight // gcd(*weights) for weight in weights))
        cycle, within = divmod(place, ends[-1])
        turn = permuted(within, ends[-1], _key("mixture", self.seed, cycle))
        source = bisect_right(ends, turn)
        begin = ends[source - 1] if source else 0
        count = cycle * (ends[source] - begin) + turn - begin
        lap, index = divmod(count, self._num_slices(source))
        key = _key("slices", self.seed, source, lap)
        number = permuted(index, self._num_slices(source), key)
        left = (self.slice_tokens - self.overlap) % self.sequence_length
        return self._sources[source][0] + number * self.slice_tokens, permuted(number % (left + 1), left + 1, key)


@dataclass(frozen=True)
class Span:
    """Microbatches [first, stop) and the training tokens that they are drawn from, as runs [from, to)."""

    first: int
    stop: int
    tokens: tuple[Run, ...]


@lru_cache(maxsize=256)
def _slices(order: DataOrder, position: int) -> tuple[tuple[int, int], ...]:
    """Of the chunk at `position`."""
    first = position * order.slices_per_chunk
    return tuple(order._slice_at(place) for place in range(first, first + order.slices_per_chunk))


def _key(what: str, *numbers: int) -> bytes:
    return hashlib.sha256("/".join(["homeswarm/data-order", what, *map(str, numbers)]).encode()).digest()
