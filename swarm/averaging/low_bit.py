"""Vectors in less than a byte a value: in int4 or int2, or their largest values alone.

int4: bf16 scales of blocks of 64 values, then codes, two a byte; int2: the same with four a byte. topk: a bit for each
value, lowest first, set for three eighths of each 4096; then those values in int4. Rounding is stochastic: a decoded
value is right in the mean, and zero stays zero, but in int2 only where its whole block is.
"""

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from kernels.codecs import int2_blocks, int4_blocks, topk
from swarm.averaging.encoded import Encoded, InSteps, aligned, check_length, seed_words, too_large
from swarm.core.errors import RemoteError
from swarm.memory.kept_buffers import BUFFERS, empty_floats


class _InBlocks(InSteps):
    """A bf16 scale for each block of 64 values, then codes, as many to a byte as the kernel packs."""

    name: str
    kernel: ModuleType
    """Encodes, decodes and checks; `BLOCK_VALUES` share a scale."""
    codes_per_byte: int

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * self._num_blocks(num_values) + -(-num_values // self.codes_per_byte)

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        data = BUFFERS.take(self.encoded_bytes(values.size))
        num_blocks = self._num_blocks(values.size)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_blocks)
        packed = np.frombuffer(data, dtype=np.uint8, offset=2 * num_blocks)
        if not self.kernel.encode(values, seed_words(seed), scales, packed):
            raise too_large(values)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        if not self.kernel.decode(*self._scales_and_codes(data, out.size), out):
            raise RemoteError("malformed", f"{self.name} vector holds a scale or code that no encoder writes")

    def is_valid(self, data: Encoded, num_values: int) -> bool:
        """Whether `decode` takes data of the right length."""
        return bool(self.kernel.is_valid(*self._scales_and_codes(data, num_values), num_values))

    def _scales_and_codes(self, data: Encoded, num_values: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        num_blocks = self._num_blocks(num_values)
        num_bytes = -(-num_values // self.codes_per_byte)
        return aligned(data, np.uint16, 0, num_blocks), aligned(data, np.uint8, 2 * num_blocks, num_bytes)

    def _num_blocks(self, num_values: int) -> int:
        return -(-num_values // int(self.kernel.BLOCK_VALUES))


class Int4Codec(_InBlocks):
    name = "int4"
    kernel = int4_blocks
    codes_per_byte = 2


class Int2Codec(_InBlocks):
    """Of windows' pseudo-gradients and first moments, and of their means: none of its codes stands for zero."""

    name = "int2"
    kernel = int2_blocks
    codes_per_byte = 4


class TopkCodec(InSteps):
    name = "topk"
    _values = Int4Codec()

    def encoded_bytes(self, num_values: int) -> int:
        return _marks_bytes(num_values) + self._values.encoded_bytes(topk.num_chosen(num_values))

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        data = BUFFERS.take(self.encoded_bytes(values.size))
        marks = np.frombuffer(data, dtype=np.uint8, count=_marks_bytes(values.size))
        chosen = empty_floats(topk.num_chosen(values.size))
        if not topk.select(values, marks, chosen):
            raise too_large(values)
        data[marks.size :] = self._values.encode(chosen, seed=seed)
        return data

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        check_length(data, self.encoded_bytes(out.size))
        marks = aligned(data, np.uint8, 0, _marks_bytes(out.size))
        chosen = empty_floats(topk.num_chosen(out.size))
        self._values.decode(memoryview(data)[marks.size :], chosen)
        if not topk.scatter(marks, chosen, out):
            raise RemoteError("malformed", "top-k vector marks more or fewer values than an encoder does")

    def is_valid(self, data: Encoded, num_values: int) -> bool:
        """Whether `decode` takes data of the right length."""
        marks = aligned(data, np.uint8, 0, _marks_bytes(num_values))
        chosen = memoryview(data)[marks.size :]
        return topk.is_valid(marks, num_values) and self._values.is_valid(chosen, topk.num_chosen(num_values))


def _marks_bytes(num_values: int) -> int:
    return -(-num_values // 8)
