"""A zoo of numeric classes on one CPU: the same stage as machines of other makes would round it.

    with computing_as("tensor-16"):
        ...  # forward and backward of a StageModel, on this thread

Products are summed as another machine sums them, or attention is another kernel's. Bits of none of these machines are
promised, only how far and which way they round: in how many partial sums, with how many bits, toward what.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""fp32 (..., M, K) and (..., K, N) to fp32 (..., M, N)."""

_aten = torch.ops.aten


def in_lanes(one: torch.Tensor, other: torch.Tensor, *, lanes: int) -> torch.Tensor:
    """Every so many-th term has an accumulator of its own, as vector registers have (AVX2: 8, AVX-512: 16)."""
    partial_sums = [one[..., lane::lanes] @ other[..., lane::lanes, :] for lane in range(min(lanes, one.shape[-1]))]
    while len(partial_sums) > 1:  # and they are added by halves
        half = (len(partial_sums) + 1) // 2
        rest = partial_sums[half:]
        partial_sums = [a + b for a, b in zip(partial_sums, rest, strict=False)] + partial_sums[len(rest) : half]
    return partial_sums[0]


def in_splits(one: torch.Tensor, other: torch.Tensor, *, splits: int) -> torch.Tensor:
    """Split-K: pieces of the terms are summed apart, and then one after another."""
    pieces = zip(one.tensor_split(splits, dim=-1), other.tensor_split(splits, dim=-2), strict=True)
    total = torch.zeros((*one.shape[:-1], other.shape[-1]))
    for left, right in pieces:
        if left.shape[-1]:
            total = total + left @ right
    return total


def in_tensor_cores(one: torch.Tensor, other: torch.Tensor, *, group: int, bits: int) -> torch.Tensor:
    """Groups of products are aligned with the sum so far to the largest exponent among them, cut off below so many bits
    and added: nothing is rounded, all is cut toward zero (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
    NVIDIA tensor cores", 2021)."""
    total = torch.zeros((*one.shape[:-1], other.shape[-1]), dtype=torch.float64)
    left, right = one.double(), other.double()
    for start in range(0, one.shape[-1], group):
        # Exact in fp64: factors have at most 11 bits, in fp32 runs 24.
        terms = left[..., start : start + group].unsqueeze(-1) * right[..., None, start : start + group, :]
        largest = torch.maximum(terms.abs().amax(dim=-2), total.abs())
        unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-300))) - (bits - 1))
        kept = torch.trunc(terms / unit.unsqueeze(-2)).sum(dim=-2) + torch.trunc(total / unit)
        total = kept * unit
    return _cut_to_fp32(total)


def _cut_to_fp32(values: torch.Tensor) -> torch.Tensor:
    unit = torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(1e-300))) - 23)
    return (torch.trunc(values / unit) * unit).float()


def in_tf32(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Factors lose all but 10 bits of their fractions. No class of a run in fp32: `StageModel` turns it off."""
    return _tf32(one) @ _tf32(other)


def _tf32(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matrix products of this thread, forward and backward, by another rule; rounded once at the end."""

    def __init__(self, product: Product) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product = product

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (_aten.mm.default, _aten.bmm.default):
            one, other = args
            return self._product(one.float(), other.float()).to(one.dtype)
        if func is _aten.addmm.default:
            added, one, other = args
            return (self._product(one.float(), other.float()) + added.float()).to(one.dtype)
        return func(*args, **(kwargs or {}))


class _PlainAttention(TorchFunctionMode):
    """By the formula, in products of their own, with scores and probabilities rounded to the run's type."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        return plain_attention(*args, **given) if func is scaled_dot_product_attention else func(*args, **given)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As PyTorch's `scaled_dot_product_attention`, without dropout."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1).to(value.dtype) @ value


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _together(*parts: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part())
        yield


def _summed(product: Product) -> Callable[[], AbstractContextManager[Any]]:
    return partial(_Products, product)


_TENSOR_8 = _summed(partial(in_tensor_cores, group=8, bits=24))
_TENSOR_16 = _summed(partial(in_tensor_cores, group=16, bits=25))

CLASSES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "native": partial(_threads, 1),
    "threads-2": partial(_threads, 2),
    "threads-4": partial(_threads, 4),
    "lanes-8": _summed(partial(in_lanes, lanes=8)),
    "lanes-16": _summed(partial(in_lanes, lanes=16)),
    "split-2": _summed(partial(in_splits, splits=2)),
    "split-7": _summed(partial(in_splits, splits=7)),
    "math-attention": partial(sdpa_kernel, SDPBackend.MATH),
    "plain-attention": _PlainAttention,
    "tensor-8": _TENSOR_8,
    "tensor-16": _TENSOR_16,
    "tensor-16-plain": partial(_together, _TENSOR_16, _PlainAttention),
}
"""Honest ones, by name."""


def device_of(name: str) -> str:
    """Where a class is computed: the emulated ones on the CPU, any other name is that of a device of PyTorch."""
    return "cpu" if name in CLASSES else name


def computing_as(name: str) -> AbstractContextManager[Any]:
    """A class's own way with products and attention; a device has its own without our help."""
    return CLASSES[name]() if name in CLASSES else nullcontext()


TF32 = _summed(in_tf32)
"""In a run in fp32 it is a cheat."""
