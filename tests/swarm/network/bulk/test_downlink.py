"""Connections to here that share a narrow line have their shares of what it holds, and no others any."""

import asyncio
import math
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from swarm.network.bulk import sealed_socket
from swarm.network.bulk.downlink import (
    ACTIVE_S,
    IDLE_WINDOW,
    IN_VAIN,
    KNOWN_WINDOWS,
    LEAST_TOGETHER,
    LEAST_WINDOW,
    LOOK_S,
    NARROW_BYTES_PER_S,
    QUEUE_S,
    RESTS,
    WIDENED,
    WINDOW_S,
    WINDOW_STEP,
    Came,
    Downlink,
)
from swarm.network.bulk.sockets import Sending, receive
from tests.swarm.network.bulk.sealed_ends import over_tcp, run_virtually, sealed

LINE = 62_500.0
SEGMENT_BYTES = 1448
ROUND_TRIP_S = 0.05
STEP_S = LOOK_S / 4
IN_FLIGHT = 4 * SEGMENT_BYTES
"""That each has under way at least."""
MOST_TOLD_BYTES = 32 << 20
"""Of a window that was told before it became smaller, at most."""
QUEUED = 10 * SEGMENT_BYTES


@dataclass(eq=False)
class FakeStream:
    """A connection from somebody who sends as fast as it is let, or so fast."""

    sends: float = math.inf
    window: float = math.inf
    is_disordered: bool = False
    """On purpose."""
    num_bytes: float = 0.0
    lost: float = 0.0

    @property
    def came(self) -> Came:
        num_segments = round(self.num_bytes / SEGMENT_BYTES)
        disordered = num_segments if self.is_disordered else round(3 * self.lost / SEGMENT_BYTES)
        return Came(round(self.num_bytes), num_segments, disordered, ROUND_TRIP_S)

    def limit(self, window_bytes: float) -> None:
        self.window = window_bytes


def downlink_of(*streams: FakeStream) -> Downlink:
    """That all of these are open on."""
    downlink = Downlink()
    for stream in streams:
        downlink.opened(stream)
    return downlink


async def carry(downlink: Downlink, streams: Sequence[FakeStream], line: float, seconds: float) -> float:
    """The share that is lost: of what is under way beyond what the line queues."""
    lost = came = 0.0
    for _ in range(round(seconds / STEP_S)):
        share = line * STEP_S / len(streams)
        under_way = sum(min(IN_FLIGHT, stream.window, stream.sends * ROUND_TRIP_S) for stream in streams)
        too_much = max(0.0, 1 - QUEUED / under_way)
        for stream in streams:
            moved = min(share, stream.sends * STEP_S)
            stream.num_bytes += moved
            stream.lost += too_much * moved
            came, lost = came + moved, lost + too_much * moved
        downlink.received()
        await asyncio.sleep(STEP_S)
    return lost / came


def test_several_that_overfill_a_narrow_line_share_what_it_holds() -> None:
    async def main() -> None:
        streams, idle = [FakeStream() for _ in range(5)], FakeStream()
        downlink = downlink_of(*streams, idle)
        assert await carry(downlink, streams, LINE, WINDOW_S / 2) > 0.2
        assert {stream.window for stream in streams} == {math.inf}
        await carry(downlink, streams, LINE, 2 * WINDOW_S)
        (window,) = {stream.window for stream in streams}
        assert LEAST_WINDOW <= window <= LINE * (QUEUE_S + ROUND_TRIP_S) / len(streams)
        assert window % WINDOW_STEP == 0
        assert idle.window == IDLE_WINDOW
        late = FakeStream()
        downlink.opened(late)
        assert late.window == IDLE_WINDOW
        assert await carry(downlink, streams, LINE, 30 * WINDOW_S) < 0.02
        for stream in streams[1:]:
            downlink.left(stream)
        await carry(downlink, streams[:1], LINE, 2 * LOOK_S)
        assert streams[0].window == int(downlink.together) // WINDOW_STEP * WINDOW_STEP > window

    run_virtually(main)


def test_a_window_never_closes_however_many_share_the_line() -> None:
    async def main() -> None:
        streams = [FakeStream() for _ in range(40)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, LINE, IN_VAIN * WINDOW_S)
        assert LEAST_TOGETHER <= downlink.together < len(streams) * LEAST_WINDOW
        assert {stream.window for stream in streams} == {LEAST_WINDOW}

    run_virtually(main)


def test_what_is_narrow_no_longer_is_not_limited_for_long() -> None:
    async def main() -> None:
        streams = [FakeStream() for _ in range(4)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, LINE, 3 * WINDOW_S)
        assert math.isfinite(downlink.together)
        few = streams[:1]
        for stream in streams[1:]:
            downlink.left(stream)
        widest = NARROW_BYTES_PER_S * (QUEUE_S + ROUND_TRIP_S)
        windows = math.log(widest / downlink.together) / math.log(WIDENED) + 2
        await carry(downlink, few, 10 * LINE, windows * (WINDOW_S + LOOK_S))
        assert {stream.window for stream in few} == {math.inf}

    run_virtually(main)


@pytest.mark.parametrize(("sends", "line"), [(1_000.0, LINE), (math.inf, 3 * NARROW_BYTES_PER_S)])
def test_nobody_is_limited_who_sends_little_or_on_a_wide_line(sends: float, line: float) -> None:
    async def main() -> None:
        streams = [FakeStream(sends) for _ in range(5)]
        downlink = downlink_of(*streams)
        lost = await carry(downlink, streams, line, 10 * WINDOW_S)
        assert (lost > 0.2) == (sends == math.inf)
        assert {stream.window for stream in streams} == {math.inf}

    run_virtually(main)


def test_one_that_is_out_of_order_on_purpose_narrows_nothing() -> None:
    async def main() -> None:
        streams = [FakeStream(10_000.0), FakeStream(10_000.0), FakeStream(9_000.0, is_disordered=True)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, LINE, 10 * WINDOW_S)
        assert {stream.window for stream in streams} == {math.inf}

    run_virtually(main)


def test_what_is_lost_however_little_is_under_way_is_not_this_line_s() -> None:
    async def main() -> None:
        streams = [FakeStream(5_000.0, is_disordered=True) for _ in range(4)]
        downlink = downlink_of(*streams)
        limited_s = 0.0
        for _ in range(RESTS):
            await carry(downlink, streams, LINE, WINDOW_S)
            limited_s += WINDOW_S if math.isfinite(streams[0].window) else 0.0
        assert WINDOW_S <= limited_s <= (IN_VAIN + 1) * WINDOW_S

    run_virtually(main)


def test_a_line_that_carried_more_a_moment_ago_is_not_narrow() -> None:
    async def main() -> None:
        streams = [FakeStream() for _ in range(5)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, 3 * NARROW_BYTES_PER_S, 2 * WINDOW_S)
        await carry(downlink, streams, LINE, (KNOWN_WINDOWS - 3) * WINDOW_S)
        assert {stream.window for stream in streams} == {math.inf}
        await carry(downlink, streams, LINE, 10 * WINDOW_S)
        assert max(stream.window for stream in streams) < math.inf

    run_virtually(main)


def test_a_line_that_is_not_full_is_not_narrow_whatever_is_dropped_on_the_way_to_it() -> None:
    """Who came back from a cut was sent 5 to 18 KB/s for minutes, by two whose own lines were full."""

    async def main() -> None:
        streams = [FakeStream() for _ in range(2)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, LINE, 2 * WINDOW_S)
        for stream in streams:
            stream.sends, stream.is_disordered = 0.2 * LINE, True
        await carry(downlink, streams, LINE, 3 * WINDOW_S)
        assert downlink.together == math.inf
        downlink.together = LEAST_TOGETHER
        await carry(downlink, streams, LINE, 4 * WINDOW_S)
        assert downlink.together == math.inf

    run_virtually(main)


def test_who_falls_silent_leaves_its_share_to_the_others() -> None:
    async def main() -> None:
        streams = [FakeStream() for _ in range(4)]
        downlink = downlink_of(*streams)
        await carry(downlink, streams, LINE, 3 * WINDOW_S)
        before = streams[0].window
        await carry(downlink, streams[:2], LINE, ACTIVE_S + 2 * LOOK_S)
        assert streams[0].window > before
        assert [stream.window for stream in streams[2:]] == [IDLE_WINDOW] * 2

    run_virtually(main)


def test_the_kernel_keeps_to_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        downlink = Downlink()
        monkeypatch.setattr(sealed_socket, "DOWNLINK", downlink)
        ours, theirs = over_tcp(segment_bytes=SEGMENT_BYTES)
        sender, receiver = sealed(ours, theirs)
        window_bytes = 4 * WINDOW_STEP

        async def window_told(num_bytes: int) -> int:
            body = os.urandom(num_bytes)
            sending = Sending(sender, memoryview(body))
            async with asyncio.timeout(60):
                assert await receive(receiver, len(body)) == body
            sending.stop()
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            return int(struct.unpack_from("<I", info, 228)[0])

        try:
            told = await window_told(1 << 18)
            assert told > 10 * window_bytes
            receiver.limit(window_bytes)
            for _ in range(MOST_TOLD_BYTES >> 18):  # what was told before still comes
                told = await window_told(1 << 18)
                if told <= 1.5 * window_bytes:  # the kernel rounds
                    break
            assert told <= 1.5 * window_bytes
            receiver.limit(math.inf)
            assert await window_told(4 << 20) > 10 * window_bytes
            assert receiver.came.all >= (4 << 20) / SEGMENT_BYTES
            assert 0 < receiver.came.round_trip_s < 1
        finally:
            sender.close()
            receiver.close()

    asyncio.run(main())
