"""Attention by the formula is PyTorch's, forward and backward, but for how it rounds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm.model import attention
from swarm.model.attention import attention_by_formula

Attention = Callable[..., torch.Tensor]


def _computed(by: Attention, dtype: torch.dtype, **given: Any) -> list[torch.Tensor]:
    """Output, and gradients of queries, keys and values, of two heads to each of those."""
    chance = torch.Generator().manual_seed(0)
    shapes = (2, 4, 12, 16), (2, 2, 12, 16), (2, 2, 12, 16)
    inputs = [torch.randn(shape, generator=chance).to(dtype).requires_grad_() for shape in shapes]
    found = by(*inputs, enable_gqa=True, **given)
    found.backward(torch.randn(found.shape, generator=chance).to(dtype))
    gradients = [part.grad for part in inputs if part.grad is not None]
    return [found.detach(), *gradients]


def _off(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(ones, others, strict=True)
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


_MASK = torch.ones((12, 12), dtype=torch.bool).tril().logical_and(torch.ones((12, 12), dtype=torch.bool).triu(-4))
_GIVEN: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "of a window": {"attn_mask": _MASK},
    "of documents": {"attn_mask": _MASK.expand(2, 1, 12, 12)},
    "added": {"attn_mask": torch.zeros((12, 12)).masked_fill(~_MASK, -1e9), "scale": 0.1},
    "all": {},
}


@pytest.mark.parametrize("given", _GIVEN.values(), ids=_GIVEN)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("held", [attention.MAX_SCORES, 8 * 12 * 5])
def test_it_computes_what_the_machines_own_does(
    given: dict[str, Any], fused: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many queries it takes at a time."""
    monkeypatch.setattr(attention, "MAX_SCORES", held)
    mine = partial(attention_by_formula, fused=fused)
    assert (
        _off(_computed(mine, torch.float32, **given), _computed(scaled_dot_product_attention, torch.float32, **given))
        < 2e-6
    )


def test_in_bf16_it_rounds_in_other_places() -> None:
    ways = [partial(attention_by_formula, fused=fused) for fused in (False, True)]
    apart, fused, own = (
        _computed(way, torch.bfloat16, is_causal=True) for way in (*ways, scaled_dot_product_attention)
    )
    for one, other in ((apart, fused), (apart, own)):
        assert 0 < _off(one, other) < 1e-2


def test_a_fused_kernel_leaves_in_the_scores_what_its_output_lost() -> None:
    """What is added to all scores of a row changes no probability: the gradients of a row's scores sum to zero, and
    with equal keys so does the query's; but not beside an output that is rounded."""
    chance = torch.Generator().manual_seed(0)
    key = torch.ones((1, 1, 8, 4), dtype=torch.bfloat16)
    spread, gradient = (torch.randn((1, 1, 8, 4), generator=chance).bfloat16() for _ in range(2))
    value = 8 + spread
    found = []
    for fused in (False, True):
        query = torch.randn((1, 1, 8, 4), generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        attention_by_formula(query, key, value, fused=fused).backward(gradient)
        assert query.grad is not None
        found.append(float(query.grad.norm()))
    apart, fused_one = found
    assert fused_one > 3 * apart


def test_under_autocast_it_computes_in_its_type() -> None:
    given = [torch.ones((1, 1, 4, 8)) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_by_formula(*given, fused=True).dtype == torch.bfloat16


def test_what_drops_some_is_refused() -> None:
    given = [torch.ones((1, 1, 4, 8)) for _ in range(3)]
    with pytest.raises(NotImplementedError, match=r"dropout of 0\.1"):
        attention_by_formula(*given, dropout_p=0.1, fused=True)
