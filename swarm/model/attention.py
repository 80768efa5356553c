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
from typing import Any

import torch

MAX_SCORES = 1 << 24
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
    (samples, heads, queries, size), keys = query_BHLE.shape, key_BGSE.shape[2]
    query, key, value = (part.to(dtype) for part in (query_BHLE, key_BGSE, value_BGSE))
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    scale = scale if scale is not None else 1 / math.sqrt(size)
    if is_causal:
        attn_mask = torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril()
    rows, found = max(1, MAX_SCORES // (samples * heads * keys)), []
    for first in range(0, queries, rows):
        mask = attn_mask
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            mask = attn_mask[..., first : first + rows, :]
        some = query[:, :, first : first + rows]
        found.append(_OfSomeQueries.apply(some, key, value, mask, scale, fused))  # type: ignore[no-untyped-call]
    return torch.cat(found, dim=-2)


class _OfSomeQueries(torch.autograd.Function):
    """All of one type, and as many heads of each; no scores are kept for backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, scale: float, fused: bool) -> Any:
        probabilities = _probabilities(query, key, mask, scale, fused)
        found = _product(probabilities.to(value.dtype), value, fused).to(value.dtype)
        ctx.save_for_backward(query, key, value, mask, found)
        ctx.scale, ctx.fused = scale, fused
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (query, key, value, mask, found), (gradient,), fused = ctx.saved_tensors, gradients, ctx.fused
        dtype, gradient = value.dtype, gradient.to(value.dtype)
        probabilities = _probabilities(query, key, mask, ctx.scale, fused)
        of_value = _product(probabilities.to(dtype).transpose(-1, -2), gradient, fused).to(dtype)
        of_probabilities = _product(gradient, value.transpose(-1, -2), fused).float()
        weighed = gradient.float() * found.float() if fused else probabilities * of_probabilities
        of_scores = probabilities * (of_probabilities - weighed.sum(-1, keepdim=True))
        of_products = (of_scores * ctx.scale).to(dtype)
        of_query = _product(of_products, key, fused).to(dtype)
        of_key = _product(of_products.transpose(-1, -2), query, fused).to(dtype)
        return of_query, of_key, of_value, None, None, None


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float, fused: bool
) -> torch.Tensor:
    """fp32."""
    scores = _product(query, key.transpose(-1, -2), fused).float() * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _product(one: torch.Tensor, other: torch.Tensor, fused: bool) -> torch.Tensor:
    """In fp32 where it is `fused` with what comes after it."""
    return one.float() @ other.float() if fused else one @ other
