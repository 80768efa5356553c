"""What peers of one daemon move over their owner's line is held to its rate all together."""

import random

import pytest

from peer.directory.limited_transport import LimitedTransport
from peer.directory.line import Line, Meter, Taker
from swarm.core.plan import HEADERS
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork


class Clock:
    """That goes on when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_two_takers_have_a_meters_rate_together() -> None:
    clock, moved = Clock(), [0, 0]
    meter = Meter(0.8, clock=clock)  # 100 kB/s
    takers = [Taker(meter, lambda place=place: moved[place]) for place in range(2)]  # type: ignore[misc]
    for number in range(100):
        clock.now += max(0.0, takers[number % 2].book(10_000))
        moved[number % 2] += 15_000  # each makes up for what itself moved unasked
    assert clock.now == pytest.approx(1_500_000 * HEADERS / 100_000, rel=0.02)


def test_a_rate_may_come_and_go() -> None:
    clock = Clock()
    taker = Taker(meter := Meter(None, clock=clock), lambda: 0)
    assert taker.book(10**9) == 0.0
    assert taker.takes_s(10**9) == 0.0
    meter.set_rate(8.0)
    assert taker.book(10**6) == pytest.approx(HEADERS)
    meter.set_rate(None)
    assert taker.book(10**9) == 0.0


def test_a_line_has_a_meter_each_way() -> None:
    line = Line(upload_mbit=8.0)
    assert line.up.takes_s(10**6) == pytest.approx(1.0)
    assert line.down.takes_s(10**6) == 0.0
    line.set_rates(upload_mbit=None, download_mbit=16.0)
    assert line.up.takes_s(10**6) == 0.0
    assert line.down.takes_s(10**6) == pytest.approx(0.5)


def test_a_peer_reckons_with_its_share_of_the_line() -> None:
    line = Line(upload_mbit=8.0, num_peers=2)
    limited = LimitedTransport(MemoryNetwork(random.Random(0)).transport(Identity.generate()), line)
    assert limited.sends_s(10**6) == pytest.approx(2 * HEADERS)
    line.num_peers -= 1
    assert limited.sends_s(10**6) == pytest.approx(HEADERS)
