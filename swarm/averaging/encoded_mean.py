"""The mean of contributions as they were sent, without holding them decoded: rule "mean" only.

The bits are those of decoding each and of `aggregate(..., rule="mean")`: the same factors, products and sums in the
same order. Every contribution is checked before any is added, for the factors depend on which of them count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import robust
from kernels.codecs import formats
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.codecs import Int8Codec
from swarm.averaging.encoded import Encoded, VectorCodec, aligned, check_length
from swarm.averaging.low_bit import Int2Codec, Int4Codec, TopkCodec
from swarm.core.errors import RemoteError
from swarm.memory.kept_buffers import empty_floats

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MeanOfEncoded:
    """What came of contributions, some of which may have been malformed."""

    values: Floats
    """sum of fp32(count / all counts) * vector over those that count; zeros if none does."""
    left_out: dict[int, RemoteError]
    """What is wrong with the contribution at a place, for each that does not count."""


def mean_of_encoded(
    codec: VectorCodec,
    contributions: Sequence[tuple[int, Encoded]],
    *,
    num_values: int,
    threads: Threads = ONE_THREAD,
) -> MeanOfEncoded:
    """The mean of (count of tokens, encoded vector), weighted by the counts, in the given order."""
    reader = _READERS[codec.name](codec, num_values, threads)
    left_out = reader.wrong([data for _, data in contributions])
    terms = _weighted([one for place, one in enumerate(contributions) if place not in left_out])
    total = empty_floats(num_values)
    total.fill(0.0)
    for factor, data in terms:
        reader.add(data, factor, total)
    formats.flush_in_place(total.view(np.int32), threads=threads)
    return MeanOfEncoded(total, left_out)


def encoded_mean_of(
    read: VectorCodec,
    written: VectorCodec,
    contributions: Sequence[tuple[int, Encoded]],
    *,
    num_values: int,
    seed: bytes,
    threads: Threads = ONE_THREAD,
) -> tuple[memoryview, dict[int, RemoteError]]:
    """As `mean_of_encoded`, encoded again; where both codecs are int8, in one pass."""
    if isinstance(read, Int8Codec) and read is written:
        left_out, counted = dict[int, RemoteError](), contributions
        terms = read.terms([data for _, data in counted], num_values)
        if terms is None:
            left_out = _Int8Reader(read, num_values, threads).wrong([data for _, data in contributions])
            counted = [one for place, one in enumerate(contributions) if place not in left_out]
            terms = read.terms([data for _, data in counted], num_values)
            assert terms is not None
        factors = np.array([factor for factor, _ in _weighted(counted)], dtype=np.float32)
        return read.encode_sum(terms, factors, num_values, seed=seed, threads=threads), left_out
    found = mean_of_encoded(read, contributions, num_values=num_values, threads=threads)
    return written.encode(found.values, seed=seed), found.left_out


def _weighted(counted: Sequence[tuple[int, Encoded]]) -> list[tuple[np.float32, Encoded]]:
    """Each with its factor in the place of its tokens."""
    all_tokens = sum(tokens for tokens, _ in counted)
    return [(np.float32(tokens / all_tokens), data) for tokens, data in counted]


def check_encoded(codec: VectorCodec, data: Encoded, *, num_values: int) -> None:
    """Raises RemoteError("malformed") for what `codec.decode` would refuse."""
    _READERS[codec.name](codec, num_values, ONE_THREAD).check(data)


class _Reader:
    """Checks vectors as they were sent, and adds them; a codec without a fused sum has them decoded first."""

    def __init__(self, codec: VectorCodec, num_values: int, threads: Threads) -> None:
        self.codec, self.num_values, self.threads = codec, num_values, threads
        self._decoded: Floats | None = None

    def check(self, data: Encoded) -> None:
        """Raises RemoteError("malformed") for what `codec.decode` would refuse."""
        raise NotImplementedError

    def wrong(self, bodies: Sequence[Encoded]) -> dict[int, RemoteError]:
        """What `check` raises, by the place of each for which it does."""
        found = {}
        for place, data in enumerate(bodies):
            try:
                self.check(data)
            except RemoteError as error:
                found[place] = error
        return found

    def add(self, data: Encoded, factor: np.float32, total: Floats) -> None:
        """total += vector * factor, for data that `check` has passed."""
        if self._decoded is None:
            self._decoded = empty_floats(self.num_values)
        self.codec.decode(data, self._decoded)
        robust.add_scaled(self._decoded, factor, total, threads=self.threads)

    def _check(self, data: Encoded, is_valid: Callable[[], bool]) -> None:
        check_length(data, self.codec.encoded_bytes(self.num_values))
        if not is_valid():
            raise RemoteError("malformed", f"{self.codec.name} vector holds what no encoder writes")


class _Fp32Reader(_Reader):
    def check(self, data: Encoded) -> None:
        self._check(data, lambda: formats.is_valid_fp32(aligned(data, np.int32, 0, self.num_values)))

    def add(self, data: Encoded, factor: np.float32, total: Floats) -> None:
        formats.add_fp32(aligned(data, np.int32, 0, total.size), factor, total, threads=self.threads)


class _Bf16Reader(_Reader):
    def check(self, data: Encoded) -> None:
        self._check(data, lambda: formats.is_valid_bfloat16(aligned(data, np.uint16, 0, self.num_values)))

    def add(self, data: Encoded, factor: np.float32, total: Floats) -> None:
        formats.add_bfloat16(aligned(data, np.uint16, 0, total.size), factor, total, threads=self.threads)


class _Int8Reader(_Reader):
    codec: Int8Codec

    def check(self, data: Encoded) -> None:
        self._check(data, lambda: self.codec.is_valid(data, self.num_values))

    def add(self, data: Encoded, factor: np.float32, total: Floats) -> None:
        self.codec.add(data, factor, total, threads=self.threads)


class _LowBitReader(_Reader):
    codec: Int4Codec | Int2Codec | TopkCodec

    def check(self, data: Encoded) -> None:
        self._check(data, lambda: self.codec.is_valid(data, self.num_values))


_READERS: dict[str, type[_Reader]] = {
    "fp32": _Fp32Reader,
    "bf16": _Bf16Reader,
    "int8": _Int8Reader,
    "int4": _LowBitReader,
    "int2": _LowBitReader,
    "topk": _LowBitReader,
}
