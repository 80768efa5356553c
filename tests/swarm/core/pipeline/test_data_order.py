"""The data order: every id lies in its source, a lap visits each slice once, anyone can recompute it."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.data_order import SLICES, DataOrder
from swarm.core.pipeline.permutation import permuted

orders = st.builds(
    lambda tokens, length, size, chunk, seed: (tokens, length, size, chunk, seed),
    st.integers(2, 3000),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(2, 900),
    st.integers(0, 1 << 62),
)
weights = st.lists(st.integers(1, 9), max_size=3)


def _order(arguments: tuple[int, int, int, int, int], shares: list[int] | None = None) -> DataOrder:
    each = arguments[0] // max(1, len(shares or ()))
    mixture = tuple((number * each, each, weight) for number, weight in enumerate(shares or ()))
    try:
        return DataOrder(*arguments, mixture)
    except ValueError:
        assume(False)
        raise


def _slice_starts(order: DataOrder, count: int) -> list[int]:
    """Of the first slices in the order."""
    chunks = range(-(-count // order.slices_per_chunk))
    return [start for position in chunks for start, _ in order.slices_of_chunk(position)][:count]


@given(st.integers(1, 500), st.binary(max_size=8))
def test_a_permutation_takes_each_place_once(size: int, key: bytes) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@settings(deadline=None)
@given(orders, weights, st.integers(0, 10_000))
def test_sample_lies_in_one_source_for_any_id(
    arguments: tuple[int, int, int, int, int], shares: list[int], number: int
) -> None:
    order = _order(arguments, shares)
    starts = order.sample_starts(MicrobatchId(number))
    assert len(starts) == order.microbatch_size
    for start in starts:
        held = [first <= start and start + order.sequence_length < first + size for first, size, _ in order._sources]
        assert any(held)


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(0, 3))
def test_lap_visits_every_slice_once(arguments: tuple[int, int, int, int, int], lap: int) -> None:
    order = _order(arguments)
    starts = _slice_starts(order, (lap + 1) * order.num_slices)[lap * order.num_slices :]
    assert sorted(starts) == [number * order.slice_tokens for number in range(order.num_slices)]


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(0, 1000))
def test_ids_of_a_chunk_are_consecutive_and_read_windows_of_its_slices_once(
    arguments: tuple[int, int, int, int, int], position: int
) -> None:
    order = _order(arguments)
    ids = order.ids_of_chunk(position)
    assert {order.chunk_of(MicrobatchId(number)) for number in ids} == {position}
    assert order.ids_of_chunk(position + 1).start == ids.stop
    slices = Counter(order.slices_of_chunk(position))
    starts = sorted(start for number in ids for start in order.sample_starts(MicrobatchId(number)))
    for start in starts:
        assert any(first <= start and start + order.sequence_length < stop for first, stop in slices)
    if len(slices) == order.slices_per_chunk:  # a set of fewer slices gives some twice
        assert len(set(starts)) == len(starts)
        assert all(after - before >= order.sequence_length for before, after in pairwise(starts))


def test_slices_are_permuted_anew_in_each_lap_and_by_each_seed_and_windows_begin_elsewhere() -> None:
    seen, begins = [], []
    for seed in (0, 1):
        order = DataOrder(num_tokens=64 * 108, sequence_length=10, microbatch_size=2, chunk_tokens=16 * 108, seed=seed)
        starts = _slice_starts(order, 2 * 64)
        seen += [tuple(starts[:64]), tuple(starts[64:])]
        for lap in (0, 1):
            ids = range(lap * order.microbatches_per_lap, (lap + 1) * order.microbatches_per_lap)
            windows = [start for number in ids for start in order.sample_starts(MicrobatchId(number))]
            begins.append(Counter(start % 108 for start in windows if start < 108))
    assert len({*seen, tuple(range(0, 64 * 108, 108))}) == 5
    assert len({tuple(sorted(begin)) for begin in begins}) > 1


def test_a_microbatch_is_of_as_many_places_as_its_chunk_and_chunks_of_the_whole_set() -> None:
    order = DataOrder(num_tokens=1 << 20, sequence_length=16, microbatch_size=8, chunk_tokens=16 * 257, seed=1)
    assert order.slices_per_chunk == SLICES
    places = [sorted(start // order.slice_tokens for start in order.sample_starts(MicrobatchId(n))) for n in range(32)]
    assert sum(len(set(one)) for one in places) / len(places) > 5
    assert len({place for one in places for place in one}) == SLICES
    assert max(places[0]) - min(places[0]) > order.num_slices // 4


def test_a_mixture_holds_to_its_weights_in_each_cycle_whatever_the_sizes() -> None:
    mixture = ((0, 5000, 3), (5000, 50_000, 5), (60_000, 900, 2))
    order = DataOrder(61_000, 9, 2, 160, seed=3, mixture=mixture)
    ends = [first + size for first, size, _ in mixture]
    sources = [sum(start >= end for end in ends) for start in _slice_starts(order, 3000)]
    for begin in range(0, 3000, 10):
        assert Counter(sources[begin : begin + 10]) == {0: 3, 1: 5, 2: 2}
    assert len({tuple(sources[begin : begin + 10]) for begin in range(0, 3000, 10)}) > 50


def test_order_is_the_same_in_another_process() -> None:
    arguments = "100000, 32, 4, 1000, 7, ((0, 60000, 1), (60000, 40000, 2))"
    order = DataOrder(100_000, 32, 4, 1000, 7, ((0, 60_000, 1), (60_000, 40_000, 2)))
    program = (
        "from swarm.core.pipeline.data_order import DataOrder\n"
        f"order = DataOrder({arguments})\n"
        "print([order.sample_starts(number) for number in (0, 1, 699, 700, 12345)])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5"}
    )
    assert printed.stdout.strip() == str([order.sample_starts(MicrobatchId(n)) for n in (0, 1, 699, 700, 12345)])


def test_order_is_the_golden_one() -> None:
    order = DataOrder(num_tokens=1000, sequence_length=9, microbatch_size=2, chunk_tokens=100, seed=3)
    assert (order.microbatches_per_chunk, order.num_slices, order.microbatches_per_lap) == (5, 100, 50)
    assert [order.sample_starts(MicrobatchId(number)) for number in (0, 1, 49, 50)] == GOLDEN


GOLDEN = [[610, 730], [620, 580], [150, 750], [110, 830]]


@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), [(8, 1000), (1000, 8)])
def test_order_refuses_data_without_a_microbatch(num_tokens: int, chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="hold no microbatch of 2 samples of 4 tokens"):
        DataOrder(num_tokens=num_tokens, sequence_length=4, microbatch_size=2, chunk_tokens=chunk_tokens, seed=0)
