"""Activations between a stage's device and the wire: encoded and decoded there, so that only encoded bytes are copied.

The bytes are those of `swarm.averaging.activations` on every device. What has no kernels there is copied as it is, and
encoded on the host.
"""

import logging
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from swarm.averaging.activations import ActivationCodec, Shape, activation_codec
from swarm.averaging.encoded import Encoded, check_length
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import ActivationCodecName
from swarm.memory.kept_buffers import BUFFERS
from swarm.model.link import Link, put_bytes

log = logging.getLogger(__name__)

_LIBRARY: Any = torch.library.Library
_OPERATORS = _LIBRARY("homeswarm", "DEF")
_OPERATORS.define("encoded(Tensor rows_TD, str codec) -> Tensor")
_OPERATORS.define("decoded(Tensor body, str codec, int num_tokens, int width) -> Tensor[]")
"""Operators of PyTorch, so that a tensor's device chooses who encodes it. `encoded` gives the codec's bytes, then bytes
that are 1 where what was encoded is valid; `decoded` the rows and such bytes. Neither waits for the device."""


class Wire:
    """One codec at one device."""

    def __init__(self, name: ActivationCodecName, link: Link) -> None:
        self.codec: ActivationCodec = activation_codec(name)
        self._link = link
        there = name not in ("fp32", "int4h")  # of these there are no kernels for devices
        self._is_there = link.device.type != "cpu" and there and _has_kernels(link.device)

    def encoded(self, tensor_BLD: torch.Tensor) -> memoryview:
        """Raises LocalError for values that are not finite or not below 2^126."""
        return self.encoding(tensor_BLD)()

    def encoding(self, tensor_BLD: torch.Tensor) -> Callable[[], memoryview]:
        """`encoded` in two halves: what is returned waits for the device, in whatever thread calls it."""
        tensor_BLD = tensor_BLD.detach()
        if not self._is_there:
            fetched = self._link.fetching(tensor_BLD)
            return lambda: self.codec.encode(fetched())
        rows_TD = tensor_BLD.float().reshape(-1, tensor_BLD.shape[-1]).contiguous()
        size = self.codec.encoded_bytes((1, *rows_TD.shape))
        return partial(self._body, size, self._link.fetching(torch.ops.homeswarm.encoded(rows_TD, self.codec.name)))

    def _body(self, size: int, fetched: Callable[[], torch.Tensor]) -> memoryview:
        found = fetched().numpy()
        if not found[size:].all():
            raise LocalError("values are not finite, or 2^126 and more: no codec carries them")
        body = BUFFERS.take(size)  # what is kept for audits must not keep pinned memory
        np.frombuffer(body, dtype=np.uint8)[:] = found[:size]
        return body

    def decoded(self, body: Encoded, shape: Shape) -> torch.Tensor:
        """fp32, on the device. Raises RemoteError("malformed") for what `encoded` never gives."""
        if not self._is_there:
            return self._link.put(self.codec.decode(body, shape))
        check_length(body, self.codec.encoded_bytes(shape))
        num_tokens, width = shape[0] * shape[1], shape[2]
        there = put_bytes(self._link, body)
        rows_TD, valid = torch.ops.homeswarm.decoded(there, self.codec.name, num_tokens, width)
        if not self._link.fetch(valid).numpy().all():
            raise RemoteError("malformed", f"{self.codec.name} activations hold a scale, code or index never written")
        found: torch.Tensor = rows_TD.view(shape)
        return found


_ASKING = threading.Lock()
"""Of two peers in a process one asks after the other: an operator is given a kernel once."""
_KERNELS_ON = dict[torch.device, bool]()
"""What was found, by device."""


def _has_kernels(device: torch.device) -> bool:
    """CUDA's are written in Triton, which may be missing, and which compiles what starts them by a C compiler.

    No other GPU is touched: it may be full, or not be for this program.
    """
    if device.type != "cuda":
        return True
    with _ASKING:
        if device not in _KERNELS_ON:
            is_first = not any(_KERNELS_ON.values())
            _KERNELS_ON[device] = _starts_kernels(device)
            if is_first and _KERNELS_ON[device]:
                from kernels.gpu import activations

                _OPERATORS.impl("encoded", activations.encoded, "CUDA")
                _OPERATORS.impl("decoded", activations.decoded, "CUDA")
        return _KERNELS_ON[device]


def _starts_kernels(device: torch.device) -> bool:
    try:
        from kernels.gpu import activations

        activations.decoded(activations.encoded(torch.zeros(1, 64, device=device), "bf16")[:128], "bf16", 1, 64)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning(
            "activations are encoded on the CPU, for Triton does not work here (%s); `swarm doctor` tells more", error
        )
        return False
    return True


def _encoded(rows_TD: torch.Tensor, codec: str) -> torch.Tensor:
    """By the host's kernels."""
    named = activation_codec(codec)  # type: ignore[arg-type]
    body = torch.zeros(named.encoded_bytes((1, *rows_TD.shape)) + 1, dtype=torch.uint8)
    try:
        body[:-1] = torch.frombuffer(named.encode(rows_TD.unsqueeze(0)), dtype=torch.uint8)
    except LocalError:
        return body
    body[-1] = 1
    return body


def _decoded(body: torch.Tensor, codec: str, num_tokens: int, width: int) -> list[torch.Tensor]:
    named = activation_codec(codec)  # type: ignore[arg-type]
    try:
        rows_TD = named.decode(body.numpy().data, (1, num_tokens, width))[0]
    except RemoteError:
        return [torch.zeros(num_tokens, width), torch.zeros(1, dtype=torch.uint8)]
    return [rows_TD, torch.ones(1, dtype=torch.uint8)]


_OPERATORS.impl("encoded", _encoded, "CPU")
_OPERATORS.impl("decoded", _decoded, "CPU")
