"""The data order: every id lies in the file, a lap visits each window once, anyone can recompute it."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.data_order import DataOrder

orders = st.builds(
    lambda tokens, length, size, chunk, seed: (tokens, length, size, chunk, seed),
    st.integers(2, 3000),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(2, 900),
    st.integers(0, 1 << 62),
)


def _order(arguments: tuple[int, int, int, int, int]) -> DataOrder:
    try:
        return DataOrder(*arguments)
    except ValueError:
        assume(False)
        raise


@settings(deadline=None)
@given(orders, st.integers(0, 10_000))
def test_sample_lies_in_the_file_for_any_id(arguments: tuple[int, int, int, int, int], number: int) -> None:
    order = _order(arguments)
    starts = order.sample_starts(MicrobatchId(number))
    assert len(starts) == order.microbatch_size
    for start in starts:
        assert start >= 0
        assert start + order.sequence_length + 1 <= order.num_tokens


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(0, 3))
def test_lap_visits_every_window_of_its_chunks_once(arguments: tuple[int, int, int, int, int], lap: int) -> None:
    order = _order(arguments)
    first = lap * order.microbatches_per_lap
    starts = [
        start
        for number in range(first, first + order.microbatches_per_lap)
        for start in order.sample_starts(MicrobatchId(number))
    ]
    per_chunk = order.microbatches_per_chunk * order.microbatch_size
    expected = [
        chunk * order.chunk_tokens + window * order.sequence_length
        for chunk in range(order.num_chunks)
        for window in range(per_chunk)
    ]
    assert sorted(starts) == expected
    # Inputs of two samples never overlap; only the last target is the next sample's first input.
    assert all(after - before >= order.sequence_length for before, after in pairwise(sorted(starts)))


def test_chunks_are_permuted_anew_in_each_lap_and_by_each_seed() -> None:
    def chunks(seed: int, lap: int) -> list[int]:
        order = DataOrder(num_tokens=64 * 101, sequence_length=10, microbatch_size=2, chunk_tokens=101, seed=seed)
        ids = range(lap * order.microbatches_per_lap, (lap + 1) * order.microbatches_per_lap)
        starts = [order.sample_starts(MicrobatchId(number))[0] // 101 for number in ids]
        return starts[:: order.microbatches_per_chunk]

    seen = [chunks(seed, lap) for seed in (0, 1) for lap in (0, 1)]
    assert all(sorted(order) == list(range(64)) for order in seen)
    assert len({tuple(order) for order in [*seen, list(range(64))]}) == 5


@settings(deadline=None)
@given(orders, st.integers(0, 1000))
def test_ids_of_a_chunk_are_consecutive_and_read_one_chunk(
    arguments: tuple[int, int, int, int, int], position: int
) -> None:
    order = _order(arguments)
    ids = order.ids_of_chunk(position)
    assert {order.chunk_of(MicrobatchId(number)) for number in ids} == {position}
    assert order.ids_of_chunk(position + 1).start == ids.stop
    chunks = {start // order.chunk_tokens for number in ids for start in order.sample_starts(MicrobatchId(number))}
    assert len(chunks) == 1


def test_order_is_the_same_in_another_process() -> None:
    arguments = "num_tokens=100000, sequence_length=32, microbatch_size=4, chunk_tokens=1000, seed=7"
    order = DataOrder(num_tokens=100_000, sequence_length=32, microbatch_size=4, chunk_tokens=1000, seed=7)
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
    assert (order.microbatches_per_chunk, order.num_chunks, order.microbatches_per_lap) == (5, 10, 50)
    assert [order.sample_starts(MicrobatchId(number)) for number in (0, 1, 49, 50)] == [
        [900, 945],
        [909, 954],
        [136, 181],
        [100, 145],
    ]


@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), [(8, 1000), (1000, 8)])
def test_order_refuses_data_without_a_microbatch(num_tokens: int, chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="hold no microbatch of 2 samples of 4 tokens"):
        DataOrder(num_tokens=num_tokens, sequence_length=4, microbatch_size=2, chunk_tokens=chunk_tokens, seed=0)
