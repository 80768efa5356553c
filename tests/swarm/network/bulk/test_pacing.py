"""Several senders to one slow line, in network namespaces."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.homes.emulated import Paths, Router, routing
from benchmarks.homes.namespaces import Namespaces, enter, why_not
from swarm.network.bulk import pacing
from swarm.network.bulk.direct import prepare
from swarm.network.bulk.pacing import Pace, Told
from swarm.network.bulk.sealed_socket import SealedSocket, stream_keys
from swarm.network.bulk.sockets import Sending, receive_into, send_all

RECEIVER, PORT = "receiver", 4000
PATHS = Paths(round_trip_ms=40.0, loss=0.0)
BODY = os.urandom(1 << 20)
STARTS_S, COUNTS_S = 4.0, 12.0
MOST_TWICE = 0.05


@pytest.fixture
def senders(request: pytest.FixtureRequest) -> tuple[str, ...]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return tuple(f"sender{number}" for number in range(request.param))


@contextlib.contextmanager
def lines(senders: tuple[str, ...]) -> Iterator[tuple[Namespaces, Router]]:
    members = (RECEIVER, *senders)
    with Namespaces(members, bridged=False) as network, routing(network, members) as router:
        yield network, router


def inside(namespace: str) -> socket.socket:
    """A TCP socket of the namespace: sockets stay in the one they were made in."""

    def made() -> socket.socket:
        enter(namespace)
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def connected(network: Namespaces, sender: str, listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = inside(network.namespace(sender))
    one.connect((network.address(RECEIVER), PORT))
    other, _ = listening.accept()
    for end in (one, other):
        prepare(end)
    return one, other


async def sent_at_once(ends: list[tuple[socket.socket, socket.socket]]) -> tuple[float, int, int]:
    """Of what is sent in `COUNTS_S`, how much is sent again; bytes that came; the fewest of a sender."""
    tasks = []
    with contextlib.ExitStack() as closing:
        for number, (near, far) in enumerate(ends):
            one, other = stream_keys(bytes(32), b"%d" % number, b"a" * 32, b"b" * 32)
            writer = closing.enter_context(contextlib.closing(SealedSocket(near, send_key=one, receive_key=other)))
            reader = closing.enter_context(contextlib.closing(SealedSocket(far, send_key=other, receive_key=one)))

            async def write(writer: SealedSocket = writer) -> None:
                while True:
                    sending = Sending(writer, BODY)
                    try:
                        await sending.wait()
                    finally:
                        sending.stop()

            async def read(reader: SealedSocket = reader) -> None:
                body = bytearray(len(BODY))
                while True:
                    await receive_into(reader, memoryview(body))
                    assert body == BODY

            tasks += [asyncio.ensure_future(write()), asyncio.ensure_future(read())]
        await asyncio.sleep(STARTS_S)
        before = [Told.of(near) for near, _ in ends]
        await asyncio.sleep(COUNTS_S)
        after = [Told.of(near) for near, _ in ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    both = [(one, other) for one, other in zip(before, after, strict=True) if one is not None and other is not None]
    assert len(both) == len(ends)
    again = sum(other.sent_again - one.sent_again for one, other in both)
    sent = sum(other.sent - one.sent for one, other in both)
    came = [other.acknowledged - one.acknowledged for one, other in both]
    return again / (sent - again), sum(came), min(came)


def sent_to(mbit: float, senders: tuple[str, ...]) -> tuple[float, int, int]:
    """See `sent_at_once`; through a downlink of so much, and back through a fifth of it, as homes have it."""
    with lines(senders) as (network, router), inside(network.namespace(RECEIVER)) as listening:
        listening.bind((network.address(RECEIVER), PORT))
        listening.listen()
        router.limit(PATHS, up_mbit=1.0, down_mbit=5.0)
        router.limit(PATHS, up_mbit=mbit / 5, down_mbit=mbit, only=[network.outside(RECEIVER)])
        ends = [connected(network, sender, listening) for sender in senders]
        return asyncio.run(sent_at_once(ends))


@pytest.mark.parametrize("senders", [3], indirect=True)
def test_senders_to_a_slow_line_send_little_twice_and_fill_it(senders: tuple[str, ...]) -> None:
    twice, came, least = sent_to(0.5, senders)
    assert twice < MOST_TWICE
    assert came > 0.85 * COUNTS_S * 0.5e6 / 8
    assert least > came / 12


@pytest.mark.soak
@pytest.mark.parametrize("senders", [3], indirect=True)
def test_without_a_pace_they_would_send_much_twice(senders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "watch", lambda self: None)
    twice, _, _ = sent_to(0.5, senders)
    assert twice > 2 * MOST_TWICE


@pytest.mark.parametrize("senders", [1], indirect=True)
def test_a_line_that_tcp_copes_with_is_left_to_it(senders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[float]()
    monkeypatch.setattr(Pace, "_keep_to", lambda self, rate: kept.append(rate))
    twice, came, _ = sent_to(5.0, senders)
    assert came > 0.85 * COUNTS_S * 1e6 / 8, "of its uplink"
    assert (twice, kept) == (0.0, [])


def told(
    *, seconds: float, rate: float, round_trip_s: float, lost: float = 0.0, least_s: float = 0.04, cut_off: bool = False
) -> Told:
    """After so long at a rate, bytes a second, with a share of what was sent lost."""
    acknowledged = int(seconds * rate)
    again = int(acknowledged * lost / (1 - lost))
    return Told(round_trip_s, least_s, acknowledged, seconds, acknowledged + again, again, is_cut_off=cut_off)


@pytest.fixture
def pace() -> Iterator[Pace]:
    with socket.socket() as connection:
        yield Pace(connection)


NOTHING = told(seconds=0.0, rate=0.0, round_trip_s=0.04)
QUEUED: dict[str, Any] = {"seconds": 1.0, "rate": 20_000.0, "round_trip_s": 0.2, "lost": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"round_trip_s": 0.1}, id="lost on a path without a queue"),
        pytest.param({"round_trip_s": 0.06, "least_s": 0.01}, id="lost while answers are kept for 40 ms"),
        pytest.param({"lost": 0.0}, id="nothing lost"),
        pytest.param({"rate": 60_000.0}, id="more under way than TCP needs"),
        pytest.param({"rate": 0.0}, id="nothing came"),
        pytest.param({"seconds": 0.3}, id="little to send"),
        pytest.param({"cut_off": True}, id="nothing is heard"),
    ],
)
def test_only_what_a_slow_lines_queue_drops_is_held_back(pace: Pace, changes: dict[str, Any]) -> None:
    pace.go_by(NOTHING, told(**(QUEUED | changes)))
    assert pace.bytes_per_s is None


def test_a_pace_is_below_what_was_acknowledged_and_never_far_below_what_was_before(pace: Pace) -> None:
    pace.go_by(NOTHING, told(**QUEUED))
    assert pace.bytes_per_s == pytest.approx(16_000, rel=0.01)
    pace.go_by(NOTHING, told(**QUEUED | {"rate": 1_000.0}))
    assert pace.bytes_per_s == pytest.approx(8_000, rel=0.01)


def test_a_paced_connection_comes_back_when_the_line_is_free(pace: Pace) -> None:
    pace.go_by(NOTHING, told(**QUEUED))
    looks = 0
    while pace.bytes_per_s is not None and looks < 60:
        looks += 1
        pace.go_by(NOTHING, told(seconds=1.0, rate=pace.bytes_per_s, round_trip_s=0.05))
    assert 15 < looks < 35, "half a minute to as much as TCP can do by itself"


def test_of_a_line_that_was_idle_a_pace_says_nothing(pace: Pace) -> None:
    async def main() -> None:
        pace.go_by(NOTHING, told(**QUEUED))
        pace.watch()
        assert pace.bytes_per_s is None

    asyncio.run(main())


def test_a_connection_that_sends_short_messages_alone_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[Told]()
    monkeypatch.setattr(pacing, "LOOK_S", 0.01)
    monkeypatch.setattr(Pace, "go_by", lambda self, before, told: looks.append(told))

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            near = socket.create_connection(listening.getsockname())
            far, _ = listening.accept()
        with far, contextlib.closing(SealedSocket(near, send_key=bytes(32), receive_key=bytes(32))) as writer:
            for count in (1, 2):
                await send_all(writer, b"short")
                await asyncio.sleep(0.1)
                assert len(looks) >= count

    asyncio.run(main())


def test_who_sends_ten_times_as_much_as_another_soon_does_not() -> None:
    """Of a line's loss each has a part as large as its part of what is sent."""
    with socket.socket() as connection:
        paces = [Pace(connection), Pace(connection)]
        for pace, rate in zip(paces, (40_000.0, 4_000.0), strict=True):
            pace.go_by(NOTHING, told(seconds=1.0, rate=rate, round_trip_s=0.2, lost=0.1))
        for _ in range(120):
            kept = [pace.bytes_per_s or 0.0 for pace in paces]
            lost = max(0.0, 1 - 50_000 / sum(kept))
            for pace, rate in zip(paces, kept, strict=True):
                pace.go_by(NOTHING, told(seconds=1.0, rate=rate * (1 - lost), round_trip_s=0.2, lost=lost))
    slow, fast = sorted(pace.bytes_per_s or 0.0 for pace in paces)
    assert slow > fast / 3
