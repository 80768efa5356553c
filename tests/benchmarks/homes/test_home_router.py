"""The router of emulated home links, on sockets instead of TUN devices."""

import contextlib
import os
import random
import socket
from collections.abc import Iterator

import pytest

from benchmarks.homes.router import Home, Router, orders_in, wire_bytes
from benchmarks.homes.translation import is_acknowledgement

ONE, OTHER = "10.0.0.1", "10.0.0.2"
LINES = {"up_mbit": 8.0, "down_mbit": 80.0, "round_trip_ms": 40.0, "queue_ms": 200.0}
PACKET = bytes(10 + 12) + socket.inet_aton(ONE) + socket.inet_aton(OTHER) + bytes(980)
"""1000 bytes behind the header of virtio: 1 ms of the uplink, a tenth of it of the downlink."""


class Pair:
    """Two homes, and the ends of their devices at which a kernel would be."""

    def __init__(self) -> None:
        self._ends = {address: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for address in (ONE, OTHER)}
        for ends in self._ends.values():
            for end in ends:
                end.setblocking(False)
        self.homes = {address: Home(ends[0].fileno()) for address, ends in self._ends.items()}
        self.router = Router(self.homes, rng=random.Random(1))

    def send(self, packet: bytes = PACKET, *, now: float) -> None:
        os.write(self._ends[ONE][1].fileno(), packet)
        self.router.receive(self.homes[ONE], now)

    def arrived(self, *, now: float) -> int:
        """Packets at the other home since it was last asked, at most those that its socket holds."""
        self.router.carry(now)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while self._ends[OTHER][1].recv(1 << 16) == PACKET:
                count += 1
        return count

    def close(self) -> None:
        for ends in self._ends.values():
            for end in ends:
                end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as made:
        yield made


def tcp(flags: int, num_bytes: int, *, options: int = 12, version: int = 4) -> bytes:
    """A segment behind the header of virtio."""
    header = bytes(12) + bytes([(20 + options) // 4 << 4, flags]) + bytes(6 + options)
    if version == 6:
        return bytes(10) + bytes([0x60]) + bytes(5) + bytes([6]) + bytes(33) + header + bytes(num_bytes)
    addresses = socket.inet_aton(ONE) + socket.inet_aton(OTHER)
    return bytes(10) + bytes([0x45]) + bytes(8) + bytes([6]) + bytes(2) + addresses + header + bytes(num_bytes)


@pytest.mark.parametrize("version", [4, 6])
def test_an_acknowledgement_brings_nothing_else(version: int) -> None:
    ack, push, begin = 0x10, 0x18, 0x02
    assert is_acknowledgement(tcp(ack, 0, version=version))
    assert is_acknowledgement(tcp(ack, 0, options=24, version=version))
    assert not is_acknowledgement(tcp(push, 1, version=version))
    assert not is_acknowledgement(tcp(begin, 0, options=20, version=version))
    assert not is_acknowledgement(PACKET)


def test_acknowledgements_are_counted_as_they_leave(pair: Pair) -> None:
    packet = tcp(0x10, 0)
    pair.send(now=10.0)
    pair.send(packet, now=11.0)
    carried = pair.homes[ONE].up.num_bytes
    pair.router.cut([ONE])
    pair.send(packet, now=12.0)
    figures = pair.router.figures()
    assert figures["up_ack_bytes"] == {ONE: len(packet) - 10, OTHER: 0}
    assert figures["up_bytes"] == {ONE: carried, OTHER: 0}


def test_what_goes_to_homes_apart_is_counted_by_itself_but_acknowledgements(pair: Pair) -> None:
    pair.send(now=10.0)
    pair.router.count_apart([OTHER])
    pair.send(now=11.0)
    pair.send(tcp(0x10, 0), now=12.0)
    assert pair.router.figures()["up_apart_bytes"] == {ONE: wire_bytes(PACKET), OTHER: 0}


def test_a_packet_takes_its_uplink_half_a_round_trip_and_a_downlink(pair: Pair) -> None:
    pair.router.limit(**LINES)
    for _ in range(7):  # the first leaves 4 ms ago: the bucket was full
        pair.send(now=10.0)
    assert pair.arrived(now=10.0159) == 0
    assert pair.arrived(now=10.0201) == 5
    assert pair.arrived(now=10.0221) == 2


def test_a_full_queue_drops_and_a_lossy_path_loses_what_its_uplink_carried(pair: Pair) -> None:
    pair.router.limit(**LINES)
    for _ in range(250):
        pair.send(now=10.0)
    assert pair.homes[ONE].up.dropped == 250 - 206  # 200 ms of queue, the bucket's 5 ms, and what is being sent

    pair.router.limit(**LINES, loss=0.05)
    carried, came = pair.homes[ONE].up.num_bytes, 0
    pair.router.carry(19.0)
    pair.arrived(now=19.0)
    for number in range(1000):
        pair.send(now=20.0 + number)
        came += pair.arrived(now=20.5 + number)
    lost = pair.router.figures()["lost"]
    assert isinstance(lost, int)
    assert pair.homes[ONE].up.num_bytes - carried == 1000 * 1000
    assert came == 1000 - lost
    assert 30 <= lost <= 70


def test_orders_that_come_together_are_all_read() -> None:
    """A line that was to be slow was as fast as the others: its order lay in a buffer behind the one before."""
    assert orders_in(b'{"cut": []}\n{"cut": ["a"]}\n{"up') == ([{"cut": []}, {"cut": ["a"]}], b'{"up')
    assert orders_in(b"") == ([], b"")
