"""How many messages go at a time where answers take long, on a modelled uplink in virtual time."""

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.red_team.virtual_time import VirtualLoop
from peer.round.mail.lanes import LONGEST_TRIAL_S, MORE, Lanes
from peer.round.mail.meter import Meter
from peer.round.mail.outbox import OnItsWay, Outbox, Parcel
from swarm.core.ids import PeerId

PEERS = [PeerId(name) for name in ("one", "two", "three")]
FAST, SLOW = 2_500_000.0, 125_000.0
PARCEL_BYTES = 1 << 20


class Uplink:
    """Messages leave one behind the other, at its rate; each is answered so many seconds after its bytes are there."""

    def __init__(self, rate: float, answer_s: float) -> None:
        self.rate = rate
        self._answer_s = answer_s
        self._free_at = 0.0
        self.sent_bytes = 0
        self.lanes: list[int] = []
        """Each second."""

    async def send(self, _: PeerId, parcels: list[Parcel], way: OnItsWay) -> int:
        loop, num_bytes = asyncio.get_running_loop(), sum(len(one.body) for one in parcels)
        way.leaves()
        self._free_at = max(self._free_at, loop.time()) + num_bytes / self.rate
        await asyncio.sleep(self._free_at + self._answer_s - loop.time())
        self.sent_bytes += num_bytes
        way.left()
        return num_bytes

    def share_after(self, seconds: int, monkeypatch: pytest.MonkeyPatch) -> float:
        """Of what it could have carried; more waits for three peers all the while."""
        tasks: list[asyncio.Task[None]] = []

        async def main() -> None:
            def spawn(work: Coroutine[Any, Any, None]) -> None:
                tasks.append(asyncio.ensure_future(work))

            outbox = Outbox(spawn, self.send, moved=lambda: self.sent_bytes)
            step: Any = SimpleNamespace()
            body = bytes(PARCEL_BYTES)
            for _ in range(round(seconds * self.rate / PARCEL_BYTES)):
                for peer in PEERS:
                    outbox.put(peer, Parcel(step, "contributed", {}, body))
            for _ in range(seconds):
                await asyncio.sleep(1.0)
                self.lanes.append(outbox.uplink_lanes)
            outbox.keep([], lambda _: False)
            await asyncio.gather(*(task for task in tasks if not task.done()))

        loop = VirtualLoop()
        with monkeypatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
            patch.setattr(time, "monotonic", loop.time)
            before = self.sent_bytes
            runner.run(main())
        return (self.sent_bytes - before) / (seconds * self.rate)


@pytest.mark.parametrize("rate", [FAST, SLOW])
@pytest.mark.parametrize("answer_s", [0.04, 0.15, 0.3, 0.5])
def test_a_line_is_filled_though_answers_take_long(
    rate: float, answer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before lanes were tried, those of 2.5 MB/s were at 0.07 with 0.3 s, and at 0.03 with 0.5 s."""
    assert Uplink(rate, answer_s).share_after(30, monkeypatch) > 0.6


def test_where_answers_come_soon_there_are_seldom_more_lanes_than_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane more makes others' packets wait, or has them lost."""
    uplink = Uplink(SLOW, 0.04)
    assert uplink.share_after(120, monkeypatch) > 0.95
    assert sorted(uplink.lanes)[len(uplink.lanes) * 9 // 10] == 2
    assert max(uplink.lanes[2:]) <= 4


class Line:
    """What goes in a second is what its lanes bring, up to its rate."""

    def __init__(self, rate: float, lane_rate: float) -> None:
        self.rate, self.lane_rate = rate, lane_rate
        self.lanes = Lanes(lambda rate: max(2, int(rate / 100.0)), first=2, most=64)
        self.now, self.bytes_per_s = 0.0, 200.0

    def goes(self, seconds: int) -> int:
        """How many lanes there are at the end."""
        for _ in range(seconds):
            num = self.lanes.of(self.bytes_per_s)
            before, rate = self.bytes_per_s, min(self.rate, num * self.lane_rate)
            self.lanes.short()
            self.now += 1.0
            for _ in range(num):
                self.lanes.runs_in(self.now)
            if self.lanes.is_decided(self.now):
                self.lanes.measured(rate, before, num, self.now)
                self.bytes_per_s = rate
        return self.lanes.of(self.bytes_per_s)


def test_lanes_that_are_worth_it_stay_and_go_once_they_are_not() -> None:
    line = Line(rate=800.0, lane_rate=25.0)
    assert 800.0 / 25.0 / MORE <= line.goes(40) <= 64
    line.lane_rate = 100.0
    assert line.goes(400) == 8, "as usual"


def test_a_line_that_became_slow_keeps_no_lanes_of_when_it_was_fast() -> None:
    line = Line(rate=800.0, lane_rate=25.0)
    line.goes(40)
    line.rate = 50.0
    line.goes(2)
    assert line.goes(100) <= 4


def test_a_line_that_becomes_slow_while_lanes_are_tried_is_known_within_seconds() -> None:
    now, lanes = 0.0, Lanes(lambda _: 16, first=16, most=64)
    meter = Meter(lanes)
    for _ in range(16):
        meter.begin(now)
    while meter.num_lanes == 16:
        now += 0.1
        lanes.short()
        meter.gone(100_000, now)
    assert now < 10.0
    began = now
    while now < began + LONGEST_TRIAL_S + 2.0:
        now += 1.0
        meter.gone(1_000, now)
    assert meter.bytes_per_s is not None
    assert meter.bytes_per_s < 10_000
    assert meter.num_lanes == 16
