"""Modules over weights that are never trained: made whole for one product at a time, and forgotten.

Gradients pass through them and leave nothing. Shapes: D values in, E values out, V rows of an embedding.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm.model.adapters.nf4 import dequantized


@dataclass(frozen=True, eq=False)
class Frozen:
    """A tensor of the base as it is kept: in its own type, or as NF4 with its scales."""

    shape: tuple[int, ...]
    kept: torch.Tensor
    scales: torch.Tensor | None = None
    """Of NF4."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Its values; not to be written to."""
        if self.scales is None:
            return self.kept.to(dtype)
        num_values = self.shape[0] * self.shape[1]
        return dequantized(self.kept, self.scales, num_values).view(self.shape).to(dtype)

    def on(self, device: torch.device) -> "Frozen":
        return replace(self, kept=self.kept.to(device), scales=None if self.scales is None else self.scales.to(device))


class FrozenLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight: Frozen, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.frozen = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.frozen, self.bias)


class FrozenEmbedding(nn.Module):
    """A family's own embedding of the rows that are asked for: only those are made whole."""

    def __init__(self, embedding: nn.Module, weight: Frozen) -> None:
        super().__init__()
        self._embedding, self.frozen = embedding, weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, places = torch.unique(ids, return_inverse=True)
        of_rows: Any = copy.copy(self._embedding)
        of_rows.padding_idx = None
        of_rows._parameters = {"weight": self.frozen.kept[rows].float()}
        looked_up: torch.Tensor = of_rows(places)
        return looked_up


class AdaptedLinear(nn.Module):
    """x W^T + b, and beside it x A^T B^T times a scale, as peft has it (Hu et al. 2021, "LoRA")."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int], *, rank: int, scale: float) -> None:
        """`sizes` are D and E; the two matrices are on the meta device."""
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(sizes[0], rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, sizes[1], bias=False, device="meta")
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.base(x) + self.lora_B(self.lora_A(x)) * self.scale
        return whole


def product(x: torch.Tensor, weight: Frozen, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, which keeps neither x nor W for its backward; rounded as autocast has it."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    made: torch.Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Frozen, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_y,) = grads
        return grad_y @ ctx.weight.dense(grad_y.dtype), None, None


def frozen_tree(module: nn.Module, path: str, tensor_of: Callable[[str], Frozen]) -> nn.Module:
    """A tree like `module`'s whose weights are the base's, but for the adapters' own, which stay as they are.

    `tensor_of` is given a parameter's name in the tree as it was before anything was adapted.
    """
    made: Any = copy.copy(module)
    if isinstance(module, AdaptedLinear):
        made._modules = {**module._modules, "base": frozen_tree(module.base, path, tensor_of)}
        adapted: nn.Module = made
        return adapted
    if isinstance(module, nn.Linear):
        bias = None if module.bias is None else tensor_of(f"{path}bias").dense(torch.float32)
        return FrozenLinear(tensor_of(f"{path}weight"), bias)
    if isinstance(module, nn.Embedding):
        return FrozenEmbedding(module, tensor_of(f"{path}weight"))
    made._parameters = {
        name: None if value is None else nn.Parameter(tensor_of(path + name).dense(torch.float32), requires_grad=False)
        for name, value in module._parameters.items()
    }
    made._modules = {
        name: None if child is None else frozen_tree(child, f"{path}{name}.", tensor_of)
        for name, child in module._modules.items()
    }
    shown: nn.Module = made
    return shown
