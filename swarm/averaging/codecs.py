"""The codecs of averaging rounds: how a vector becomes the bytes that are committed to, and back.

Exact on every machine. All numbers are little endian; values are below 2^126 in magnitude, and below 2^-126 they are
written as zero.

| codec | layout | bytes a value | relative L2 error on N(0, 1) |
|---|---|---|---|
| fp32 | values | 4 | 0 |
| bf16 | values, rounded to nearest even | 2 | 0.0017 |
| int8 | a bf16 scale for each 128 values, then codes; stochastic rounding | 1.016 | 0.0092 |
| int4 | a bf16 scale for each 64 values, then codes; stochastic rounding | 0.531 | 0.15 |
| int2 | the same, four codes a byte; for windows of local steps | 0.281 | 0.72 |
| topk | a bit a value; of each 4096 values the 1536 largest in int4 | 0.324 | 0.40 |

Outside of windows a contribution in int4 or topk leaves a residual, which its maker adds to its next one
(`swarm.averaging.error_feedback`). A reducer cannot keep one: it changes from round to round, and nobody would owe what
it left out. So a result is encoded without bias, in the codec of the contributions or, where they are topk, in int4,
which drops nothing: together the members' choices cover most of the values.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.cache_hints import CACHE_LINE_BYTES
from kernels.codecs import formats, int8_blocks
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import (
    Encoded,
    InSteps,
    VectorCodec,
    aligned,
    check_length,
    seed_words,
    too_large,
    words_of_seeds,
)
from swarm.averaging.low_bit import Int2Codec, Int4Codec, TopkCodec
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import AveragingCodecName
from swarm.memory.kept_buffers import BUFFERS


def vector_codec(name: AveragingCodecName) -> VectorCodec:
    """The codec of contributions under that name; codecs hold no state."""
    return _CODECS[name]


def result_codec(name: AveragingCodecName) -> VectorCodec:
    """The codec of what reducers make of such contributions; a result is never shorter than a contribution."""
    return _CODECS["int4" if name == "topk" else name]


class _Fp32Codec(InSteps):
    name = "fp32"

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        data = BUFFERS.take(self.encoded_bytes(values.size))
        if not formats.flush(values.view(np.int32), np.frombuffer(data, dtype=np.int32)):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        if not formats.flush(aligned(data, np.int32, 0, out.size), out.view(np.int32)):
            raise RemoteError("malformed", "fp32 vector holds a value that is not finite or is 2^126 or more")


class _Bf16Codec(InSteps):
    name = "bf16"

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        data = BUFFERS.take(self.encoded_bytes(values.size))
        if not formats.to_bfloat16(values.view(np.int32), np.frombuffer(data, dtype=np.uint16)):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        if not formats.from_bfloat16(aligned(data, np.uint16, 0, out.size), out.view(np.int32)):
            raise RemoteError("malformed", "bf16 vector holds a value that is not finite or is above 2^126")


class Int8Codec:
    name = "int8"

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * self._num_blocks(num_values) + num_values

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        return self.encode_quotients(values, np.float32(1.0), seed=seed)

    def encode_quotients(self, values: NDArray[np.float32], divisor: np.float32, *, seed: bytes) -> memoryview:
        (data,) = self.encode_parts(values, divisor, part_values=values.size, seeds=(seed,))
        return data

    def encode_parts(
        self, values: NDArray[np.float32], divisor: np.float32, *, part_values: int, seeds: Sequence[bytes]
    ) -> list[memoryview]:
        """In memory that all of them share, and in one call: for each of several a thread would wait for the others'
        Python."""
        each = -(-self.encoded_bytes(part_values) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        data = BUFFERS.take(each * len(seeds))
        rows, words = np.frombuffer(data, dtype=np.uint8).reshape(len(seeds), each), words_of_seeds(seeds)
        done = int8_blocks.encode_parts(values, words, rows, part_values=part_values, divisor=divisor)
        if done < len(seeds):
            raise too_large(values[done * part_values : (done + 1) * part_values] / divisor)
        sizes = (min(part_values, values.size - place * part_values) for place in range(len(seeds)))
        return [data[place * each :][: self.encoded_bytes(size)] for place, size in enumerate(sizes)]

    def encode_sum(
        self,
        terms: int8_blocks.Terms,
        factors: NDArray[np.float32],
        num_values: int,
        *,
        seed: bytes,
        threads: Threads = ONE_THREAD,
    ) -> memoryview:
        """As `encode` of the sum of decoded terms, each of `num_values` and valid, times their factors."""
        data = BUFFERS.take(self.encoded_bytes(num_values))
        scales, codes = self._to_write(data, num_values)
        if not int8_blocks.encode_sum(terms, factors, seed_words(seed), scales, codes, threads=threads):
            raise LocalError("a weighted sum of contributions is not below 2^126")
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        if not int8_blocks.decode(*self._to_read(data, out.size), out):
            raise self._malformed()

    def sum_of_squares(self, data: Encoded, num_values: int) -> float:
        check_length(data, self.encoded_bytes(num_values))
        squares = int8_blocks.sum_of_squares(*self._to_read(data, num_values))
        if squares is None:
            raise self._malformed()
        return squares

    def is_valid(self, data: Encoded, num_values: int) -> bool:
        """Whether `decode` takes data of the right length."""
        return int8_blocks.is_valid(*self._to_read(data, num_values))

    def terms(self, bodies: Sequence[Encoded], num_values: int) -> int8_blocks.Terms | None:
        """Those bodies; None unless `decode` takes all of them."""
        num_bytes = self.encoded_bytes(num_values)
        vectors = [_where_scales_may_lie(body) for body in bodies]
        if not all(vector.size == num_bytes for vector in vectors):
            return None
        found = int8_blocks.Terms(vectors)
        return found if found.are_valid(num_values).all() else None

    def add(
        self, data: Encoded, factor: np.float32, total: NDArray[np.float32], *, threads: Threads = ONE_THREAD
    ) -> None:
        """total += decoded * factor, of data that `is_valid`."""
        int8_blocks.add_decoded(*self._to_read(data, total.size), factor, total, threads=threads)

    @staticmethod
    def _malformed() -> RemoteError:
        return RemoteError("malformed", "int8 vector holds a scale or code that no encoder writes")

    def _to_write(self, data: memoryview, num_values: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
        num_blocks = self._num_blocks(num_values)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_blocks)
        return scales, np.frombuffer(data, dtype=np.int8, offset=2 * num_blocks)

    def _to_read(self, data: Encoded, num_values: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
        num_blocks = self._num_blocks(num_values)
        return aligned(data, np.uint16, 0, num_blocks), aligned(data, np.int8, 2 * num_blocks, num_values)

    @staticmethod
    def _num_blocks(num_values: int) -> int:
        return -(-num_values // int8_blocks.BLOCK_VALUES)


def _where_scales_may_lie(data: Encoded) -> NDArray[np.uint8]:
    """The bytes, copied if they begin within one."""
    view = np.frombuffer(data, dtype=np.uint8)
    return view if np.frombuffer(data, dtype=np.uint16, count=view.size // 2).flags.aligned else view.copy()


_CODECS: dict[AveragingCodecName, VectorCodec] = {
    "fp32": _Fp32Codec(),
    "bf16": _Bf16Codec(),
    "int8": Int8Codec(),
    "int4": Int4Codec(),
    "int2": Int2Codec(),
    "topk": TopkCodec(),
}
