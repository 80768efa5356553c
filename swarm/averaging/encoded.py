"""Arrays and the bytes on the wire: what a codec of vectors promises, and checks that all of them share.

All numbers are little endian. Values are below 2^126 in magnitude, and below 2^-126 they are written as zero.
"""

from collections.abc import Sequence
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

    def encode_parts(
        self, values: NDArray[np.float32], divisor: np.float32, *, part_values: int, seeds: Sequence[bytes]
    ) -> list[memoryview]:
        """As `encode_quotients` of one part after the other, of so many values each; the last one has the rest."""
        ...

    def sum_of_squares(self, data: Encoded, num_values: int) -> float:
        """Of the values that `decode` gives, as `kernels.norms` has it. Raises as `decode`."""
        ...


class InSteps:
    """What a codec does one step after the other that has nothing faster."""

    def encode_quotients(
        self: VectorCodec, values: NDArray[np.float32], divisor: np.float32, *, seed: bytes
    ) -> memoryview:
        quotients = empty_floats(values.size)
        optimizers.divide(values, divisor, quotients)
        return self.encode(quotients, seed=seed)

    def encode_parts(
        self: VectorCodec,
        values: NDArray[np.float32],
        divisor: np.float32,
        *,
        part_values: int,
        seeds: Sequence[bytes],
    ) -> list[memoryview]:
        starts = range(0, len(seeds) * part_values, part_values)
        return [
            self.encode_quotients(values[start : start + part_values], divisor, seed=seed)
            for start, seed in zip(starts, seeds, strict=True)
        ]

    def sum_of_squares(self: VectorCodec, data: Encoded, num_values: int) -> float:
        values = empty_floats(num_values)
        self.decode(data, values)
        return norms.sum_of_squares(values)


def aligned(data: Encoded, dtype: type[Scalar], offset: int, count: int) -> NDArray[Scalar]:
    """`count` numbers at byte `offset` of `data`: a read-only view, or a copy if they lie unaligned.

    Always read-only, so that a kernel is compiled once, not again for bytes that may be written to.
    """
    view = np.frombuffer(data, dtype=dtype, offset=offset, count=count)
    flags = view.flags
    if not flags.aligned:
        view = view.copy()
        flags = view.flags
    flags.writeable = False
    return view


def seed_words(seed: bytes) -> NDArray[np.uint64]:
    """A seed's four words."""
    assert len(seed) == SEED_BYTES, f"seed of {len(seed)} bytes"
    return aligned(seed, np.uint64, 0, 4)


def words_of_seeds(seeds: Sequence[bytes]) -> NDArray[np.uint64]:
    """Those of each, in a row."""
    assert all(len(seed) == SEED_BYTES for seed in seeds), f"seeds of {[len(seed) for seed in seeds]} bytes"
    return aligned(b"".join(seeds), np.uint64, 0, 4 * len(seeds)).reshape(len(seeds), 4)


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
