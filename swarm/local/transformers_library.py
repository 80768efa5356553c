"""The models of the transformers library, loaded without what no stage uses of it.

They import PyTorch's compiler and distributed tensors, with sympy, and scipy: for decorators, for tests of types, for
losses of other tasks. That is a fifth of a process's memory before it holds a model (65 MB), and half of the time
until it does. While transformers' own code is loaded here, it is told that PyTorch has no distributed tensors and
that there is no scipy, both of which it can do without; and the compiler is a stand-in whose decorators change
nothing. PyTorch asks for it where it draws weights on the meta device, and for sympy where it counts there. Who asks
for either later gets it.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

COMPILER = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")


class _StandIn(ModuleType):
    """A module in which each name is a decorator, with options or without."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(decorated: Any = None, *_: Any, **__: Any) -> Any:
    return decorated if callable(decorated) else _unchanged


def _no() -> bool:
    return False


def _of_vmap() -> Any:
    """What masks that are made by `torch.vmap` are made in."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Unless the process has it already."""
    if COMPILER[0] in sys.modules:
        yield
        return
    stand_in = _StandIn(COMPILER[0])
    vars(stand_in)["TransformGetItemToIndex"] = _of_vmap
    sys.modules.update(dict.fromkeys(COMPILER, stand_in))
    try:
        yield
    finally:
        for name in COMPILER:
            del sys.modules[name]


class _Undrawn(torch.overrides.TorchFunctionMode):
    """First weights are left as they are, and ranges are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        if func is torch.arange:
            given = {"device": "cpu"} | given
        return func(*args, **given)


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Modules that are made here are on the meta device, where nothing need be drawn."""
    with torch.device("meta"), _Undrawn(), _without_compiler():
        yield


def _load() -> Any:
    import transformers.utils
    from transformers.utils import import_utils

    import_utils.is_torch_distributed_available.cache_clear()
    with (
        patch.object(torch.distributed, "is_available", _no),
        patch.object(transformers.utils, "is_scipy_available", _no),
        _without_compiler(),
    ):
        import_utils.is_torch_distributed_available()  # as long as the process lives
        import transformers.masking_utils
        import transformers.modeling_utils
        import transformers.pytorch_utils
    return transformers


transformers = _load()
