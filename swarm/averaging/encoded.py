"""Arrays and the bytes on the wire: what a codec of vectors promises, and checks that all of them share.

All numbers are little endian. Values are below 2^126 in magnitude, and below 2^-126 they are written as zero.
"""

from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels import norms, optimizers
from swarm.core.errors import LocalError, RemoteError
from swarm.memory.kept_buffers import empty_floats

SEED_BYTES = 32

Encoded = bytes | bytearray | memoryview
Scalar = TypeVar("Scalar", bound=np.generic)


class VectorCodec(Protocol):
    """A pure function of (values, seed) and its reverse."""

    name: str

    def encoded_bytes(self, num_values: int) -> int:
        """Exact length of an encoded vector."""
        ...

    def encode(self, values: NDArray[np.float32], *, seed: bytes) -> memoryview:
        """In a buffer of `swarm.memory.kept_buffers`. `seed` (32 bytes) decides stochastic rounding.

        Raises LocalError for values not finite or not below 2^126.
        """
        ...

    def decode(self, data: Encoded, out: NDArray[np.float32]) -> None:
        """Fill `out`, whose size says how many values there are.

        Raises RemoteError("malformed") for anything `encode` never writes; `out` is then left in any state.
        """
        ...

    def encode_quotients(self, values: NDArray[np.float32], divisor: np.float32, *, seed: bytes) -> memoryview:
        """As `encode` of values / divisor, each division rounded by itself."""
        ...

    def decode_and_square(self, data: Encoded, out: NDArray[np.float32]) -> float:
        """As `decode`; the sum of the values' squares, as `kernels.norms` has it."""
        ...


class InSteps:
    """What a codec does one step after the other that has nothing faster."""

    def encode_quotients(
        self: VectorCodec, values: NDArray[np.float32], divisor: np.float32, *, seed: bytes
    ) -> memoryview:
        quotients = empty_floats(values.size)
        optimizers.divide(values, divisor, quotients)
        return self.encode(quotients, seed=seed)

    def decode_and_square(self: VectorCodec, data: Encoded, out: NDArray[np.float32]) -> float:
        self.decode(data, out)
        return norms.sum_of_squares(out)


def aligned(data: Encoded, dtype: type[Scalar], offset: int, count: int) -> NDArray[Scalar]:
    """`count` numbers at byte `offset` of `data`: a read-only view, or a copy if they lie unaligned.

    Always read-only, so that a kernel is compiled once, not again for bytes that may be written to.
    """
    view = np.require(np.frombuffer(data, dtype=dtype, offset=offset, count=count), requirements="A")
    view.flags.writeable = False
    return view


def seed_words(seed: bytes) -> NDArray[np.uint64]:
    """A seed's four words."""
    assert len(seed) == SEED_BYTES, f"seed of {len(seed)} bytes"
    return aligned(seed, np.uint64, 0, 4)


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
