"""A device that is not the CPU, for tests without a GPU: mixing its tensors with the host's is an error.

    from tests.pretend_device import PRETEND, counted
    model = StageModel(settings, 0, device=PRETEND)
    with counted() as copies:
        ...
    assert copies.to_device == {...}

There are as many of them as one names, such as `pretend:1` and `pretend:2`, whose tensors do not mix either. PyTorch's
own code knows of `pretend:0` alone, and makes tensors there in the midst of an operator: those mix with any.

Its tensors are the host's in a wrapper, and what is computed on it is computed by PyTorch's CPU operators on what is in
the wrappers. Attention goes by the plain formula there, so it is also another numeric class. Every copy between it and
the host is counted by type, and every operator that waits for the device and is not a copy.

It takes PyTorch's one place for a device of one's own, for the whole process, and with it autograd's idea of what an
accelerator is: where TEST_DEVICE names a GPU, the tests of devices run on that, and nothing is pretended.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE_TYPE = "pretend"
PRETEND = f"{DEVICE_TYPE}:0"
OTHERS = [os.environ.get("TEST_DEVICE", PRETEND)]
"""Devices to be mixed with CPUs."""

_aten = torch.ops.aten
_WAITS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.nonzero.default, _aten.equal.default}
_ROUNDED_BY_AUTOCAST = ("linear", "matmul", "addmm", "bmm", "scaled_dot_product_attention")


@dataclass
class Copies:
    """Bytes that crossed, by type; and what the host waited for otherwise."""

    to_device: Counter[torch.dtype] = field(default_factory=Counter)
    to_host: Counter[torch.dtype] = field(default_factory=Counter)
    num_to_device: int = 0
    num_to_host: int = 0
    waits: Counter[str] = field(default_factory=Counter)


_counting: list[Copies] = []


@contextmanager
def counted() -> Iterator[Copies]:
    """What is copied and waited for meanwhile, by any thread."""
    copies = Copies()
    _counting.append(copies)
    try:
        yield copies
    finally:
        _counting.remove(copies)


class PretendTensor(torch.Tensor):
    """Lies on the device that is not there."""

    inner: torch.Tensor
    there: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device | str) -> "PretendTensor":
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(PRETEND),
        )
        made.inner, made.there = inner, torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        """As it was named."""
        return self.there

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PretendTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is _aten._to_copy.default:
            return _moved(args[0], kwargs)
        there = {tensor.there for tensor in tensors if isinstance(tensor, cls)} - {torch.device(PRETEND)}
        if len(there) > 1:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {there}")
        if func is _aten.copy_.default:
            _count(
                args[1],
                to_host=not isinstance(args[0], cls),
                crosses=isinstance(args[0], cls) != isinstance(args[1], cls),
            )
        elif any(not isinstance(tensor, cls) and tensor.ndim > 0 for tensor in tensors):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {PRETEND} and cpu")
        if func in _WAITS:
            for copies in _counting:
                copies.waits[str(func)] += 1
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        device = there.pop() if there else torch.device(PRETEND)
        made = func(*tree_map_only(torch.Tensor, _inner, args), **tree_map_only(torch.Tensor, _inner, kwargs))
        known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, cls)}
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(
            torch.Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else cls(tensor, device), made
        )


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, PretendTensor) else tensor


def _moved(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """`_to_copy`: to another type, or across."""
    device = kwargs.pop("device", None)
    to_host = device is not None and device.type == "cpu"
    _count(tensor, to_host=to_host, crosses=to_host == isinstance(tensor, PretendTensor))
    kwargs.pop("non_blocking", None)
    made: torch.Tensor = _aten._to_copy.default(_inner(tensor), **kwargs)
    return made if to_host else PretendTensor(made, device or tensor.device)


def _count(tensor: torch.Tensor, *, to_host: bool, crosses: bool) -> None:
    if not crosses:
        return
    for copies in _counting:
        (copies.to_host if to_host else copies.to_device)[tensor.dtype] += tensor.numel() * tensor.element_size()
        if to_host:
            copies.num_to_host += 1
        else:
            copies.num_to_device += 1


class _Module(backend_registration._DummyBackendModule):
    """What PyTorch asks of a device for autocast."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return PretendTensor(torch.empty(size, dtype=dtype), device)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return PretendTensor(torch.empty_strided(size, stride, dtype=dtype), device)


def _rounding(name: str) -> Any:
    operator = getattr(_aten, name).default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.dtype == torch.float32 and tensor.device.type != "cpu"
        return tensor.to(torch.bfloat16) if there else tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tree_map_only(torch.Tensor, rounded, args), **tree_map_only(torch.Tensor, rounded, kwargs))

    return call


def _registered() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Module())
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    autocast = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _ROUNDED_BY_AUTOCAST:
        autocast.impl(name, _rounding(name))
    made = torch.library.Library("aten", "IMPL", "PrivateUse1")
    made.impl("empty.memory_format", _empty)
    made.impl("empty_strided", _empty_strided)
    return [fallback, autocast, made]


_LIBRARIES = _registered() if PRETEND in OTHERS else []
