"""How many messages go at a time where answers take long, on a modelled uplink in virtual time."""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from peer.round.mail.lanes import KEPT_S, LONGEST_TRIAL_S, MORE, Lanes
from peer.round.mail.meter import Meter
from peer.round.mail.outbox import OnItsWay, Outbox
from peer.round.mail.pace import Pace
from peer.round.mail.parcel import Parcel
from swarm.core.ids import PeerId
from swarm.core.transfers import MOST_LANES

PEERS = [PeerId(name) for name in ("one", "two", "three")]
FAST, SLOW = 2_500_000.0, 125_000.0
PARCEL_BYTES = 1 << 20


class Phase(NamedTuple):
    seconds: int
    rate: float
    answer_s: float


class Uplink:
    """Messages leave one behind the other, at its rate; each is answered so many seconds after its bytes are there.
    `sees_left`: whether that is seen before its answer."""

    def __init__(self, rate: float, answer_s: float, *, sees_left: bool = False) -> None:
        self.rate, self.answer_s, self.sees_left = rate, answer_s, sees_left
        self._free_at = 0.0
        self.sent_bytes = 0

    def outbox(self, spawn: Callable[[Coroutine[Any, Any, None]], Any]) -> Outbox:
        return Outbox(spawn, self.send, moved=lambda: self.sent_bytes)

    async def send(self, _: PeerId, parcels: list[Parcel], way: OnItsWay) -> int:
        loop, num_bytes = asyncio.get_running_loop(), sum(len(one.body) for one in parcels)
        way.leaves()
        self._free_at = max(self._free_at, loop.time()) + num_bytes / self.rate
        answered_at = self._free_at + self.answer_s
        if self.sees_left:
            await asyncio.sleep(self._free_at - loop.time())
            way.left()
        await asyncio.sleep(answered_at - loop.time())
        self.sent_bytes += num_bytes
        way.left()
        return num_bytes


def over(*phases: Phase, sees_left: bool = False) -> list[tuple[float, list[int]]]:
    """In each phase, while more waits for three peers: which share of the uplink was used; its lanes, each second."""
    found: list[tuple[float, list[int]]] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        uplink = Uplink(phases[0].rate, phases[0].answer_s, sees_left=sees_left)
        outbox = uplink.outbox(lambda work: tasks.append(asyncio.ensure_future(work)))
        step: Any = SimpleNamespace()
        body = bytes(PARCEL_BYTES)
        for phase in phases:
            for _ in range(round(phase.seconds * phase.rate / PARCEL_BYTES)):
                for peer in PEERS:
                    outbox.put(peer, Parcel(step, "contributed", {}, body))
        for phase in phases:
            uplink.rate, uplink.answer_s = phase.rate, phase.answer_s
            before, lanes = uplink.sent_bytes, []
            for _ in range(phase.seconds):
                await asyncio.sleep(1.0)
                lanes.append(outbox.uplink_lanes)
            found.append(((uplink.sent_bytes - before) / (phase.seconds * phase.rate), lanes))
        outbox.keep([], lambda _: False)
        await asyncio.gather(*(task for task in tasks if not task.done()))

    unhandled: list[object] = []
    run_virtually(main, rng=random.Random(0), on_unhandled=unhandled.append)
    assert not unhandled
    return found


@pytest.mark.parametrize("rate", [FAST, SLOW])
@pytest.mark.parametrize("answer_s", [0.04, 0.15, 0.3, 0.5])
def test_a_line_is_filled_though_answers_take_long(rate: float, answer_s: float) -> None:
    """Before lanes were tried, those of 2.5 MB/s were at 0.07 with 0.3 s, and at 0.03 with 0.5 s."""
    [(share, _)] = over(Phase(30, rate, answer_s))
    assert share > 0.6


@pytest.mark.parametrize("answer_s", [0.3, 0.8])
def test_a_line_is_filled_though_answers_take_long_when_bytes_do_not(answer_s: float) -> None:
    """Of a machine that has much to do."""
    [_, (share, _)] = over(Phase(60, FAST, answer_s), Phase(30, FAST, answer_s), sees_left=True)
    assert share > 0.6


def test_where_answers_come_soon_there_are_seldom_more_lanes_than_usual() -> None:
    """Each lane more makes others' packets wait, or has them lost."""
    [(share, lanes)] = over(Phase(120, SLOW, 0.04))
    assert share > 0.95
    assert sorted(lanes)[len(lanes) * 9 // 10] == 2
    assert max(lanes[2:]) <= 4


def test_lanes_found_on_a_slow_line_are_gone_once_it_is_fast() -> None:
    """Many times as many, for many times the rate, would lose everybody's packets."""
    _, (share, lanes) = over(Phase(150, SLOW / 10, 3.0), Phase(100, SLOW, 0.04))
    assert share > 0.8
    assert max(lanes[10:]) <= 8
    assert sorted(lanes)[len(lanes) * 3 // 4] == 2


def test_lanes_found_go_though_a_line_became_so_slow_that_no_trial_tells_anything() -> None:
    """A trial that told nothing left them as they were, and the next one was due at once: so for good."""
    _, (_, lanes) = over(Phase(150, SLOW, 1.5), Phase(200, SLOW / 3, 0.04))
    assert max(lanes[100:]) <= 4, lanes


def test_a_line_that_became_slow_between_trials_is_not_tried_with_lanes_of_what_it_was() -> None:
    """It had twice as many as when it was five times as fast, for twenty seconds."""
    line = Line(rate=4000.0, lane_rate=1000.0, most=400)
    line.goes(60)
    before = line.goes(10)[-1]
    line.lanes.forget(line.now)
    line.now += 300.0
    line.rate = 800.0
    assert max(line.goes(30)) <= before
    assert max(line.goes(30)[5:]) <= 16


class Line:
    """What goes in a second is what its lanes bring, up to its rate; measured with noise, and averaged as a `Meter`
    does."""

    def __init__(self, rate: float, lane_rate: float, *, noise: float = 0.0, most: int = 64, seed: int = 7) -> None:
        self.rate, self.lane_rate = rate, lane_rate
        self.lanes = Lanes(lambda rate: max(2, int(rate / 100.0)), most=most)
        self.now, self.bytes_per_s = 0.0, 200.0
        self._noise, self._chance = noise, random.Random(seed)

    def goes(self, seconds: int, *, waits: bool = True) -> list[int]:
        """How many lanes there are in each second."""
        numbers = []
        for _ in range(seconds):
            num = self.lanes.of(self.bytes_per_s)
            numbers.append(num)
            rate = min(self.rate, num * self.lane_rate) * math.exp(self._chance.gauss(0.0, self._noise))
            self.now += 1.0
            if waits:
                self.lanes.short()
            for _ in range(num):
                self.lanes.runs_in(self.now)
            if self.lanes.is_decided(self.now):
                shown = self.lanes.measured(rate, self.bytes_per_s, num, self.now)
                self.bytes_per_s = max(shown or 0.0, 2 / (1 / rate + 1 / self.bytes_per_s))
        return numbers


def test_lanes_that_are_worth_it_stay_and_go_once_they_are_not() -> None:
    line = Line(rate=800.0, lane_rate=25.0)
    assert line.goes(40)[-1] >= 800.0 / 25.0 / MORE
    assert min(line.goes(4 * int(KEPT_S))) >= 800.0 / 25.0 / MORE / 2, "half as many are tried now and then"
    line.lane_rate = 100.0
    assert line.goes(5 * int(KEPT_S))[-1] <= 8, "as usual"


def test_the_most_that_there_are_go_too_once_they_are_worth_nothing() -> None:
    line = Line(rate=800.0, lane_rate=25.0, most=16)
    assert line.goes(60)[-1] == 16
    line.lane_rate = 100.0
    assert line.goes(5 * int(KEPT_S))[-1] <= 8


def test_lanes_that_nothing_waits_for_are_not_kept() -> None:
    line = Line(rate=400.0, lane_rate=25.0)
    assert line.goes(40)[-1] > 8
    line.goes(int(KEPT_S) + 10, waits=False)
    assert line.goes(1, waits=False)[0] <= 4


def test_a_line_that_became_another_has_the_lanes_of_what_it_is() -> None:
    line = Line(rate=400.0, lane_rate=25.0)
    assert line.goes(40)[-1] > 8
    line.rate, line.lane_rate = 8000.0, 1000.0
    assert max(line.goes(15)[10:]) <= 80
    line = Line(rate=400.0, lane_rate=25.0)
    line.goes(40)
    line.rate = 20.0
    assert line.goes(15)[-1] <= 4


@pytest.mark.parametrize(("noise", "most_often"), [(0.1, 2), (0.3, 8)])
def test_rates_that_vary_are_no_reason_for_many_lanes(noise: float, most_often: int) -> None:
    """Two are usual. Of twelve lines half have no more than these for nine tenths of the time."""
    found = [sorted(Line(rate=150.0, lane_rate=1000.0, noise=noise, seed=seed).goes(3000)) for seed in range(12)]
    assert statistics.median(numbers[len(numbers) * 9 // 10] for numbers in found) <= most_often
    assert statistics.mean(statistics.mean(numbers) for numbers in found) < 5.0


def test_a_trial_that_is_cut_short_waits_for_its_next_time() -> None:
    """Rounds that are over sooner than a trial would else all be tried with twice the lanes, and tell nothing."""
    line, twice = Line(rate=200.0, lane_rate=1000.0), 0
    for _ in range(60):
        twice += sum(num > 2 for num in line.goes(4))
        line.lanes.forget(line.now)
    assert twice <= 12


def test_a_line_that_becomes_slow_while_lanes_are_tried_is_known_within_seconds() -> None:
    now, lanes = 0.0, Lanes(lambda _: 16, most=64)
    meter = Meter(lanes=lanes)
    for _ in range(16):
        meter.begin(now)
    while meter.bytes_per_s is None or lanes.of(meter.bytes_per_s) == 16:
        now += 0.1
        lanes.short()
        meter.gone(100_000, now)
    assert now < 10.0
    began = now
    while now < began + LONGEST_TRIAL_S + 2.0:
        now += 1.0
        meter.gone(1_000, now)
    assert meter.bytes_per_s < 10_000
    assert lanes.of(meter.bytes_per_s) == 16


def test_a_line_has_its_share_of_lanes_that_were_found_and_no_more_under_way_than_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rate, most in ((SLOW, MOST_LANES), (40 * 1e6, 2)):
        uplink = Uplink(rate, 0.04)
        outbox = uplink.outbox(lambda work: work.close())
        outbox._uplink.bytes_per_s = rate
        monkeypatch.setattr(outbox._tried, "of", lambda _: 1000)
        step: Any = SimpleNamespace()
        for peer in PEERS:
            outbox.put(peer, Parcel(step, "contributed", {}, b""))
            outbox._lines[peer].meter.bytes_per_s, outbox._lines[peer].meter.is_known = rate, True
        outbox._begin()
        assert {outbox._lines[peer].pace.lanes for peer in PEERS} == {most}
        monkeypatch.setattr(outbox._tried, "of", outbox._tried.usual)
        outbox._begin()
        assert {outbox._lines[peer].pace for peer in PEERS} == {Pace.of(rate)}
