"""Activations and their gradients as bytes on the wire, token by token.

fp32 and bf16 are those of `swarm.averaging.codecs`. int8 and int4, for T = B * L tokens of D values: bf16 scales of
blocks of at most 64 or 32 values (T, K), each token's largest values in bf16 (T, J), their indices as uint16 (T, J),
codes (T, D) or, two a byte, (T, D / 2 rounded up). int4h is int4 of rows in which some tiles were turned; a scale's
sign bit tells which.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.codecs import hadamard_tiles, int4_tokens, int8_tokens
from kernels.codecs.outliers import num_outliers
from swarm.averaging.codecs import vector_codec
from swarm.averaging.encoded import Encoded, VectorCodec, aligned, check_length, too_large
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import ActivationCodecName
from swarm.memory.kept_buffers import BUFFERS

Shape = tuple[int, int, int]
"""(B, L, D): samples, tokens, values."""

MAX_WIDTH = 1 << 16
"""Values a token may have under int8 and int4: their indices are uint16."""
HALF_PLACE = np.float32(2.0**-8)
"""Of a value, that rounding it to bf16 changes at most."""


class ActivationCodec(Protocol):
    """Strict and deterministic: equal tensors give equal bytes."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, shape: Shape) -> int:
        """Exact length of an encoded tensor of shape (B, L, D)."""
        ...

    def encode(self, tensor_BLD: torch.Tensor) -> memoryview:
        """Bytes of a tensor. Raises LocalError for values that are not finite or not below 2^126."""
        ...

    def decode(self, data: Encoded, shape: Shape) -> torch.Tensor:
        """fp32 tensor of `shape` on the CPU. Raises RemoteError("malformed") for what `encode` never writes."""
        ...

    def cells(self, said: Encoded, own: Encoded, shape: Shape) -> NDArray[np.float32]:
        """How far each value that `said` decodes to may lie, by this codec alone, from what was encoded where `own`
        was: flat, and as `laid` has both. Scales of `said` count as far as an honest one could have them that encoded
        nearly the same. Both decode."""
        ...

    def laid(self, values_BLD: NDArray[np.float32], said: Encoded) -> NDArray[np.float32]:
        """Values along the axes on which those of `said`, which decodes, were rounded; lengths stay as they are."""
        ...


def activation_codec(name: ActivationCodecName) -> ActivationCodec:
    """The codec of that name; codecs hold no state."""
    return _CODECS[name]


class _FloatCodec:
    """A vector codec that does not round by chance, on all values in order."""

    def __init__(self, vector: VectorCodec) -> None:
        self.name = vector.name
        self.vector = vector

    def encoded_bytes(self, shape: Shape) -> int:
        return self.vector.encoded_bytes(math.prod(shape))

    def encode(self, tensor_BLD: torch.Tensor) -> memoryview:
        return self.vector.encode(_rows(tensor_BLD).reshape(-1), seed=b"")

    def decode(self, data: Encoded, shape: Shape) -> torch.Tensor:
        check_length(data, self.encoded_bytes(shape))
        values = np.empty(math.prod(shape), dtype=np.float32)
        self.vector.decode(data, values)
        return torch.from_numpy(values).reshape(shape)

    def cells(self, said: Encoded, own: Encoded, shape: Shape) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.abs(self.decode(own, shape).numpy()).reshape(-1)
        values *= HALF_PLACE if self.name == "bf16" else 0.0
        return values

    def laid(self, values_BLD: NDArray[np.float32], said: Encoded) -> NDArray[np.float32]:
        return values_BLD


@dataclass(frozen=True)
class _TokenCodec:
    """Codes of a few bits with scales in blocks, and outliers aside."""

    name: str
    kernel: Any
    """`kernels.codecs.int8_tokens` or `kernels.codecs.int4_tokens`."""
    code: type[np.generic]
    codes_per_item: int
    largest_code: int

    def encoded_bytes(self, shape: Shape) -> int:
        num_tokens, width = shape[0] * shape[1], shape[2]
        return num_tokens * sum(np.dtype(dtype).itemsize * columns for dtype, columns in self._columns(width))

    def check_width(self, width: int) -> None:
        """Raises LocalError for more values than indices count."""
        if width > MAX_WIDTH:
            raise LocalError(f"{width} values a token; {self.name} counts to {MAX_WIDTH}: use bf16")

    def encode(self, tensor_BLD: torch.Tensor) -> memoryview:
        rows_TD = _rows(tensor_BLD)
        self.check_width(rows_TD.shape[1])
        data = BUFFERS.take(self.encoded_bytes((1, *rows_TD.shape)))
        arrays: list[NDArray[Any]] = []
        at = 0
        for dtype, columns in self._columns(rows_TD.shape[1]):
            array = np.frombuffer(data, dtype=dtype, offset=at, count=len(rows_TD) * columns)
            arrays.append(array.reshape(len(rows_TD), columns))
            at += array.nbytes
        if not self.kernel.encode(rows_TD, *arrays):
            raise too_large(rows_TD)
        return data

    def decode(self, data: Encoded, shape: Shape) -> torch.Tensor:
        arrays = self.arrays(data, shape)
        rows_TD = np.empty((shape[0] * shape[1], shape[2]), dtype=np.float32)
        if not self.kernel.decode(*arrays, rows_TD):
            raise RemoteError("malformed", f"{self.name} activations hold a scale, code or index never written")
        return torch.from_numpy(rows_TD).reshape(shape)

    def cells(self, said: Encoded, own: Encoded, shape: Shape) -> NDArray[np.float32]:
        """Half a code's step; of what was put aside, half a place of bf16."""
        steps_TK, own_TK = (float_of_bf16(self.arrays(data, shape)[0]) for data in (said, own))
        return self.cells_of(steps_TK, own_TK, said, own, shape)

    def laid(self, values_BLD: NDArray[np.float32], said: Encoded) -> NDArray[np.float32]:
        return values_BLD

    def cells_of(
        self, steps_TK: NDArray[np.float32], own_TK: NDArray[np.float32], said: Encoded, own: Encoded, shape: Shape
    ) -> NDArray[np.float32]:
        """`cells`, of codes with such steps where `own` has those."""
        (_, outliers_TJ, indices_TJ, _), (_, own_TJ, _, _) = (self.arrays(data, shape) for data in (said, own))
        # What was just put aside here was just not there, and then it sets its block's scale.
        may_be_code_T1 = np.abs(float_of_bf16(own_TJ)).min(axis=1, initial=np.inf, keepdims=True)
        legal_TK = np.maximum(2 * own_TK, may_be_code_T1 * np.float32(1.02 / self.largest_code))
        half_TK = np.float32(0.5) * np.minimum(steps_TK, legal_TK)
        half_TD = np.repeat(half_TK, self.kernel.BLOCK_VALUES, axis=1)[:, : shape[2]]
        np.put_along_axis(half_TD, indices_TJ.astype(np.int64), np.abs(float_of_bf16(outliers_TJ)) * HALF_PLACE, axis=1)
        return half_TD.reshape(-1)

    def arrays(self, data: Encoded, shape: Shape) -> list[NDArray[Any]]:
        """Scales, outliers, indices, codes. Raises RemoteError("malformed") for another length."""
        check_length(data, self.encoded_bytes(shape))
        num_tokens = shape[0] * shape[1]
        arrays: list[NDArray[Any]] = []
        at = 0
        for dtype, columns in self._columns(shape[2]):
            array = aligned(data, dtype, at, num_tokens * columns)
            arrays.append(array.reshape(num_tokens, columns))
            at += array.nbytes
        return arrays

    def _columns(self, width: int) -> list[tuple[type[np.generic], int]]:
        """Type and number of columns of each array on the wire, in order: scales, outliers, indices, codes."""
        outliers = num_outliers(width)
        blocks = -(-width // self.kernel.BLOCK_VALUES)
        codes = -(-width // self.codes_per_item)
        return [(np.uint16, blocks), (np.uint16, outliers), (np.uint16, outliers), (self.code, codes)]


class _TurnedCodec:
    """int4 of rows with turned tiles (`kernels.codecs.hadamard_tiles`)."""

    name = "int4h"

    def __init__(self) -> None:
        self._tokens = _TokenCodec(self.name, int4_tokens, np.uint8, 2, 7)

    def encoded_bytes(self, shape: Shape) -> int:
        return self._tokens.encoded_bytes(shape)

    def encode(self, tensor_BLD: torch.Tensor) -> memoryview:
        rows_TD = _rows(tensor_BLD)
        self._tokens.check_width(rows_TD.shape[1])
        turned_TD = np.empty_like(rows_TD)
        is_turned_TK = np.empty((len(rows_TD), -(-rows_TD.shape[1] // int4_tokens.BLOCK_VALUES)), dtype=np.uint8)
        if not hadamard_tiles.turn(rows_TD, turned_TD, is_turned_TK):
            raise too_large(rows_TD)
        data = self._tokens.encode(torch.from_numpy(turned_TD))
        scales = np.frombuffer(data, dtype=np.uint16, count=is_turned_TK.size)
        scales |= is_turned_TK.reshape(-1).astype(np.uint16) << np.uint16(15)
        return data

    def decode(self, data: Encoded, shape: Shape) -> torch.Tensor:
        scales_TK, is_turned_TK, outliers_TJ, indices_TJ, codes = self._arrays(data, shape)
        rows_TD = np.empty((shape[0] * shape[1], shape[2]), dtype=np.float32)
        good = int4_tokens.decode(scales_TK, outliers_TJ, indices_TJ, codes, rows_TD)
        if not good or not hadamard_tiles.turn_back(scales_TK, is_turned_TK, indices_TJ, rows_TD):
            raise RemoteError("malformed", f"{self.name} activations hold a scale, code, index or turn never written")
        return torch.from_numpy(rows_TD).reshape(shape)

    def cells(self, said: Encoded, own: Encoded, shape: Shape) -> NDArray[np.float32]:
        """As int4's. The step of a turned tile weighs more; where `own` has turned one, it could be unturned in `said`,
        with the step that its values then have."""
        scales_TK, is_turned_TK, *_ = self._arrays(said, shape)
        own_TK, own_is_turned_TK, *_ = self._arrays(own, shape)
        steps_TK = float_of_bf16(scales_TK) * np.where(is_turned_TK, hadamard_tiles.GAIN, np.float32(1.0))
        tile = int4_tokens.BLOCK_VALUES
        rows_TD = np.abs(self.decode(own, shape).numpy().reshape(len(scales_TK), shape[2]))
        whole_TD = np.pad(rows_TD, ((0, 0), (0, -shape[2] % tile)))
        unturned_TK = whole_TD.reshape(*scales_TK.shape, tile).max(axis=2, initial=0.0) * np.float32(1.02 / 7)
        plain_TK = np.where(own_is_turned_TK, unturned_TK, float_of_bf16(own_TK))
        return self._tokens.cells_of(steps_TK, plain_TK, said, own, shape)

    def laid(self, values_BLD: NDArray[np.float32], said: Encoded) -> NDArray[np.float32]:
        samples, tokens, width = values_BLD.shape
        laid_BLD = np.array(values_BLD, dtype=np.float32)
        _, is_turned_TK, *_ = self._arrays(said, (samples, tokens, width))
        hadamard_tiles.turn_orthonormal(is_turned_TK, laid_BLD.reshape(-1, width))
        return laid_BLD

    def _arrays(
        self, data: Encoded, shape: Shape
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint8]]:
        """Scales without their sign, whether tiles are turned, outliers, indices, codes."""
        signed_TK, outliers_TJ, indices_TJ, codes = self._tokens.arrays(data, shape)
        is_turned_TK = (signed_TK >> np.uint16(15)).astype(np.uint8)
        return signed_TK & np.uint16(0x7FFF), is_turned_TK, outliers_TJ, indices_TJ, codes


_CODECS: dict[ActivationCodecName, ActivationCodec] = {
    "fp32": _FloatCodec(vector_codec("fp32")),
    "bf16": _FloatCodec(vector_codec("bf16")),
    "int8": _TokenCodec("int8", int8_tokens, np.int8, 1, 127),
    "int4": _TokenCodec("int4", int4_tokens, np.uint8, 2, 7),
    "int4h": _TurnedCodec(),
}


def float_of_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """What upper halves of fp32 stand for."""
    values: NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def _rows(tensor_BLD: torch.Tensor) -> NDArray[np.float32]:
    """The tensor's tokens as rows of a contiguous array (T, D), without a copy where it is one already."""
    tensor_BLD = tensor_BLD.detach().to(device="cpu", dtype=torch.float32).contiguous()
    rows: NDArray[np.float32] = tensor_BLD.reshape(-1, tensor_BLD.shape[-1]).numpy()
    return rows
