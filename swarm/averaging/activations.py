"""Activations and their gradients as bytes on the wire, token by token.

fp32 and bf16 are those of `swarm.averaging.codecs`. int8 and int4, for T = B * L tokens of D values: bf16 scales of
blocks of at most 64 or 32 values (T, K), each token's largest values in bf16 (T, J), their indices as uint16 (T, J),
codes (T, D) or, two a byte, (T, D / 2 rounded up).
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.codecs import int4_tokens, int8_tokens
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
        was: flat. Scales of `said` count as far as an honest one could have them that encoded nearly the same. Both
        decode."""
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

    def encode(self, tensor_BLD: torch.Tensor) -> memoryview:
        rows_TD = _rows(tensor_BLD)
        if rows_TD.shape[1] > MAX_WIDTH:
            raise LocalError(f"{rows_TD.shape[1]} values a token; {self.name} counts to {MAX_WIDTH}: use bf16")
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
        arrays = self._arrays(data, shape)
        rows_TD = np.empty((shape[0] * shape[1], shape[2]), dtype=np.float32)
        if not self.kernel.decode(*arrays, rows_TD):
            raise RemoteError("malformed", f"{self.name} activations hold a scale, code or index never written")
        return torch.from_numpy(rows_TD).reshape(shape)

    def cells(self, said: Encoded, own: Encoded, shape: Shape) -> NDArray[np.float32]:
        """Half a code's step; of what was put aside, half a place of bf16."""
        (scales_TK, outliers_TJ, indices_TJ, _), (own_TK, own_TJ, _, _) = (
            self._arrays(data, shape) for data in (said, own)
        )
        # What was just put aside here was just not there, and then it sets its block's scale.
        may_be_code_T1 = np.abs(float_of_bf16(own_TJ)).min(axis=1, initial=np.inf, keepdims=True)
        legal_TK = np.maximum(2 * float_of_bf16(own_TK), may_be_code_T1 * np.float32(1.02 / self.largest_code))
        half_TK = np.float32(0.5) * np.minimum(float_of_bf16(scales_TK), legal_TK)
        half_TD = np.repeat(half_TK, self.kernel.BLOCK_VALUES, axis=1)[:, : shape[2]]
        np.put_along_axis(half_TD, indices_TJ.astype(np.int64), np.abs(float_of_bf16(outliers_TJ)) * HALF_PLACE, axis=1)
        return half_TD.reshape(-1)

    def _arrays(self, data: Encoded, shape: Shape) -> list[NDArray[Any]]:
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


_CODECS: dict[ActivationCodecName, ActivationCodec] = {
    "fp32": _FloatCodec(vector_codec("fp32")),
    "bf16": _FloatCodec(vector_codec("bf16")),
    "int8": _TokenCodec("int8", int8_tokens, np.int8, 1, 127),
    "int4": _TokenCodec("int4", int4_tokens, np.uint8, 2, 7),
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
