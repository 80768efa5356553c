"""Cutting layers into stages: whole, in order, and as even as an exhaustive search finds."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.pipeline.partition import even_layers

costs = st.floats(0, 6)


@settings(deadline=None)
@given(st.integers(1, 40), st.data(), costs, costs)
def test_stages_hold_all_layers_in_order(num_layers: int, draw: st.DataObject, first: float, last: float) -> None:
    num_stages = draw.draw(st.integers(1, num_layers))
    cut = even_layers(num_layers, num_stages, first_cost=first, last_cost=last)
    assert len(cut) == num_stages
    assert [layer for start, stop in cut for layer in range(start, stop)] == list(range(num_layers))
    assert all(stop > start for start, stop in cut)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 11), st.data(), costs, costs)
def test_dearest_stage_is_as_cheap_as_can_be(num_layers: int, draw: st.DataObject, first: float, last: float) -> None:
    num_stages = draw.draw(st.integers(1, num_layers))

    def dearest(cut: tuple[tuple[int, int], ...]) -> float:
        stage_costs = [float(stop - start) for start, stop in cut]
        stage_costs[0] += first
        stage_costs[-1] += last
        return max(stage_costs)

    every_cut = [
        tuple(zip((0, *inner), (*inner, num_layers), strict=True))
        for inner in combinations(range(1, num_layers), num_stages - 1)
    ]
    found = even_layers(num_layers, num_stages, first_cost=first, last_cost=last)
    assert dearest(found) == pytest.approx(min(map(dearest, every_cut)))


def test_stages_are_even_without_extra_costs() -> None:
    assert even_layers(4, 2) == ((0, 2), (2, 4))
    sizes = [stop - start for start, stop in even_layers(30, 7)]
    assert sorted(sizes) == [4, 4, 4, 4, 4, 5, 5]


def test_last_stage_is_shorter_when_the_head_is_dear() -> None:
    assert even_layers(16, 4, last_cost=4.0) == ((0, 5), (5, 10), (10, 15), (15, 16))


def test_cut_of_many_layers_is_quick() -> None:
    assert len(even_layers(512, 256, last_cost=3.0)) == 256


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 4), (3, 0), (0, 1)])
def test_cut_refuses_empty_stages(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"{num_layers} layers cannot be cut into {num_stages} stages"):
        even_layers(num_layers, num_stages)
