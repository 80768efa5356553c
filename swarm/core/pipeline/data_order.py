"""The run's data order: which tokens a microbatch id holds, as a pure function.

The training tokens are cut into chunks, permuted anew in each pass over the data ("lap"). A chunk is cut into
`microbatch_size` stretches and these into windows of `sequence_length` inputs (the last target reads one token on); a
microbatch takes one window of each stretch, so that its samples are of different documents where these are shorter than
a stretch. Microbatch ids count through chunks in permuted order, lap after lap, so a chunk's ids are consecutive and
any id can be recomputed by anyone.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.core.ids import MicrobatchId
from swarm.core.settings import RunSettings


@dataclass(frozen=True)
class DataOrder:
    """Arithmetic of ids. Raises ValueError if the data does not hold one microbatch."""

    num_tokens: int
    sequence_length: int
    microbatch_size: int
    chunk_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
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
        )

    @property
    def microbatches_per_chunk(self) -> int:
        windows = (min(self.chunk_tokens, self.num_tokens) - 1) // self.sequence_length
        return windows // self.microbatch_size

    @property
    def num_chunks(self) -> int:
        """Whole chunks; a shorter rest at the end of the file is left out unless it is all there is."""
        if self.microbatches_per_chunk < 1:
            return 0
        return max(1, self.num_tokens // self.chunk_tokens)

    @property
    def microbatches_per_lap(self) -> int:
        return self.num_chunks * self.microbatches_per_chunk

    def chunk_of(self, microbatch_id: MicrobatchId) -> int:
        """Position of the id's chunk in the endless permuted order of chunks: the unit of leases."""
        return microbatch_id // self.microbatches_per_chunk

    def ids_of_chunk(self, position: int) -> range:
        """Ids of the chunk at `position` of the endless permuted order."""
        return range(position * self.microbatches_per_chunk, (position + 1) * self.microbatches_per_chunk)

    def sample_starts(self, microbatch_id: MicrobatchId) -> list[int]:
        """First token of each sample of the microbatch; a sample spans `sequence_length + 1` tokens."""
        lap, within = divmod(microbatch_id, self.microbatches_per_lap)
        position, index = divmod(within, self.microbatches_per_chunk)
        chunk = _permutation(self.num_chunks, self.seed, lap)[position]
        first = chunk * self.chunk_tokens + index * self.sequence_length
        stretch = self.microbatches_per_chunk * self.sequence_length
        return [first + sample * stretch for sample in range(self.microbatch_size)]

    def spans(self, ids: Iterable[MicrobatchId]) -> list["Span"]:
        """The ids as runs within a chunk, with the tokens that they hold."""
        runs: list[tuple[int, int]] = []
        for number in sorted(set(ids)):
            if runs and runs[-1][1] == number and self.chunk_of(MicrobatchId(runs[-1][0])) == self.chunk_of(number):
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return [Span(first, stop, self._tokens(first, stop)) for first, stop in runs]

    def _tokens(self, first: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Of the microbatches [first, stop) of one chunk."""
        starts, lasts = (self.sample_starts(MicrobatchId(number)) for number in (first, stop - 1))
        return tuple((start, last + self.sequence_length + 1) for start, last in zip(starts, lasts, strict=True))


@dataclass(frozen=True)
class Span:
    """Microbatches [first, stop) and the training tokens that they hold, as runs [from, to), one of each stretch."""

    first: int
    stop: int
    tokens: tuple[tuple[int, int], ...]


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, lap: int) -> Sequence[int]:
    """Chunks in the order of one lap: the same in every Python, by sorting on hashes."""

    def rank(chunk: int) -> bytes:
        return hashlib.sha256(f"homeswarm/chunk-order/{seed}/{lap}/{chunk}".encode()).digest()

    return tuple(sorted(range(size), key=rank))
