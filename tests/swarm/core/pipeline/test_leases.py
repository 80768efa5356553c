"""Leases: every id to one member, once, and none forgotten, whoever comes and goes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable, OpenChunk

PEERS = tuple(PeerId(f"peer {number}") for number in range(5))
ORDER = DataOrder(num_tokens=4 * 80, sequence_length=4, microbatch_size=2, chunk_tokens=80, seed=1)
A_CHUNK = ORDER.microbatches_per_chunk


def test_the_order_under_test_has_chunks_of_some_ids() -> None:
    assert A_CHUNK == 8


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), ids_each=st.integers(1, 30))
def test_every_id_is_used_once_and_none_is_forgotten(seed: int, ids_each: int) -> None:
    rng = random.Random(seed)
    table, used = LeaseTable(), set[int]()
    for _ in range(25):
        members = rng.sample(PEERS, rng.randint(1, len(PEERS)))
        taken: list[MicrobatchId] = []
        for peer in PEERS:
            ids = table.ids_of(peer)
            assert ids == sorted(ids)
            for number in ids[: rng.randint(0, len(ids))]:
                if rng.random() < 0.9:  # a microbatch may fail; its id stays
                    taken.append(number)
        rng.shuffle(taken)
        before = table
        table = table.advance(consumed=taken, members=members, order=ORDER, ids_each=ids_each)
        assert not used & set(taken)
        used |= set(taken)
        assert table.consumed == len(used)
        held = [number for peer in members for number in table.ids_of(peer)]
        everything = [n for chunk in table.open_chunks for start, stop in chunk.left for n in range(start, stop)]
        assert len(set(everything)) == len(everything)
        assert set(held) <= set(everything)
        assert used.isdisjoint(everything)
        assert used | set(everything) == set(range(table.next_chunk * A_CHUNK))  # none is forgotten
        for peer in PEERS:
            ids = table.ids_of(peer)
            assert len(ids) >= ids_each if peer in members else ids == []
            if peer in members:  # what a member holds is not taken from it
                assert set(before.ids_of(peer)) - set(taken) <= set(ids)
        assert LeaseTable.from_value(table.to_value()) == table
        assert LeaseTable.from_value(unpack(pack(table.to_value()), max_bytes=1 << 20)) == table


def test_a_leavers_chunk_goes_to_another_before_a_new_one_is_begun() -> None:
    first, second = PEERS[:2]
    table = LeaseTable().advance(consumed=(), members=(first, second), order=ORDER, ids_each=4)
    assert (table.ids_of(first), table.ids_of(second)) == (list(range(8)), list(range(8, 16)))
    used = [MicrobatchId(number) for number in (0, 1, 3, 8, 9, 10, 11, 12, 13, 14, 15)]
    table = table.advance(consumed=used, members=(second,), order=ORDER, ids_each=4)
    assert table.ids_of(second) == [2, 4, 5, 6, 7]
    assert table.next_chunk == 2
    assert table.open_chunks == (OpenChunk(0, second, ((2, 3), (4, 8))),)


def test_the_table_does_not_depend_on_the_order_of_what_is_certified() -> None:
    ids = [MicrobatchId(number) for number in range(20)]
    start = LeaseTable().advance(consumed=(), members=PEERS, order=ORDER, ids_each=9)
    one = start.advance(consumed=ids, members=PEERS[:3], order=ORDER, ids_each=9)
    other = start.advance(consumed=reversed(ids), members=PEERS[2::-1], order=ORDER, ids_each=9)
    assert one == other


def test_ids_never_leased_do_not_count() -> None:
    table = LeaseTable().advance(consumed=(), members=PEERS[:1], order=ORDER, ids_each=1)
    claimed = [MicrobatchId(number) for number in (3, 500, 1 << 60)]
    after = table.advance(consumed=claimed, members=PEERS[:1], order=ORDER, ids_each=1)
    assert after.consumed == 1
    assert after.ids_of(PEERS[0]) == [0, 1, 2, 4, 5, 6, 7]


def test_large_chunks_stay_small_on_the_wire() -> None:
    order = DataOrder(num_tokens=1 << 26, sequence_length=128, microbatch_size=8, chunk_tokens=1 << 24, seed=1)
    table = LeaseTable().advance(consumed=(), members=PEERS, order=order, ids_each=100)
    taken = [number for peer in PEERS for number in table.ids_of(peer)[:100]]
    table = table.advance(consumed=taken, members=PEERS, order=order, ids_each=100)
    assert sum(chunk.num_left for chunk in table.open_chunks) > 80_000
    assert len(pack(table.to_value())) < 300


GOOD: Value = {"next_chunk": 3, "consumed": 5, "held": [["", [[1, 10, 12]]], ["a", [[0, 2, 4, 6, 8], [2, 20, 24]]]]}


def test_a_well_formed_table_is_read() -> None:
    table = LeaseTable.from_value(GOOD)
    assert table.to_value() == GOOD
    assert table.ids_of(PeerId("a")) == [2, 3, 6, 7, 20, 21, 22, 23]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"next_chunk": 3, "consumed": 5},
        {"next_chunk": 3, "consumed": 5, "held": [], "more": 1},
        {"next_chunk": -1, "consumed": 5, "held": []},
        {"next_chunk": 3, "consumed": True, "held": []},
        {"next_chunk": 3, "consumed": 5, "held": {}},
        *[
            {"next_chunk": 3, "consumed": 5, "held": held}
            for held in (
                ["a"],
                [["a"]],
                [["a", []]],
                [["a", [[]]]],
                [["a", [[0]]]],
                [["a", [[0, 1]]]],
                [["a", [[0, 1, 2, 3]]]],
                [["a", [[0, 2, 1]]]],
                [["a", [[0, 1, 1]]]],
                [["a", [[0, 1, 2, 2, 3]]]],
                [["a", [[0, 1.0, 2]]]],
                [["a", [[0, -1, 2]]]],
                [["a", [[3, 1, 2]]]],
                [["a", [[1, 1, 2], [0, 3, 4]]]],
                [["a", [[0, 1, 2], [0, 3, 4]]]],
                [["a", [[0, 1, 2]]], ["b", [[0, 3, 4]]]],
                [["a", [[0, 1, 5]]], ["b", [[1, 3, 7]]]],
                [["b", [[0, 1, 2]]], ["a", [[1, 3, 4]]]],
                [["a", [[0, 1, 2]]], ["a", [[1, 3, 4]]]],
                [["a" * 65, [[0, 1, 2]]]],
                [[1, [[0, 1, 2]]]],
                [["a", 7]],
                [["a", [7]]],
                [["a", [[0, 0, 1 << 62]]]],
            )
        ],
    ],
)
def test_junk_is_refused(value: Value) -> None:
    with pytest.raises(RemoteError) as caught:
        LeaseTable.from_value(value)
    assert caught.value.kind == "malformed"


def test_what_is_skipped_is_nobodys_and_everything_else_is_taken_once() -> None:
    table = LeaseTable().advance(consumed=(), members=PEERS[:2], order=ORDER, ids_each=8)
    table = table.advance(consumed=table.ids_of(PEERS[0])[:3], members=PEERS[:2], order=ORDER, ids_each=8)
    before = table.consumed
    # Within an open chunk, over the edge of one that is not begun, and one that is not begun at all.
    ahead = table.next_chunk * A_CHUNK
    ranges = [(4, 6), (ahead - 1, ahead + 2), (ahead + A_CHUNK, ahead + 2 * A_CHUNK)]
    skipped = {number for start, stop in ranges for number in range(start, stop)}
    table = table.skipping(ranges, ORDER)
    assert LeaseTable.from_value(table.to_value()) == table
    taken = set[int](range(3))
    for _ in range(12):
        table = table.advance(consumed=(), members=PEERS[1:3], order=ORDER, ids_each=8)
        ids = [*table.ids_of(PEERS[1]), *table.ids_of(PEERS[2])]
        assert skipped.isdisjoint(ids)
        assert taken.isdisjoint(ids)
        taken |= set(ids)
        table = table.advance(consumed=ids, members=PEERS[1:3], order=ORDER, ids_each=8)
    assert table.consumed == before + len(taken) - 3
    assert set(range(max(taken))) <= taken | skipped


def test_too_much_to_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="ahead of the data"):
        LeaseTable().skipping([(1 << 40, (1 << 40) + 1)], ORDER)
    table = LeaseTable(1, (OpenChunk(0, PEERS[0], ((0, 1 << 14),)),))
    with pytest.raises(ValueError, match="ranges"):
        table.skipping([(number, number + 1) for number in range(1, 1 << 14, 2)], ORDER)


def test_who_holds_an_id_is_found_by_its_runs() -> None:
    table = LeaseTable().advance(consumed=(), members=PEERS[:2], order=ORDER, ids_each=8)
    ids = table.ids_of(PEERS[0])
    table = table.advance(consumed=ids[1:3], members=PEERS[:2], order=ORDER, ids_each=8)
    held = table.ids_by_holder()
    for peer in PEERS[:2]:
        own = {*table.ids_of(peer)}
        assert {number for number in range(200) if number in held[peer]} == own
    assert "1" not in held[PEERS[0]]
