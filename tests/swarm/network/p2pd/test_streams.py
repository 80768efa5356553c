"""Calls between the same two peers share streams, and a shared stream must not always be trusted."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from swarm.core.errors import TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk.sockets import Sending, receive
from swarm.network.loop import new_event_loop
from swarm.network.p2pd import idle_streams
from swarm.network.p2pd.idle_streams import IdleStreams
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.punch.puncher import MOST_STREAMS
from swarm.network.transport import Message

pytestmark = pytest.mark.processes

T = TypeVar("T")
LOCAL = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",), direct_port=None, max_streams=12)
SOMEONE = PeerId("someone")


@dataclass
class Two:
    run: Callable[[Awaitable[T]], T]
    a: P2PTransport
    b: P2PTransport
    opened: list[PeerId] = field(default_factory=list)
    """To whom `a` has opened streams."""


@pytest.fixture
def two() -> Iterator[Two]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:

        async def set_up() -> Two:
            a, b = [await P2PTransport.create(Identity.generate(), LOCAL) for _ in range(2)]
            await a.connect(b.peer_id, b.addresses())

            async def echo(_: PeerId, request: Message) -> Message:
                return request

            async def fail(_: PeerId, request: Message) -> Message:
                raise TransientError("not now")

            async def linger(_: PeerId, request: Message) -> Message:
                await asyncio.sleep(30)
                return request

            for method, handler in (("echo", echo), ("fail", fail), ("linger", linger)):
                b.serve(method, handler, max_body_bytes=1 << 22)
            return Two(runner.run, a, b)

        made = runner.run(set_up())
        plain = made.a._control.open_stream

        async def open_stream(peer_id: PeerId, protocol: str) -> socket.socket:
            made.opened.append(peer_id)
            return await plain(peer_id, protocol)

        made.a._control.open_stream = open_stream  # type: ignore[method-assign]
        yield made
        runner.run(made.a.close())
        runner.run(made.b.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


async def echo(two: Two, body: bytes = b"x", method: str = "echo", timeout_s: float = 5.0) -> bytes:
    reply = await two.a.call(two.b.peer_id, method, Message({}, body), timeout_s=timeout_s, max_body_bytes=1 << 22)
    return bytes(reply.body)


def test_calls_one_after_the_other_share_a_stream_and_keep_their_bodies(two: Two) -> None:
    async def main() -> None:
        for size in (0, 1, 1 << 22, 3, 1 << 16):
            body = bytes([size % 251]) * size
            assert await echo(two, body) == body

    two.run(main())
    assert len(two.opened) == 1


def test_calls_at_once_have_streams_of_their_own_and_few_are_kept(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_streams, "MOST_OF_A_PEER", 8)

    async def main() -> None:
        for _ in range(3):
            bodies = [bytes([number]) * 100_000 for number in range(10)]
            assert await asyncio.gather(*(echo(two, body) for body in bodies)) == bodies

    two.run(main())
    assert 10 <= len(two.opened) <= 10 + 2 * (10 - 8)


def test_call_that_was_late_or_cancelled_leaves_no_stream_behind_and_one_that_failed_does(two: Two) -> None:
    async def main() -> None:
        with pytest.raises(TransientError, match="not now"):
            await echo(two, bytes(1 << 20), method="fail")
        assert await echo(two, b"after") == b"after"
        with pytest.raises(UnreachableError, match=r"no answer to linger in [01]\.\d+ s"):
            await echo(two, method="linger", timeout_s=0.1)
        cancelled = asyncio.ensure_future(echo(two, method="linger"))
        await asyncio.wait({cancelled}, timeout=0.1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert await echo(two, b"after") == b"after"

    two.run(main())
    assert len(two.opened) == 3


def test_stream_that_ended_meanwhile_is_not_used_again(two: Two) -> None:
    async def main() -> None:
        await echo(two)
        await two.a.disconnect(two.b.peer_id)
        async with asyncio.timeout(60):  # p2pd does not dial again for 5 s after a dial that failed
            while True:  # until a's p2pd has passed the end of the stream on
                with contextlib.suppress(TransientError):
                    assert await echo(two, b"again") == b"again"
                    return
                await asyncio.sleep(0.02)

    two.run(main())
    assert len(two.opened) == 2


def test_idle_streams_of_a_caller_give_way_to_new_ones(two: Two) -> None:
    async def main() -> None:
        await asyncio.gather(*(echo(two) for _ in range(8)))  # all are kept
        # b takes 12 streams at a time, and 8 of them rest: calls that last need them.
        lasting = [asyncio.ensure_future(echo(two, method="linger")) for _ in range(8)]
        strangers = [await P2PTransport.create(Identity.generate(), LOCAL) for _ in range(2)]
        for stranger in strangers:
            await stranger.connect(two.b.peer_id, two.b.addresses())
            for _ in range(2):
                await stranger.call(two.b.peer_id, "echo", Message(), timeout_s=5, max_body_bytes=0)
        for call in lasting:
            call.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)
        for stranger in strangers:
            await stranger.close()

    two.run(main())


def test_connections_that_say_nothing_do_not_keep_peers_out(two: Two) -> None:
    """A socket costs a stranger nothing: whoever has shown who it is keeps its place."""

    async def main() -> None:
        await echo(two)
        path = two.b.daemon.folder / "calls.sock"
        silent = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        for connection in silent:
            connection.connect(str(path))
        await asyncio.gather(*(echo(two) for _ in range(8)))
        for connection in silent:
            connection.close()

    two.run(main())


def test_idle_stream_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_streams, "KEPT_S", 0.05)

    async def main() -> None:
        idle = IdleStreams()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            idle.put(SOMEONE, ours)
            async with asyncio.timeout(30):
                assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""
            assert idle.take(SOMEONE) is None

    asyncio.run(main())


def test_as_many_punched_streams_of_a_peer_rest_as_are_punched() -> None:
    async def main() -> None:
        idle, pairs = IdleStreams(), [socket.socketpair() for _ in range(MOST_STREAMS)]
        for ours, _ in pairs:
            ours.setblocking(False)
            idle.put(SOMEONE, ours, is_punched=True)
        assert all(ours.fileno() >= 0 for ours, _ in pairs)
        idle.close()
        for _, theirs in pairs:
            theirs.close()

    asyncio.run(main())


def test_of_punched_streams_as_many_rest_and_whoever_has_most_gives_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, however many, take no place from them."""
    monkeypatch.setattr(idle_streams, "MOST_OF_ALL", 3)
    monkeypatch.setattr(idle_streams, "MOST_PUNCHED", 4)
    pairs = []

    def rest(idle: IdleStreams, who: str, *, is_punched: bool) -> socket.socket:
        pairs.append(socket.socketpair())
        ours = pairs[-1][0]
        ours.setblocking(False)
        idle.put(PeerId(who), ours, is_punched=is_punched)
        return ours

    async def main() -> None:
        idle = IdleStreams()
        others = [rest(idle, f"{number}", is_punched=False) for number in range(5)]
        first, *more = [rest(idle, "a", is_punched=True) for _ in range(3)]
        more += [rest(idle, name, is_punched=True) for name in "bc"]
        assert [stream.fileno() >= 0 for stream in others] == [True] * 3 + [False] * 2
        assert first.fileno() < 0
        assert all(stream.fileno() >= 0 for stream in more)
        idle.drop(PeerId("a"))
        assert rest(idle, "d", is_punched=True).fileno() >= 0
        idle.close()
        for _, theirs in pairs:
            theirs.close()

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"", b"unasked"])
def test_idle_stream_that_was_closed_or_spoke_is_not_handed_out(said: bytes) -> None:
    async def main() -> None:
        idle = IdleStreams()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        idle.put(SOMEONE, ours)
        theirs.sendall(said)
        theirs.close()
        assert idle.take(SOMEONE) is None
        assert ours.fileno() == -1

    asyncio.run(main())


def test_sending_ends_with_its_last_byte_or_with_the_socket() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            head, body = b"head", bytes(range(256)) * 40_000
            sending = Sending(ours, head, body)
            assert not sending.is_done
            assert 0 < sending.sent_bytes < len(head) + len(body)
            assert await receive(theirs, len(head) + len(body)) == head + body
            await sending.wait()
            assert sending.is_done
            assert sending.sent_bytes == len(head) + len(body)
            stuck = Sending(ours, body)
            theirs.close()
            with pytest.raises(OSError, match=r"(?i)pipe|reset"):
                async with asyncio.timeout(30):
                    await stuck.wait()
            assert not stuck.is_done

    asyncio.run(main())
