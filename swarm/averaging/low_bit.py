"""This is where vectors become less than a byte a value: int4, the largest values alone, and int4 of those not zero.

int4: bf16 scales of blocks of 64 values, then codes, two a byte. topk: bf16 scales of chunks of 4096 values, then a
16-bit word for each kept value. support: a bit for each value, set where it is not zero, lowest bit first; then those
values in int4. Rounding is stochastic: a decoded value is right in the mean, and zero stays zero.
"""

import numpy as np
from numpy.typing import NDArray

from kernels import int4_blocks, topk
from swarm.averaging.encoded import Encoded, aligned, check_length, seed_words, too_large
from swarm.core.errors import LocalError, RemoteError

_SMALLEST = np.float32(2.0**-126)


class Int4Codec:
    name = "int4"

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * self._num_blocks(num_values) + -(-num_values // 2)

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        data = bytearray(self.encoded_bytes(values.size))
        num_blocks = self._num_blocks(values.size)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_blocks)
        packed = np.frombuffer(data, dtype=np.uint8, offset=2 * num_blocks)
        if not int4_blocks.encode(values, seed_words(seed), scales, packed):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        num_blocks = self._num_blocks(out.size)
        scales = aligned(data, np.uint16, 0, num_blocks)
        packed = aligned(data, np.uint8, 2 * num_blocks, -(-out.size // 2))
        if not int4_blocks.decode(scales, packed, out):
            raise RemoteError("malformed", "int4 vector holds a scale or code that no encoder writes")

    @staticmethod
    def _num_blocks(num_values: int) -> int:
        return -(-num_values // int4_blocks.BLOCK_VALUES)


class TopkCodec:
    name = "topk"

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * topk.num_chunks(num_values) + 2 * topk.num_kept(num_values)

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        data = bytearray(self.encoded_bytes(values.size))
        num_chunks = topk.num_chunks(values.size)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_chunks)
        words = np.frombuffer(data, dtype=np.uint16, offset=2 * num_chunks)
        if not topk.encode(values, seed_words(seed), scales, words):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        num_chunks = topk.num_chunks(out.size)
        scales = aligned(data, np.uint16, 0, num_chunks)
        words = aligned(data, np.uint16, 2 * num_chunks, topk.num_kept(out.size))
        if not topk.decode(scales, words, out):
            raise RemoteError("malformed", "top-k vector holds a scale, place or code that no encoder writes")


class SupportCodec:
    """For a vector most of which is zero, as the sum of a few top-k contributions is: nothing of it is dropped."""

    name = "support"
    _values = Int4Codec()

    def encoded_bytes(self, num_values: int) -> int:
        return -(-num_values // 8) + self._values.encoded_bytes(num_values)

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        # Not "magnitude at least": what is not a number is to be refused, not left out.
        kept = ~(np.abs(values) < _SMALLEST)
        try:
            codes = self._values.encode(values[kept], seed=seed)
        except LocalError:
            raise too_large(values) from None
        return bytearray(np.packbits(kept, bitorder="little").tobytes()) + codes

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        marks_bytes = -(-out.size // 8)
        if memoryview(data).nbytes < marks_bytes:
            raise RemoteError("malformed", f"{memoryview(data).nbytes} bytes where {marks_bytes} begin a vector")
        marks = np.unpackbits(aligned(data, np.uint8, 0, marks_bytes), bitorder="little")
        if marks[out.size :].any():
            raise RemoteError("malformed", "a value past the vector's end is marked as sent")
        kept = marks[: out.size].view(np.bool_)
        values = np.empty(np.count_nonzero(kept), dtype=np.float32)
        self._values.decode(memoryview(data)[marks_bytes:], values)
        out[:] = 0
        out[kept] = values
