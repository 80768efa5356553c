"""This is where the codecs of averaging rounds are: how a vector becomes the bytes that are committed to, and back.

Exact on every machine. All numbers are little endian; values are below 2^126 in magnitude, and below 2^-126 they are
written as zero.

| codec | layout | bytes a value | relative L2 error on N(0, 1) |
|---|---|---|---|
| fp32 | values | 4 | 0 |
| bf16 | values, rounded to nearest even | 2 | 0.0017 |
| int8 | a bf16 scale for each 128 values, then codes; stochastic rounding | 1.016 | 0.0092 |
| int4 | a bf16 scale for each 64 values, then codes; stochastic rounding | 0.531 | 0.15 |
| topk | a bit a value; of each 4096 values the 1536 largest in int4 | 0.324 | 0.40 |

A contribution in int4 or topk leaves a residual, which its maker adds to its next one
(`swarm.averaging.error_feedback`). A reducer cannot keep one: it changes from round to round, and nobody would owe what
it left out. So a result is encoded without bias, in the codec of the contributions or, where they are topk, in int4,
which drops nothing: together the members' choices cover most of the values.
"""

import numpy as np
from numpy.typing import NDArray

from kernels import formats, int8_blocks
from swarm.averaging.encoded import Encoded, VectorCodec, aligned, check_length, seed_words, too_large
from swarm.averaging.low_bit import Int4Codec, TopkCodec
from swarm.core.errors import RemoteError
from swarm.core.settings import AveragingCodecName
from swarm.kept_buffers import BUFFERS


def vector_codec(name: AveragingCodecName) -> VectorCodec:
    """The codec of contributions under that name; codecs hold no state."""
    return _CODECS[name]


def result_codec(name: AveragingCodecName) -> VectorCodec:
    """The codec of what reducers make of such contributions; a result is never shorter than a contribution."""
    return _CODECS["int4" if name == "topk" else name]


def leaves_residual(name: AveragingCodecName) -> bool:
    """Whether contributions under that name come with error feedback."""
    return name in ("int4", "topk")


class _Fp32Codec:
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


class _Bf16Codec:
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


class _Int8Codec:
    name = "int8"

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * self._num_blocks(num_values) + num_values

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        data = BUFFERS.take(self.encoded_bytes(values.size))
        num_blocks = self._num_blocks(values.size)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_blocks)
        codes = np.frombuffer(data, dtype=np.int8, offset=2 * num_blocks)
        if not int8_blocks.encode(values, seed_words(seed), scales, codes):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        num_blocks = self._num_blocks(out.size)
        scales = aligned(data, np.uint16, 0, num_blocks)
        codes = aligned(data, np.int8, 2 * num_blocks, out.size)
        if not int8_blocks.decode(scales, codes, out):
            raise RemoteError("malformed", "int8 vector holds a scale or code that no encoder writes")

    @staticmethod
    def _num_blocks(num_values: int) -> int:
        return -(-num_values // int8_blocks.BLOCK_VALUES)


_CODECS: dict[AveragingCodecName, VectorCodec] = {
    "fp32": _Fp32Codec(),
    "bf16": _Bf16Codec(),
    "int8": _Int8Codec(),
    "int4": Int4Codec(),
    "topk": TopkCodec(),
}
