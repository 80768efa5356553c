"""A replay's own error: how far the same work comes out when it is rounded otherwise.

It is measured where the first comparison leaves a doubt, and there more thoroughly the nearer the case is: what turns
on one cancellation has an own error that a single draw may hit near zero.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from swarm.model.rounding import rounded_otherwise

FEWEST_DRAWS = 3
"""Replays that an own error is the largest of."""
MOST_DRAWS = 8
"""Of a claim that would be fraud, and is not clearly so."""

Errors: TypeAlias = tuple[float, ...]
"""Of one replay, in each way that it is measured."""


def own_errors(drawn: Callable[[], Sequence[float]]) -> Iterator[Errors]:
    """The largest errors of `FEWEST_DRAWS` draws and of each one more; `drawn` does the work again, and says how far it
    is from the first time. Raises as `drawn`."""
    largest: list[float] = []
    for draw in range(MOST_DRAWS):
        with rounded_otherwise(draw):
            found = drawn()
        largest = [max(pair) for pair in zip(largest, found, strict=True)] if largest else list(found)
        if draw + 1 >= FEWEST_DRAWS:
            yield tuple(largest)
