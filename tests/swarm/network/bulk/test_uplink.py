"""Connections that share a slow uplink have their shares of what it carries, and no others any."""

import asyncio
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from swarm.network.bulk import framing, sealed_socket
from swarm.network.bulk.sockets import Sending, receive
from swarm.network.bulk.uplink import (
    FASTER,
    KEPT_WINDOWS,
    LATELY_S,
    LEAST_PACE,
    LEAST_WITHOUT_LOSS,
    LOOK_S,
    MORE_THAN_TAKEN,
    MOST_LOST,
    MOST_PACE,
    SLOW_BYTES_PER_S,
    WINDOW_S,
    Tcp,
    Uplink,
)
from tests.swarm.network.bulk.sealed_ends import over_tcp, run_virtually, sealed

LINE = 125_000.0
ROUND_TRIP_S = 0.15


def windows_s(times: float) -> float:
    """In which a pace grows so many times."""
    return (math.log(times) / math.log(MOST_PACE) + 5) * (WINDOW_S + 2 * LOOK_S)


@dataclass(eq=False)
class FakeStream:
    """A connection whose other end takes at most so many bytes a second, of which TCP tries a few more."""

    takes: float = math.inf
    tries: float = 1.2
    loses: float = 0.0
    """Of what it takes, whatever it is sent."""
    segment_bytes: int = 100
    paced: float = math.inf
    waiting: float = 0.0
    sent: float = 0.0
    lost: float = 0.0
    came: float = 0.0
    flight_bytes: int = 0
    """The last of a message are acknowledged together, when nothing has gone for `ROUND_TRIP_S`."""
    flown_s: float = 0.0
    late: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=1))
    """What has come, as it was acknowledged: the first of them."""

    @property
    def tcp(self) -> Tcp:
        waiting = math.ceil(self.waiting)
        unsent = max(0, waiting - self.flight_bytes)
        of = self.segment_bytes
        return Tcp(round(self.lost / of), round(self.sent / of), round(self.late[0]), waiting, unsent)

    def pace(self, bytes_per_s: float) -> None:
        self.paced = bytes_per_s


async def carry(
    uplink: Uplink,
    streams: Sequence[FakeStream],
    line: float,
    seconds: float,
    *,
    is_deep: bool = False,
    message_bytes: int = 1 << 20,
) -> float:
    """Bytes a second that come through, while each stream has a next message whenever the last one has gone. What is
    too much for the line is lost, unless its queue is deep."""
    moved, step_s = 0.0, LOOK_S / 5
    for _ in range(round(seconds / step_s)):
        for stream in streams:
            if stream.waiting < 1:
                stream.waiting, stream.flown_s = message_bytes, 0.0
                uplink.sends(stream)
        wanted = [
            min(stream.waiting - stream.flight_bytes, min(stream.paced, stream.tries * stream.takes, line) * step_s)
            for stream in streams
        ]
        share = min(1.0, line * step_s / sum(wanted)) if sum(wanted) else 1.0
        for stream, sent in zip(streams, wanted, strict=True):
            came = min(sent * share, stream.takes * step_s) * (1 - stream.loses)
            stream.sent += sent
            stream.lost += 0.0 if is_deep else sent - came
            stream.waiting -= came
            stream.came += came
            moved += came
            if stream.flight_bytes and stream.waiting <= stream.flight_bytes:
                stream.flown_s += step_s
                if stream.flown_s >= ROUND_TRIP_S:
                    moved, stream.came = moved + stream.waiting, stream.came + stream.waiting
                    stream.waiting = 0.0
            stream.late.append(stream.came)
        await asyncio.sleep(step_s)
    return moved / seconds


def paced(streams: Sequence[FakeStream]) -> float:
    """All together."""
    assert len({stream.paced for stream in streams}) == 1
    return sum(stream.paced for stream in streams)


def test_each_that_sends_has_its_share_of_a_little_more_than_the_line_carries() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream() for _ in range(4)]
        assert await carry(uplink, streams, LINE, 2 * WINDOW_S, is_deep=True) == pytest.approx(LINE, rel=0.01)
        assert uplink.bytes_per_s == pytest.approx(LINE, rel=0.01)
        assert paced(streams) == pytest.approx(MOST_PACE * LINE, rel=0.01)
        for stream in streams[2:]:
            uplink.left(stream)
        assert await carry(uplink, streams[:2], LINE, 1.0, is_deep=True) == pytest.approx(LINE, rel=0.01)
        assert paced(streams[:2]) == pytest.approx(MOST_PACE * LINE, rel=0.01)

    run_virtually(main)


def test_of_the_more_the_less_the_more_is_lost() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream() for _ in range(4)]
        await carry(uplink, streams, LINE, 20 * WINDOW_S)
        for stream in streams:
            stream.lost, stream.sent = 0.0, 0.0
        for _ in range(20):
            await carry(uplink, streams, LINE, WINDOW_S)
            assert LEAST_PACE * 0.99 <= paced(streams) / LINE <= FASTER * FASTER
        lost, sent = sum(stream.lost for stream in streams), sum(stream.sent for stream in streams)
        assert lost < 0.1 * sent
        windows = math.log(MOST_PACE / LEAST_PACE) / math.log(FASTER)
        await carry(uplink, streams, LINE, 1.1 * windows * WINDOW_S, is_deep=True)
        assert paced(streams) == pytest.approx(MOST_PACE * LINE, rel=0.02)

    run_virtually(main)


def test_a_line_that_has_become_slower_is_known_by_what_it_takes() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(), FakeStream()]
        await carry(uplink, streams, LINE, 4 * WINDOW_S)
        await carry(uplink, streams, LINE / 10, 12 * WINDOW_S)
        assert paced(streams) <= 1.5 * LINE / 10
        await carry(uplink, streams, LINE, windows_s(10))
        assert paced(streams) >= LEAST_PACE * LINE

    run_virtually(main)


def test_what_a_slow_line_elsewhere_loses_makes_nobody_else_slower_nor_what_it_does_not_take() -> None:
    async def main() -> None:
        uplink, fast, slow = Uplink(), FakeStream(), FakeStream(takes=LINE / 20)
        await carry(uplink, [fast, slow], LINE, 5 * WINDOW_S)
        for _ in range(6):
            await carry(uplink, [fast, slow], LINE, KEPT_WINDOWS * WINDOW_S / 2)
            assert await carry(uplink, [fast, slow], LINE, WINDOW_S) >= 0.9 * LINE
            assert slow.paced <= 1.1 * MORE_THAN_TAKEN * LINE / 20
        await carry(uplink, [slow], LINE, 2 * KEPT_WINDOWS * WINDOW_S)
        await carry(uplink, [fast, slow], LINE, 20 * WINDOW_S)
        assert await carry(uplink, [fast, slow], LINE, WINDOW_S) >= 0.9 * LINE

    run_virtually(main)


@pytest.mark.parametrize("took", [0.0, 0.01, 0.1])
def test_who_was_slow_in_company_and_is_alone_now_has_the_line_within_seconds(took: float) -> None:
    """It was held at a sixteenth for as long as it was."""

    async def main() -> None:
        uplink, late, others = Uplink(), FakeStream(), [FakeStream() for _ in range(7)]
        await carry(uplink, [late, *others], LINE, 4 * WINDOW_S)
        late.takes = took * LINE
        await carry(uplink, [late, *others], LINE, 4 * WINDOW_S)
        late.takes = math.inf
        for stream in others:
            stream.waiting = 0.0
        await carry(uplink, [late], LINE, windows_s(16 / MOST_PACE) / 2)
        assert await carry(uplink, [late], LINE, WINDOW_S) >= 0.95 * LINE

    run_virtually(main)


def test_who_alone_loses_packets_is_slow_though_the_line_is_filled() -> None:
    """TCP's beginning tries nearly three times as much as comes through."""

    async def main() -> None:
        uplink, fast, slow = Uplink(), [FakeStream(), FakeStream()], FakeStream(takes=LINE / 10, tries=1.8)
        await carry(uplink, fast, LINE, 4 * WINDOW_S, is_deep=True)
        await carry(uplink, [*fast, slow], LINE, 4 * WINDOW_S)
        for stream in (*fast, slow):
            stream.lost = stream.sent = 0.0
        await carry(uplink, [*fast, slow], LINE, 10 * WINDOW_S)
        assert slow.lost <= 0.05 * sum(stream.sent for stream in (*fast, slow))

    run_virtually(main)


@pytest.mark.parametrize("tries", [1.2, 3.0])
def test_a_line_of_a_tenth_is_sent_little_more_than_it_takes_until_it_takes_more(tries: float) -> None:
    """Of 1.25 times what it takes it would lose a fifth, all the time."""

    async def main() -> None:
        uplink, others = Uplink(), [FakeStream() for _ in range(2)]
        slow = FakeStream(takes=LINE / 10, tries=tries)
        await carry(uplink, [*others, slow], LINE, 30.0)
        slow.sent = slow.lost = slow.came = 0.0
        assert await carry(uplink, [*others, slow], LINE, 120.0) > 0.95 * LINE
        assert slow.lost < 0.07 * slow.sent
        assert slow.came > 0.9 * 120.0 * slow.takes
        slow.takes = math.inf
        await carry(uplink, [*others, slow], LINE, 10 * WINDOW_S)
        assert slow.paced == others[0].paced, "it takes as much as others"

    run_virtually(main)


def test_who_loses_as_much_whatever_it_is_sent_has_its_share_again_after_a_hang() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream() for _ in range(4)]
        await carry(uplink, streams, LINE, 5 * WINDOW_S)
        hung = streams[0]
        hung.takes, hung.loses = LINE / 100, 0.05
        await carry(uplink, streams, LINE, 2 * WINDOW_S)
        hung.takes = math.inf
        await carry(uplink, streams, LINE, 15 * WINDOW_S)
        hung.came = 0.0
        await carry(uplink, streams, LINE, 20 * WINDOW_S)
        assert hung.came > 0.7 * 20 * WINDOW_S * LINE / 4

    run_virtually(main)


def test_who_has_lost_nothing_for_an_hour_is_sent_no_more_than_twice_as_much() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream() for _ in range(4)]
        streams[0].takes = LINE / 40
        await carry(uplink, streams, LINE, 8 * WINDOW_S)
        assert streams[0] in uplink._since_lost
        uplink._since_lost[streams[0]] = 2000
        await carry(uplink, streams, LINE, 2 * WINDOW_S, is_deep=True)
        assert streams[0].paced < LINE / 8

    run_virtually(main)


@pytest.mark.parametrize("is_deep", [False, True])
def test_many_slow_ones_leave_the_line_to_one_that_is_not_and_keep_little_alone(is_deep: bool) -> None:
    async def main() -> None:
        uplink, fast = Uplink(), FakeStream()
        slow = [FakeStream(takes=LINE / 30) for _ in range(7)]
        await carry(uplink, [fast], LINE, 2 * WINDOW_S)
        await carry(uplink, [fast, *slow], LINE, 10 * WINDOW_S, is_deep=is_deep)
        assert await carry(uplink, [fast, *slow], LINE, WINDOW_S, is_deep=is_deep) >= 0.9 * LINE
        await carry(uplink, slow[:2], LINE, 10 * WINDOW_S, is_deep=is_deep)
        most = LEAST_WITHOUT_LOSS * MOST_PACE * LINE / 2 if is_deep else 2.2 * LINE / 30
        for _ in range(10):
            await carry(uplink, slow[:2], LINE, WINDOW_S, is_deep=is_deep)
            assert all(stream.paced <= 1.01 * most for stream in slow[:2])

    run_virtually(main)


async def with_a_slow_one(uplink: Uplink) -> tuple[list[FakeStream], FakeStream]:
    """Two that leave the line room, for their answers take long, and one that takes a tenth of what they do."""
    fast, slow = [FakeStream(), FakeStream()], FakeStream()
    await carry(uplink, [*fast, slow], LINE, 4 * WINDOW_S, is_deep=True)
    slow.takes = LINE / 50
    for stream in fast:
        stream.takes = LINE / 5
    return fast, slow


def test_who_seems_slow_and_loses_nothing_may_send_half_of_an_equal_share_beside_what_others_have_of_it() -> None:
    async def main() -> None:
        uplink = Uplink()
        fast, slow = await with_a_slow_one(uplink)
        await carry(uplink, [*fast, slow], LINE, 5 * WINDOW_S, is_deep=True)
        equal = MOST_PACE * LINE / 3
        assert slow.paced == pytest.approx(LEAST_WITHOUT_LOSS * equal, rel=0.01)
        assert fast[0].paced > 1.2 * equal

    run_virtually(main)


def test_who_is_slow_when_nothing_else_is_known_and_who_hangs_make_nobody_slow_for_long() -> None:
    async def main() -> None:
        uplink, fast, slow, hanging = Uplink(), FakeStream(), FakeStream(takes=LINE / 20), FakeStream(takes=0.0)
        await carry(uplink, [slow], LINE, 2 * WINDOW_S)
        await carry(uplink, [slow, fast], LINE, windows_s(20))
        assert await carry(uplink, [slow, fast], LINE, WINDOW_S) >= 0.9 * LINE
        await carry(uplink, [fast, hanging], LINE, 2 * WINDOW_S)
        assert await carry(uplink, [fast, hanging], LINE, WINDOW_S) >= 0.9 * LINE

    run_virtually(main)


def test_one_packet_of_few_that_is_lost_makes_nobody_slow() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(segment_bytes=1448) for _ in range(3)]
        await carry(uplink, streams, LINE, 4 * WINDOW_S, is_deep=True)
        for stream in streams:
            stream.takes = LINE / 10  # as their answers take long: the line has room
        for window in range(12):
            streams[0].lost += 1448 * (window % 3 == 0)
            await carry(uplink, streams, LINE, WINDOW_S + LOOK_S, is_deep=True)
            assert streams[0].paced >= LEAST_WITHOUT_LOSS * MOST_PACE * LINE / 3

    run_virtually(main)


def test_two_packets_of_seventy_that_are_lost_by_chance_hold_nobody_at_what_it_took() -> None:
    """A full line loses one of a hundred, of everybody's: a round's connection was held at 11 KB/s of 118 by that."""

    async def main() -> None:
        uplink = Uplink()
        fast, slow = await with_a_slow_one(uplink)
        for _ in range(8):
            slow.lost += 2 * slow.segment_bytes
            await carry(uplink, [*fast, slow], LINE, WINDOW_S + LOOK_S, is_deep=True)
            assert slow.paced >= 0.99 * LEAST_WITHOUT_LOSS * MOST_PACE * LINE / 3

    run_virtually(main)


def test_what_a_slow_one_loses_of_few_packets_at_a_time_is_counted_together_though_it_rests() -> None:
    async def main() -> None:
        uplink, fast = Uplink(), [FakeStream(), FakeStream()]
        slow = FakeStream(takes=LINE / 40, segment_bytes=200)
        await carry(uplink, fast, LINE, 4 * WINDOW_S, is_deep=True)
        for _ in range(10):
            await carry(uplink, [*fast, slow], LINE, WINDOW_S / 3)
            slow.waiting = 0.0
            await carry(uplink, fast, LINE, 2 / 3 * WINDOW_S + LOOK_S)
        await carry(uplink, [*fast, slow], LINE, LOOK_S)
        assert slow.paced <= 1.1 * MORE_THAN_TAKEN * slow.takes

    run_virtually(main)


def test_a_pace_that_is_too_low_grows_by_messages_with_pauses_too() -> None:
    async def main() -> None:
        uplink, stream = Uplink(), FakeStream()
        await carry(uplink, [stream], LINE / 20, 2 * WINDOW_S)
        for _ in range(200):
            await carry(uplink, [stream], LINE, 0.5)
            uplink.left(stream)
            stream.waiting = 0.0
            await asyncio.sleep(5.0)
        assert stream.paced >= LINE

    run_virtually(main)


@pytest.mark.parametrize("share", [0.2, 0.45, 0.8])
def test_a_line_that_many_short_messages_share_is_as_fast_as_before_once_it_carries_as_much(share: float) -> None:
    """They go to eight peers by turns, three at a time, as a round's."""

    async def main() -> None:
        uplink = Uplink()
        peers = [FakeStream(late=deque([0.0], maxlen=8)) for _ in range(8)]

        async def rounds(line: float, num: int) -> float:
            began, moved = asyncio.get_running_loop().time(), 0.0
            for first in (3 * turn % len(peers) for turn in range(num)):
                lanes = [peers[(first + lane) % len(peers)] for lane in range(3)]
                moved += 0.4 * await carry(uplink, lanes, line, 0.4, message_bytes=24 << 10)
                for lane in lanes:
                    lane.waiting = 0.0
                    lane.late.extend([lane.came] * 8)
            return moved / (asyncio.get_running_loop().time() - began)

        before = await rounds(LINE, 100)
        await rounds(share * LINE, 25)
        await rounds(LINE, 25)
        assert await rounds(LINE, 25) >= 0.95 * before

    run_virtually(main)


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_who_waits_for_an_answer_is_not_taken_for_slow(num_lanes: int) -> None:
    async def main() -> None:
        uplink = Uplink()
        lanes = [FakeStream(flight_bytes=8 << 10) for _ in range(num_lanes)]
        await carry(uplink, lanes, LINE, 10 * WINDOW_S, is_deep=True, message_bytes=32 << 10)
        unpaced_s = (24 << 10) * num_lanes / LINE + ROUND_TRIP_S
        most = min(LINE, (32 << 10) * num_lanes / unpaced_s)
        assert await carry(uplink, lanes, LINE, 10 * WINDOW_S, is_deep=True, message_bytes=32 << 10) >= 0.85 * most

    run_virtually(main)


def test_messages_that_take_no_time_make_nothing_slow() -> None:
    async def main() -> None:
        uplink, stream = Uplink(), FakeStream()
        for _ in range(200):
            await carry(uplink, [stream], 10 * SLOW_BYTES_PER_S, LOOK_S, message_bytes=32 << 10)
            await asyncio.sleep(LOOK_S)
        assert stream.paced == math.inf

    run_virtually(main)


def test_what_is_faster_now_shows_and_what_is_slower_is_forgotten_in_time() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(), FakeStream()]
        await carry(uplink, streams, LINE, 2 * WINDOW_S, is_deep=True)
        assert await carry(uplink, streams, 4 * LINE, WINDOW_S) == pytest.approx(MOST_PACE * LINE, rel=0.1)
        await carry(uplink, streams, 4 * LINE, windows_s(4))
        assert await carry(uplink, streams, 4 * LINE, WINDOW_S) == pytest.approx(4 * LINE, rel=0.05)
        await carry(uplink, streams, LINE, (KEPT_WINDOWS + 1) * (WINDOW_S + 2 * LOOK_S))
        assert uplink.bytes_per_s == pytest.approx(LINE, rel=0.05)

    run_virtually(main)


def test_what_it_lately_carried_is_known_for_a_minute_and_a_burst_to_somebody_near_counts_for_little() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(), FakeStream()]
        assert uplink.lately == 0.0
        await carry(uplink, streams, LINE, 5 * WINDOW_S, is_deep=True)
        await carry(uplink, streams, 4 * LINE, WINDOW_S, is_deep=True)
        await carry(uplink, streams, LINE, 5 * WINDOW_S, is_deep=True)
        assert uplink.lately == pytest.approx(LINE, rel=0.02)
        assert uplink.bytes_per_s is not None
        assert uplink.bytes_per_s > 1.3 * LINE
        await carry(uplink, streams, LINE / 10, LATELY_S, is_deep=True)
        assert uplink.lately < LINE / 5
        await asyncio.sleep(LATELY_S)
        assert uplink.lately == 0.0
        await carry(uplink, streams, 100 * SLOW_BYTES_PER_S, 5 * WINDOW_S, is_deep=True)
        assert uplink.lately == 0.0

    run_virtually(main)


def test_a_fast_line_and_one_that_nobody_knows_have_no_pace() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(), FakeStream()]
        await carry(uplink, streams, LINE, WINDOW_S / 2)
        assert {stream.paced for stream in streams} == {math.inf}
        resting = FakeStream()
        await carry(uplink, [resting], LINE, 2 * WINDOW_S)
        assert resting.paced < math.inf
        for stream in [resting, *streams]:
            uplink.left(stream)
            stream.waiting = 0.0
        await carry(uplink, streams, 1.2 * SLOW_BYTES_PER_S, windows_s(10))
        assert {stream.paced for stream in streams} == {math.inf}
        await carry(uplink, [resting], LINE, LOOK_S)
        assert resting.paced == math.inf

    run_virtually(main)


def test_what_is_held_has_its_part_and_the_others_the_rest_and_it_tells_nothing_of_lines() -> None:
    """A piece of a state had the line for itself, and then a round, whose connections had to learn it again."""

    async def main() -> None:
        uplink, free, held, part = Uplink(), [FakeStream(), FakeStream()], FakeStream(), [LINE / 10]
        with uplink.holding(held, lambda: part[0]):
            await carry(uplink, [*free, held], LINE, 12 * WINDOW_S, is_deep=True)
            assert held.paced == part[0]
            for stream in free:
                assert stream.paced == pytest.approx((MOST_PACE * LINE - part[0]) / 2, rel=0.01)
            part[0] = LINE / 5
            await carry(uplink, [*free, held], LINE, WINDOW_S + 2 * LOOK_S, is_deep=True)
            assert held.paced == part[0]
            part[0] = LINE
            await carry(uplink, [*free, held], LINE, WINDOW_S + 2 * LOOK_S, is_deep=True)
            assert held.paced == free[0].paced, "it has no more than others"
            part[0] = LINE / 10
            await carry(uplink, [held], LINE, 5 * WINDOW_S, is_deep=True)
        assert held not in uplink._takes
        await carry(uplink, [*free, held], LINE, 2 * WINDOW_S, is_deep=True)
        assert held.paced == free[0].paced
        assert not uplink._held

    run_virtually(main)


def test_a_line_that_nobody_knows_or_that_is_fast_holds_nothing() -> None:
    async def main() -> None:
        uplink, streams = Uplink(), [FakeStream(), FakeStream()]
        with uplink.holding(streams[0], lambda: LINE / 10):
            await carry(uplink, streams, LINE, WINDOW_S / 2)
            assert streams[0].paced == math.inf
            await carry(uplink, streams, 2 * SLOW_BYTES_PER_S, windows_s(10))
            assert streams[0].paced == math.inf

    run_virtually(main)


def test_what_a_full_line_drops_of_everybody_makes_nobody_narrow() -> None:
    """Who was back from a cut had one part after the other at 4 KB/s, a hundredth of which was lost more than of
    others', for minutes: its line was idle."""

    async def main() -> None:
        uplink, others = Uplink(), [FakeStream(loses=0.03) for _ in range(2)]
        back = FakeStream(takes=LINE / 12, tries=1.0, loses=0.05)
        await carry(uplink, [*others, back], LINE, 10 * WINDOW_S, is_deep=True)
        await carry(uplink, [*others, back], LINE, 10 * WINDOW_S)
        assert back.lost > MOST_LOST * back.sent
        assert back not in uplink._since_lost

    run_virtually(main)


def test_an_answer_is_sent_no_faster_than_its_place_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        uplink, sent = Uplink(), framing.Sent()
        uplink.bytes_per_s = 0.9 * SLOW_BYTES_PER_S
        for room in (sealed_socket, framing):
            monkeypatch.setattr(room, "UPLINK", uplink)
        body = os.urandom(1 << 20)
        loop = asyncio.get_running_loop()
        for most, least_s, most_s in ((SLOW_BYTES_PER_S / 4, 1.5, 10.0), (math.inf, 0.0, 1.4)):
            sender, receiver = sealed(*over_tcp())
            began = loop.time()
            send = framing.send(sender, b"", memoryview(body), window_s=20.0, sent=sent, most=lambda at=most: at)
            sending = asyncio.ensure_future(send)
            async with asyncio.timeout(20):
                assert await receive(receiver, len(body)) == body
            assert least_s <= loop.time() - began <= most_s
            await sending
            assert not uplink._held
            sender.close()
            receiver.close()

    asyncio.run(main())


def test_the_kernel_keeps_to_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sender, receiver = sealed(*over_tcp())
        loop = asyncio.get_running_loop()
        try:
            body = os.urandom(1 << 20)
            for known, least_s, most_s in ((SLOW_BYTES_PER_S / 4, 1.5 / MOST_PACE, 60.0), (None, 0.0, 2.0)):
                uplink = Uplink()
                uplink.bytes_per_s = known
                monkeypatch.setattr(sealed_socket, "UPLINK", uplink)
                began = loop.time()
                sending = Sending(sender, memoryview(body))
                async with asyncio.timeout(60):
                    assert await receive(receiver, len(body)) == body
                    took_s = loop.time() - began
                    while sender.tcp.is_sending:  # noqa: ASYNC110 - the kernel tells nobody of an acknowledgement
                        await asyncio.sleep(LOOK_S)
                assert least_s <= took_s <= most_s
                sending.stop()
            assert 2 * len(body) <= sender.tcp.acknowledged_bytes <= 2.01 * len(body)
            assert sender.tcp.all >= 2 * len(body) / (1 << 16)
        finally:
            sender.close()
            receiver.close()

    asyncio.run(main())
