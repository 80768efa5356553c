"""A computation rounded otherwise: by as much as rounding is, in every product, and the same for one draw."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm.model.rounding import LAST_PLACE, rounded_otherwise


def _product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A product, and the gradient of one of its factors."""
    chance = torch.Generator().manual_seed(0)
    one, other = (torch.randn((32, 32), generator=chance).to(dtype).requires_grad_() for _ in range(2))
    found = one @ other
    found.sum().backward()
    assert one.grad is not None
    return found.detach(), one.grad


@pytest.mark.parametrize("dtype", list(LAST_PLACE))
def test_products_and_their_gradients_move_by_a_unit_of_their_last_place(dtype: torch.dtype) -> None:
    plain = _product(dtype)
    with rounded_otherwise(0):
        moved = _product(dtype)
    with rounded_otherwise(0):
        again = _product(dtype)
    with rounded_otherwise(1):
        other = _product(dtype)
    for usual, one, two, three in zip(plain, moved, again, other, strict=True):
        off = ((one - usual).float() / usual.float()).abs()
        assert 0 < float(off.max()) <= 2.01 * LAST_PLACE[dtype]  # moved by one, and rounded again
        assert float((one != usual).float().mean()) > 0.2
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert all(map(torch.equal, plain, _product(dtype)))


def test_scores_of_attention_move_by_as_much_as_a_kernel_rounds_them() -> None:
    chance = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn((1, 1, 8, 16), generator=chance) * 4 for _ in range(3))
    plain = scaled_dot_product_attention(queries, keys, values)
    with rounded_otherwise(0):
        moved = scaled_dot_product_attention(queries, keys, values)
    assert 0 < float((moved - plain).norm() / plain.norm()) < 100 * LAST_PLACE[torch.float32]
