"""Attention by the formula, rounded as a kernel of one make or another does: beside a machine's own, for replays that
round otherwise (`swarm.model.rounding`).

Kernels differ in two ways that no other order of a sum is like. Where each product is a kernel of its own, scores and
their gradients are rounded to the type that is computed in. A fused kernel does not round them, but in backward takes
the mean gradient of a row's probabilities from its *rounded* output (Dao et al., "FlashAttention", 2022, algorithm 4):
what is rounded away there is added to every score of the row.

Scores are held for a few queries at a time, and computed again in backward. Shapes: B samples, H heads, G of keys and
values, L queries, S keys, E values of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MAX_SCORES = 1 << 22
"""Held at once, in fp32."""


def attention_by_formula(
    query_BHLE: torch.Tensor,
    key_BGSE: torch.Tensor,
    value_BGSE: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fused: bool,
) -> torch.Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` computes of the same arguments, where nothing is dropped;
    rounded as a `fused` kernel does, or as products and a softmax do that are kernels of their own."""
    if dropout_p:
        raise NotImplementedError(f"attention with a dropout of {dropout_p} comes out another way each time")
    device = query_BHLE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_BHLE.dtype
    (samples, heads, _, size), keys = query_BHLE.shape, key_BGSE.shape[2]
    query, key, value = (part.to(dtype) for part in (query_BHLE, key_BGSE, value_BGSE))
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    scale = scale if scale is not None else 1 / math.sqrt(size)
    rows = max(1, MAX_SCORES // (samples * heads * keys))
    kernel = _Kernel(scale, fused, attn_mask, is_causal, rows)
    found: torch.Tensor = _ByFormula.apply(query, key, value, kernel)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Kernel:
    scale: float
    fused: bool
    mask: torch.Tensor | None
    is_causal: bool
    rows: int
    """Queries at a time."""

    def pieces(self, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
        """Queries, and the keys that any of them may look at."""
        for first in range(0, num_queries, self.rows):
            last = min(num_queries, first + self.rows)
            yield slice(first, last), slice(0, min(num_keys, last) if self.is_causal else num_keys)

    def probabilities(self, query: torch.Tensor, key: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
        """fp32."""
        scores = self.product(query, key.transpose(-1, -2)).float() * self.scale
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(queries.start)
            scores = scores.masked_fill(~seen, float("-inf"))
        elif self.mask is not None:
            mask = self.mask[..., queries, keys] if self.mask.shape[-2] > 1 else self.mask
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1)

    def product(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """In fp32 where it is fused with what comes after it."""
        return one.float() @ other.float() if self.fused else one @ other


class _ByFormula(torch.autograd.Function):
    """All of one type, and as many heads of each; no scores are kept for backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, kernel: _Kernel) -> Any:
        found = []
        for queries, keys in kernel.pieces(query.shape[2], key.shape[2]):
            probabilities = kernel.probabilities(query[:, :, queries], key[:, :, keys], queries, keys)
            found.append(kernel.product(probabilities.to(value.dtype), value[:, :, keys]).to(value.dtype))
        whole = torch.cat(found, dim=2)
        ctx.save_for_backward(query, key, value, whole)
        ctx.kernel = kernel
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (query, key, value, whole), kernel = ctx.saved_tensors, ctx.kernel
        gradient, dtype = gradients[0].to(value.dtype), value.dtype
        of_key, of_value = (torch.zeros(part.shape, device=part.device) for part in (key, value))
        of_query = []
        for queries, keys in kernel.pieces(query.shape[2], key.shape[2]):
            q, g, k, v = query[:, :, queries], gradient[:, :, queries], key[:, :, keys], value[:, :, keys]
            probabilities = kernel.probabilities(q, k, queries, keys)
            of_value[:, :, keys] += kernel.product(probabilities.to(dtype).transpose(-1, -2), g)
            of_probabilities = kernel.product(g, v.transpose(-1, -2)).float()
            weighed = g.float() * whole[:, :, queries].float() if kernel.fused else probabilities * of_probabilities
            of_scores = probabilities * (of_probabilities - weighed.sum(-1, keepdim=True))
            of_products = (of_scores * kernel.scale).to(dtype)
            of_query.append(kernel.product(of_products, k).to(dtype))
            of_key[:, :, keys] += kernel.product(of_products.transpose(-1, -2), q)
        return torch.cat(of_query, dim=2), of_key.to(dtype), of_value.to(dtype), None
