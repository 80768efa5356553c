"""The same computation with every product rounded otherwise, by chance: what rounding does to just this work.

Two honest machines differ by how they round. How far that leads is a matter of the work: nowhere in most, far in
gradients that are what a cancellation leaves. Whoever replays work measures it by replaying it again, in the run's own
type and on the same device, with each result of a matrix product moved by up to one unit of its last place, and each
query of attention scaled by as little, as a kernel does that rounds its scores (Monte Carlo arithmetic: Parker, 1997).
Other orders of the sums alone are no measure: kernels of other make also round in other places. Attention has two ways
to do so (`swarm.model.attention`); draws take the machine's own kernel and these two in turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.model.attention import attention_by_formula

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

LAST_PLACE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-21}
"""Of a result, relative: in bf16 a unit of its last place; in fp32 what many terms are off by, cut off when summed."""


@contextmanager
def rounded_otherwise(draw: int) -> Iterator[None]:
    """Within, this thread's products and attention are rounded by draw number `draw`, forward and backward."""
    chance = _Chance(draw)
    with _InAttention(chance, draw), _InProducts(chance):
        yield


_KERNELS: tuple[Callable[..., torch.Tensor], ...] = (
    scaled_dot_product_attention,
    partial(attention_by_formula, fused=False),
    partial(attention_by_formula, fused=True),
)
"""Of draws, in turn: `FEWEST_DRAWS` of an own error have all of them."""


class _Chance:
    """Factors near 1, one after another."""

    def __init__(self, draw: int) -> None:
        self._draw = draw
        self._generators: dict[torch.device, torch.Generator] = {}

    def moved(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """`values`, each within a unit of its last place, by factors of that shape."""
        place = LAST_PLACE.get(values.dtype)
        if place is None:
            return values
        # What is no GPU draws as the CPU does.
        where = values.device if values.device.type == "cuda" else torch.device("cpu")
        generator = self._generators.get(where)
        if generator is None:
            generator = self._generators[where] = torch.Generator(where).manual_seed(self._draw)
        drawn = torch.rand(tuple(shape), generator=generator, device=where).to(values.device)
        return (values.float() * drawn.mul_(2 * place).add_(1 - place)).to(values.dtype)


class _InProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of matrices, below autograd: also those of backward."""

    def __init__(self, chance: _Chance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chance = chance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return self._chance.moved(found, found.shape) if func in _PRODUCTS else found


class _InAttention(TorchFunctionMode):
    """By the draw's kernel; and whole rows of scores are moved alike, by their query: a kernel that rounds them moves
    each by as much."""

    def __init__(self, chance: _Chance, draw: int) -> None:
        super().__init__()
        self._chance = chance
        self._kernel = _KERNELS[draw % len(_KERNELS)]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            queries, *others = args
            args = (self._chance.moved(queries, (*queries.shape[:-1], 1)), *others)
            func = self._kernel
        return func(*args, **given)
