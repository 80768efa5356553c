"""Layers cut into stages so that no stage costs much more than another."""

from itertools import pairwise


def even_layers(
    num_layers: int, num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop) of each stage; the dearest stage is as cheap as can be.

    A layer costs 1; `first_cost` (embedding) and `last_cost` (output head) come on top of the first and last stage, in
    units of a layer. Of equally dear cuts the one with the least sum of squared costs is taken.
    Raises ValueError if there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages of at least one layer")
    if min(first_cost, last_cost) < 0:
        raise ValueError(f"costs must not be negative, got {first_cost} and {last_cost}")
    if num_stages == 1:
        return ((0, num_layers),)

    # Stages between the ends differ in nothing, so only the sizes of the two ends are to be searched.
    num_middle = num_stages - 2
    choices = []
    for first in range(1, num_layers - num_middle):
        most = num_layers - num_middle - first
        for last in range(1, most + 1) if num_middle else (most,):
            small, rest = divmod(num_layers - first - last, max(1, num_middle))
            ends = (first + first_cost, last + last_cost)
            dearest = max(*ends, small + (rest > 0))
            squares = sum(cost * cost for cost in ends) + (num_middle - rest) * small**2 + rest * (small + 1) ** 2
            choices.append((dearest, squares, first, last))
    _, _, first, last = min(choices)
    small, rest = divmod(num_layers - first - last, max(1, num_middle))
    sizes = (first, *[small] * (num_middle - rest), *[small + 1] * rest, last)
    starts = [sum(sizes[:stage]) for stage in range(num_stages + 1)]
    return tuple(pairwise(starts))
