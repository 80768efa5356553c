"""This is where a vector becomes the bytes that are committed to and averaged, and back: exact on every machine.

All numbers are little endian. Values are below 2^126 in magnitude, and below 2^-126 they are written as zero.

| codec | layout | bytes a value | relative L2 error on N(0, 1) |
|---|---|---|---|
| fp32 | values | 4 | 0 |
| bf16 | values, rounded to nearest even | 2 | 0.0017 |
| int8 | a bf16 scale for each 128 values, then codes; stochastic rounding | 1.016 | 0.0092 |
"""

from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels import formats, int8_blocks
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import AveragingCodecName

SEED_BYTES = 32

Encoded = bytes | bytearray | memoryview
Scalar = TypeVar("Scalar", bound=np.generic)


class VectorCodec(Protocol):
    """A pure function of (values, seed) and its reverse."""

    name: str

    def encoded_bytes(self, num_values: int) -> int:
        """Exact length of an encoded vector."""
        ...

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        """`seed` (32 bytes) decides stochastic rounding. Raises LocalError for values not finite or not below 2^126."""
        ...

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        """Fill `out`, whose size says how many values there are.

        Raises RemoteError("malformed") for anything `encode` never writes; `out` is then left in any state.
        """
        ...


def vector_codec(name: AveragingCodecName) -> VectorCodec:
    """The codec of that name; codecs hold no state."""
    return _CODECS[name]


class _Fp32Codec:
    name = "fp32"

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        data = bytearray(self.encoded_bytes(values.size))
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

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        data = bytearray(self.encoded_bytes(values.size))
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

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> bytearray:
        assert len(seed) == SEED_BYTES, f"seed of {len(seed)} bytes"
        data = bytearray(self.encoded_bytes(values.size))
        num_blocks = self._num_blocks(values.size)
        scales = np.frombuffer(data, dtype=np.uint16, count=num_blocks)
        codes = np.frombuffer(data, dtype=np.int8, offset=2 * num_blocks)
        if not int8_blocks.encode(values, aligned(seed, np.uint64, 0, 4), scales, codes):
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


_CODECS: dict[AveragingCodecName, VectorCodec] = {"fp32": _Fp32Codec(), "bf16": _Bf16Codec(), "int8": _Int8Codec()}


def aligned(data: Encoded, dtype: type[Scalar], offset: int, count: int) -> NDArray[Scalar]:
    """`count` numbers at byte `offset` of `data`: a read-only view, or a copy if they lie unaligned.

    Always read-only, so that a kernel is compiled once, not again for bytes that may be written to.
    """
    view = np.require(np.frombuffer(data, dtype=dtype, offset=offset, count=count), requirements="A")
    view.flags.writeable = False
    return view


def check_length(data: Encoded, expected_bytes: int) -> None:
    """Raises RemoteError("malformed") if `data` is not exactly that long."""
    length = memoryview(data).nbytes
    if length != expected_bytes:
        raise RemoteError("malformed", f"{length} bytes where {expected_bytes} were expected")


def too_large(values: NDArray[np.float32]) -> LocalError:
    """The error for values no codec can carry: how many there are, and where the first one is."""
    refused = np.flatnonzero(~(np.abs(values.reshape(-1)) < np.float32(2.0**126)))
    return LocalError(
        f"{refused.size} of {values.size} values are not finite or not below 2^126, the first at {refused[0]}; "
        "lower the learning rate, or look for a fault in the model"
    )
