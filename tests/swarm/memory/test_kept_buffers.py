"""Memory for bodies: never two in one place, used again whatever their sizes, and given back beyond the bound."""

import random
import threading

import numpy as np
import pytest

from swarm.memory.free_extents import FreeExtents
from swarm.memory.kept_buffers import SLAB_BYTES, UNIT_BYTES, KeptBuffers


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    buffers = KeptBuffers(most_kept_bytes=2 * UNIT_BYTES)
    body = buffers.take(UNIT_BYTES - 1 + UNIT_BYTES)
    assert body.nbytes == 2 * UNIT_BYTES - 1
    part = body[5:9]
    del body
    assert buffers.kept_bytes == 0
    del part
    assert buffers.kept_bytes == 2 * UNIT_BYTES
    held = [buffers.take(2 * UNIT_BYTES) for _ in range(2)]
    assert buffers.kept_bytes == 0
    held[0][0], held[1][0] = 1, 2
    assert (held[0][0], held[1][0]) == (1, 2)
    del held
    assert buffers.kept_bytes == 2 * UNIT_BYTES


def test_what_one_long_body_leaves_serves_short_ones_and_the_other_way_round() -> None:
    buffers = KeptBuffers(most_kept_bytes=8 * UNIT_BYTES)
    whole = buffers.take(8 * UNIT_BYTES)
    place = np.frombuffer(whole, np.uint8).ctypes.data
    del whole
    short = [buffers.take(2 * UNIT_BYTES) for _ in range(4)]
    assert buffers.kept_bytes == 0
    places = [np.frombuffer(body, np.uint8).ctypes.data for body in short]
    assert sorted(places) == [place + 2 * number * UNIT_BYTES for number in range(4)]
    random.Random(1).shuffle(short)
    while short:
        short.pop()
    again = buffers.take(8 * UNIT_BYTES)
    assert np.frombuffer(again, np.uint8).ctypes.data == place


@pytest.mark.parametrize("seed", range(3))
def test_no_two_bodies_share_a_byte_when_they_come_and_go_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    buffers = KeptBuffers(most_kept_bytes=40 * UNIT_BYTES)
    held: list[tuple[int, memoryview]] = []
    for number in range(600):
        if held and rng.random() < 0.48:
            tag, body = held.pop(rng.randrange(len(held)))
            assert body[0] == body[len(body) // 2] == body[-1] == tag, f"body {number} was written over"
            del body
        else:
            body = buffers.take(rng.choice((1, UNIT_BYTES - 1, UNIT_BYTES, 3 * UNIT_BYTES + 5, 17 * UNIT_BYTES)))
            tag = rng.randrange(256)
            body[0] = body[len(body) // 2] = body[-1] = tag
            held.append((tag, body))
        assert buffers.kept_bytes <= 40 * UNIT_BYTES
    assert len(held) > 5
    for tag, body in held:
        assert body[0] == body[-1] == tag


def test_a_body_longer_than_a_slab_has_memory_too() -> None:
    buffers = KeptBuffers(most_kept_bytes=SLAB_BYTES)
    body = buffers.take(SLAB_BYTES + 1)
    body[0] = body[SLAB_BYTES] = 7
    assert body.nbytes == SLAB_BYTES + 1
    del body
    assert buffers.kept_bytes == 0, "more than is kept goes back to the system"
    assert buffers.take(SLAB_BYTES)[0] == 0, "and comes back empty"


def test_a_view_that_dies_while_memory_is_handed_out_waits_for_its_turn() -> None:
    buffers = KeptBuffers()
    body = buffers.take(UNIT_BYTES)
    with buffers._lock:  # as when the garbage collector runs in the middle of it
        del body
    assert buffers.kept_bytes == UNIT_BYTES


def test_threads_that_take_and_let_go_leave_everything_free() -> None:
    buffers = KeptBuffers()
    wrong = []

    def work(tag: int) -> None:
        for _ in range(1000):
            body = buffers.take(2 * UNIT_BYTES)
            body[0] = body[-1] = tag
            if body[0] != tag or body[-1] != tag:
                wrong.append(tag)
            del body  # or the thread would hold it until it has the next

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    whole = buffers.take(buffers.kept_bytes)
    assert buffers.kept_bytes == 0, "what came back is one piece again"
    assert whole.nbytes <= 8 * UNIT_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_free_extents_are_those_that_were_added_and_not_taken(seed: int) -> None:
    rng = random.Random(seed)
    extents, free = FreeExtents(), set(range(400))
    extents.add(0, 400)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        size = rng.randrange(1, 30)
        if taken and rng.random() < 0.5:
            start, size = taken.pop(rng.randrange(len(taken)))
            extents.add(start, size)
            free |= set(range(start, start + size))
        else:
            found = extents.take(size)
            if found is None:
                assert not any(set(range(start, start + size)) <= free for start in range(400 - size + 1))
                continue
            assert set(range(found, found + size)) <= free
            free -= set(range(found, found + size))
            taken.append((found, size))
        assert extents.total == len(free)
