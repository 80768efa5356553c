"""Room: what a peer says to whoever asks how long a microbatch would wait."""

import asyncio

import pytest

from swarm.core.pipeline.room import Room
from swarm.core.plan import HEADERS
from tests.peer.pipeline.hop_line import hop_line


def test_a_peer_takes_microbatches_at_the_pace_at_which_it_can_do_them_whole() -> None:
    room, now, taken = Room(), 100.0, 0
    while now < 160.0:  # forward takes 1 s and backward 2 s, of which none has come back yet
        if room.waits_s(0.0, now=now) == 0:
            room.taken(3.0, now=now)
            taken += 1
        now += 0.5
    assert taken == 20


def test_what_waits_counts_where_it_is_more_and_idle_time_is_not_saved_up() -> None:
    room = Room()
    room.taken(3.0, now=0.0)
    assert room.waits_s(7.0, now=1.0) == 7.0
    assert room.waits_s(0.0, now=1.0) == 2.0
    assert room.waits_s(0.0, now=50.0) == 0.0
    room.taken(3.0, now=50.0)
    assert room.waits_s(0.0, now=50.0) == 3.0


def test_it_takes_no_more_than_its_uplink_can_carry() -> None:
    room = Room()
    room.taken(3.0, 8.0, now=0.0)
    assert room.waits_s(0.0, now=0.0) == 8.0


def test_a_peer_reckons_with_its_owners_uplink(monkeypatch: pytest.MonkeyPatch) -> None:
    paces = []
    taken = Room.taken

    def noted(room: Room, visit_s: float, sends_s: float, *, now: float) -> None:
        paces.append(sends_s)
        taken(room, visit_s, sends_s, now=now)

    monkeypatch.setattr(Room, "taken", noted)

    async def main() -> int:
        async with hop_line() as line:
            for peer in (peer for stage in line.peers for peer in stage):
                peer.line.set_rates(upload_mbit=8.0, download_mbit=None)  # 1 MB/s
            await line.send(0)
            tensors = line.peers[1][0].work.stage_pass.tensors
            return tensors.codec.encoded_bytes(tensors.shape)

    size = asyncio.run(main())
    assert len(paces) >= 2
    assert sorted(paces) == pytest.approx([size * HEADERS / 1e6, *[2 * size * HEADERS / 1e6] * (len(paces) - 1)])
