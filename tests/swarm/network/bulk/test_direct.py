"""Bulk past p2pd: sealed records, offers, and the way back to p2pd when there is no other."""

import asyncio
import contextlib
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar
from unittest.mock import AsyncMock

import pytest

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk import direct
from swarm.network.bulk.direct import CONNECT_S, WORTH_BYTES, WORTH_PUNCHING_BYTES, DirectListener, DirectOffer
from swarm.network.bulk.sealed_socket import RECORD_BYTES, SealedSocket, stream_keys
from swarm.network.bulk.sockets import Sending, receive
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.transport import Message
from tests.swarm.network.bulk.sealed_ends import SECRET, over_tcp, sealed

pytestmark = pytest.mark.processes

T = TypeVar("T")
LOCAL = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",))
BULK = os.urandom(3 * RECORD_BYTES + 17)


def sealed_pair() -> tuple[SealedSocket, SealedSocket]:
    return sealed(*socket.socketpair())


@pytest.mark.parametrize(
    "sizes", [(1,), (30, 5), (30, 20_000), (30, RECORD_BYTES), (100, 3 * RECORD_BYTES + 7, 9), (0, 4)]
)
def test_what_is_sealed_is_received_whatever_its_pieces(sizes: tuple[int, ...]) -> None:
    async def main() -> None:
        ours, theirs = sealed_pair()
        with contextlib.closing(ours), contextlib.closing(theirs):
            pieces = [os.urandom(size) for size in sizes]
            sending = Sending(ours, *pieces)
            assert await receive(theirs, sum(sizes) - 1) == b"".join(pieces)[:-1]
            assert await receive(theirs, 1) == b"".join(pieces)[-1:]
            await sending.wait()
            back = Sending(theirs, b"thanks")
            assert await receive(ours, 6) == b"thanks"
            await back.wait()

    asyncio.run(main())


def test_a_record_that_was_changed_repeated_or_is_not_the_next_one_ends_the_stream() -> None:
    async def main() -> None:
        for spoil in (
            lambda record, _: bytes([*record[:-1], record[-1] ^ 1]),
            lambda record, _: bytes([*record[:10], record[10] ^ 1, *record[11:]]),
            lambda _, following: following,
            lambda _record, _following: struct.pack(">I", RECORD_BYTES + 17) + bytes(40),
            lambda _record, _following: struct.pack(">I", 16) + bytes(16),
        ):
            ours, theirs = sealed_pair()
            wire, listening = socket.socketpair()
            for end in (wire, listening):
                end.setblocking(False)
            one, other = stream_keys(SECRET, b"", b"a" * 32, b"b" * 32)
            reader = SealedSocket(listening, send_key=other, receive_key=one)
            with contextlib.closing(ours), contextlib.closing(theirs), contextlib.closing(reader), wire:
                records = []
                for text in (b"first of all", b"and then"):
                    ours.sendmsg([memoryview(text)])
                    records.append(theirs.recv(1 << 12))
                wire.send(spoil(*records))
                with pytest.raises(OSError, match="record"):
                    async with asyncio.timeout(30):
                        await receive(reader, 5)
        ours, theirs = sealed_pair()
        with contextlib.closing(theirs):
            ours.sendmsg([memoryview(b"x" * 100)])
            ours.close()
            assert await receive(theirs, 100) == b"x" * 100
            with pytest.raises(EOFError):
                await receive(theirs, 1)

    asyncio.run(main())


def test_bodies_arrive_whole_however_their_records_are_cut_and_wake_the_reader_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is told how much must have come before it wakes the reader: never more than will come."""
    wakes = 0
    plain = SealedSocket.recv_into

    def counted(self: SealedSocket, view: memoryview) -> int:
        nonlocal wakes
        wakes += 1
        return plain(self, view)

    async def main() -> None:
        monkeypatch.setattr(SealedSocket, "recv_into", counted)
        ours, theirs = over_tcp()
        wire, carried = socket.socketpair()  # what the kernel between would do is done here: dribble
        for end in (ours, carried):
            end.setblocking(False)
        writer, reader = sealed(wire, theirs)
        with contextlib.closing(writer), contextlib.closing(reader), ours, carried:
            for sizes in ((200_000,), (300, 16_000, 16_000), (RECORD_BYTES, 5, RECORD_BYTES, 20_000, 1)):
                nonlocal wakes
                wakes = 0
                body = os.urandom(sum(sizes))
                receiving = asyncio.ensure_future(receive(reader, len(body)))
                at = num_pieces = 0
                for size in sizes:
                    sending = Sending(writer, body[at : at + size])
                    at += size
                    while not sending.is_done or _has_come(carried):
                        await asyncio.sleep(0)
                        with contextlib.suppress(BlockingIOError):
                            piece = carried.recv(7_001)
                            await asyncio.get_running_loop().sock_sendall(ours, piece)
                            num_pieces += 1
                            await asyncio.sleep(0.001)
                    sending.stop()
                async with asyncio.timeout(30):
                    assert await receiving == body
                assert wakes <= 4 * len(sizes) + 2, f"{wakes} for {len(sizes)} records in {num_pieces} pieces"

    asyncio.run(main())


def _has_come(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_each_stream_and_each_direction_has_keys_of_its_own() -> None:
    nonces = [(b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32), (b"a" * 32, b"c" * 32)]
    keys = [key for pair in nonces for key in stream_keys(SECRET, b"one", *pair)]
    keys += stream_keys(SECRET, b"other", *nonces[0]) + stream_keys(bytes(32), b"one", *nonces[0])
    assert len(set(keys)) == 10


def test_keys_are_bound_to_both_peers_and_the_session() -> None:
    session, a, b = bytes(16), PeerId("a"), PeerId("b")
    bindings = {direct._binding(session, caller=x, callee=y) for x, y in [(a, b), (b, a), (a, PeerId("c"))]}
    assert len(bindings | {direct._binding(b"1" * 16, caller=a, callee=b)}) == 4


def test_malformed_offers_are_the_peers_fault() -> None:
    good = DirectOffer(bytes(16), bytes(32), 4001, None)
    assert DirectOffer.from_value(good.to_value()) == good
    value = good.to_value()
    for wrong in (
        {**value, "session": bytes(15)},
        {**value, "secret": b""},
        {**value, "port4": 0},
        {**value, "port4": 1 << 16},
        {**value, "port6": "4001"},
        {**value, "more": 1},
        {"session": bytes(16)},
    ):
        with pytest.raises(RemoteError):
            DirectOffer.from_value(wrong)


def test_a_new_offer_ends_the_peers_old_one_and_each_ends_by_itself() -> None:
    listener = DirectListener(PeerId("me"), [(socket.AF_INET, "127.0.0.1")], 0)
    with contextlib.closing(listener):
        first = listener.offer(PeerId("one"), "192.0.2.1", now=0.0)
        again = listener.offer(PeerId("one"), "192.0.2.1", now=1.0)
        assert again.session != first.session
        assert again.secret != first.secret
        assert set(listener._sessions._sessions) == {again.session}
        other = listener.offer(PeerId("other"), "192.0.2.1", now=1000.0)
        assert set(listener._sessions._sessions) == {other.session}


def test_strangers_at_one_address_end_none_of_others_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MOST_SESSIONS", 16)
    listener = DirectListener(PeerId("me"), [(socket.AF_INET, "127.0.0.1")], 0)
    with contextlib.closing(listener):
        honest = {listener.offer(PeerId(f"home {n}"), f"198.51.{n}.7", now=0.0).session for n in range(8)}
        for n in range(100):
            listener.offer(PeerId(f"stranger {n}"), f"203.0.113.{n}", now=1.0)
        assert honest <= set(listener._sessions._sessions)
        assert len(listener._sessions._sessions) == 16


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux")
@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has no such option")
def test_who_waits_for_an_answer_asks_whether_the_other_end_is_still_there() -> None:
    """A newcomer waited nine minutes for a chunk of a donor whose line had been dead for one."""
    with socket.socket() as waiting:
        direct.prepare(waiting)
        assert waiting.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, every_s, times = (
            waiting.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle_s + times * every_s <= direct._SILENT_S


def test_congestion_control_is_chosen_where_the_system_lets_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def control_of(connection: socket.socket) -> bytes:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.socket() as plain, socket.socket() as chosen, socket.socket() as unknown:
        monkeypatch.setattr(direct, "CONGESTION", b"reno")  # which every kernel has, and lets anybody choose
        direct.prepare(chosen)
        assert control_of(chosen) == b"reno"
        monkeypatch.setattr(direct, "CONGESTION", b"unheard-of")
        direct.prepare(unknown)
        assert control_of(unknown) == control_of(plain)


@dataclass
class Two:
    run: Callable[[Awaitable[T]], T]
    a: P2PTransport
    b: P2PTransport

    async def echo(self, body: bytes = BULK, method: str = "echo", timeout_s: float = 5.0) -> bytes:
        answer = await self.a.call(
            self.b.peer_id, method, Message({"n": 1}, body), timeout_s=timeout_s, max_body_bytes=1 << 22
        )
        assert answer.meta == {"n": 1}
        return bytes(answer.body)

    async def until_direct(self) -> None:
        async with asyncio.timeout(30):
            while not self.a._direct.knows(self.b.peer_id):
                assert await self.echo() == BULK
                await asyncio.gather(*self.a._direct._asking.values())


@pytest.fixture
def two() -> Iterator[Two]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:

        async def set_up() -> Two:
            a, b = [await P2PTransport.create(Identity.generate(), LOCAL) for _ in range(2)]
            await a.connect(b.peer_id, b.addresses())

            async def echo(sender: PeerId, request: Message) -> Message:
                assert sender == a.peer_id
                return Message(request.meta, request.body)

            async def linger(_: PeerId, request: Message) -> Message:
                await asyncio.sleep(30)
                return request

            b.serve("echo", echo, max_body_bytes=1 << 22)
            b.serve("linger", linger, max_body_bytes=1 << 22)
            return Two(runner.run, a, b)

        made = runner.run(set_up())
        yield made
        runner.run(made.a.close())
        runner.run(made.b.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


def test_bulk_goes_directly_from_the_first_call_on_and_small_talk_never_asks(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "WORTH_WAITING_S", 5.0)

    async def main() -> None:
        for _ in range(40):
            await two.echo(b"x" * (WORTH_PUNCHING_BYTES - 1))
        assert not two.a._direct._asking
        assert await two.echo() == BULK
        assert two.a._direct.knows(two.b.peer_id)
        opened: list[str] = []

        async def open_stream(_: PeerId, protocol: str) -> socket.socket:
            opened.append(protocol)
            raise AssertionError("p2pd was asked for a stream")

        two.a._control.open_stream = open_stream  # type: ignore[method-assign]
        assert await asyncio.gather(*(two.echo() for _ in range(6))) == [BULK] * 6
        assert await two.echo(b"") == b""
        assert not opened

    two.run(main())


def test_short_messages_that_are_bulk_together_go_directly_soon(two: Two) -> None:
    async def main() -> None:
        short = b"x" * (16 << 10)
        for _ in range(len(range(0, WORTH_BYTES, 2 * len(short))) - 1):  # there and back
            await two.echo(short)
            assert not two.a._direct._asking
        await two.echo(short)
        await asyncio.gather(*two.a._direct._asking.values())
        assert two.a._direct.knows(two.b.peer_id)

    two.run(main())


def test_bulk_does_not_wait_for_an_offer_that_does_not_come(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "WORTH_WAITING_S", 0.05)

    async def main() -> None:
        async def never(_: PeerId) -> dict[str, Value]:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        two.a._direct._ask = never
        assert await asyncio.gather(*(two.echo() for _ in range(3))) == [BULK] * 3
        assert two.a._direct._asking
        assert not two.a._direct.knows(two.b.peer_id)

    two.run(main())


def test_direct_call_ends_at_its_deadline_and_breaks_with_its_callee(two: Two) -> None:
    async def main() -> None:
        await two.until_direct()
        with pytest.raises(UnreachableError, match=r"no answer to linger in 0\.\d+ s"):
            await two.echo(method="linger", timeout_s=0.2)
        waiting = [asyncio.ensure_future(two.echo(method="linger", timeout_s=20)) for _ in range(2)]
        await asyncio.wait(waiting, timeout=0.1)
        await two.b.daemon.stop()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, UnreachableError) for error in found), found

    two.run(main())


def test_whoever_closes_breaks_its_own_direct_calls(two: Two) -> None:
    async def main() -> None:
        await two.until_direct()
        waiting = asyncio.ensure_future(two.echo(method="linger", timeout_s=20))
        await asyncio.wait({waiting}, timeout=0.1)
        await two.a.close()
        with pytest.raises(UnreachableError):
            await waiting

    two.run(main())


def test_without_a_direct_way_calls_go_through_p2pd(two: Two) -> None:
    async def main() -> None:
        await two.until_direct()
        way = two.a._direct._known[two.b.peer_id]
        # A session that the other end has forgotten, as after its restart, and then a port that nobody listens on.
        for stale in (replace(way.offer, session=bytes(16)), replace(way.offer, port4=1)):
            two.a._direct._known[two.b.peer_id] = replace(way, offer=stale)
            two.a._idle.drop(two.b.peer_id)
            assert await two.echo() == BULK
            assert not two.a._direct.knows(two.b.peer_id)

    two.run(main())


def test_a_way_on_which_nothing_answers_for_a_moment_is_kept_and_a_closed_one_is_not(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, silence = direct._dial, TimeoutError()

    async def main() -> None:
        await two.until_direct()
        for error, longest_s, is_kept in ((silence, 30.0, True), (silence, 0.0, False)):
            two.a._idle.drop(two.b.peer_id)
            monkeypatch.setattr(direct, "_SILENT_S", longest_s)
            dialling = AsyncMock(side_effect=error)
            monkeypatch.setattr(direct, "_dial", dialling)
            for _ in range(2):
                assert await two.echo() == BULK  # through p2pd
                assert two.a._direct.knows(two.b.peer_id) == is_kept
            assert dialling.await_count == 1, "the next call does not wait for it"
            if is_kept:
                two.a._direct._known[two.b.peer_id].silent_at = -math.inf
            monkeypatch.setattr(direct, "_dial", dial)
            two.a._idle.drop(two.b.peer_id)
            assert await two.echo() == BULK
            assert not is_kept or two.a._direct._known[two.b.peer_id].silent_since is None
        assert not two.a._direct.knows(two.b.peer_id)  # nor asked again at once
        two.a._direct._again_at.clear()
        await two.until_direct()
        two.a._idle.drop(two.b.peer_id)
        monkeypatch.setattr(direct, "_dial", AsyncMock(side_effect=ConnectionRefusedError()))
        assert await two.echo() == BULK
        assert not two.a._direct.knows(two.b.peer_id)

    two.run(main())


def test_a_silent_way_is_tried_now_and_then_and_given_up_once(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """On slow lines no request is long, and pieces of a state are asked for by short ones: none tried a way again that
    had been silent once. And where two dials ended together the second made 120 s of 20."""

    async def main() -> None:
        await two.until_direct()
        dialler, peer, loop = two.a._direct, two.b.peer_id, asyncio.get_running_loop()
        way, dialling = dialler._known[peer], AsyncMock(side_effect=TimeoutError())
        monkeypatch.setattr(direct, "_dial", dialling)
        assert await dialler.open(peer, for_bulk=False) is None
        assert way.silent_since is not None
        for after_s, for_bulk, is_tried in (
            (0.0, True, False),
            (CONNECT_S + 0.1, False, False),
            (CONNECT_S + 0.1, True, True),
            (direct._SILENT_S + 0.1, False, True),
        ):
            way.silent_since = way.silent_at = loop.time() - after_s
            before = dialling.await_count
            way.silent_since += 1.0  # it is not lost yet
            assert await dialler.open(peer, for_bulk=for_bulk) is None
            assert dialling.await_count - before == is_tried
        way.silent_since, way.silent_at = loop.time() - 2 * direct._SILENT_S, loop.time() - CONNECT_S - 0.1

        async def in_a_moment(*_: object, **__: object) -> SealedSocket:
            await asyncio.sleep(0.05)
            raise TimeoutError

        monkeypatch.setattr(direct, "_dial", in_a_moment)
        await asyncio.gather(*(dialler.open(peer) for _ in range(3)))
        assert not dialler.knows(peer)
        rests_s = dialler._again_at[peer] - loop.time()
        assert direct._AGAIN_IF_FULL_S - 1 < rests_s <= direct._AGAIN_IF_FULL_S

    two.run(main())


def test_a_dial_that_its_call_cut_short_is_silence(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> SealedSocket:
        await asyncio.sleep(60.0)
        raise AssertionError

    async def main() -> None:
        await two.until_direct()
        monkeypatch.setattr(direct, "_dial", never)
        way = two.a._direct._known[two.b.peer_id]
        for waited_s, is_silent in ((0.01, False), (direct._UNHEARD_S + 0.1, True)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(waited_s):
                    await two.a._direct.open(two.b.peer_id, for_bulk=False)
            assert (way.silent_since is not None) == is_silent
        assert await two.a._direct.open(two.b.peer_id, for_bulk=False) is None, "at once"

    two.run(main())


def test_stranger_without_the_secret_is_nobody(two: Two) -> None:
    async def main() -> None:
        await two.until_direct()
        way = two.a._direct._known[two.b.peer_id]
        asked: list[PeerId] = []

        async def listen(sender: PeerId, request: Message) -> Message:
            asked.append(sender)
            return Message()

        two.b.serve("secret", listen, max_body_bytes=1 << 20)
        for secret in (bytes(32), way.offer.secret):
            offer = replace(way.offer, secret=secret)
            stream = await direct._dial(offer, way.host, caller=two.a.peer_id, callee=two.b.peer_id)
            with contextlib.closing(stream):
                head = struct.pack(">IHIIQ", 0x68737731, 6, 5000, 1, 0) + b"secret\x80"
                sending = Sending(stream, head)
                await sending.wait()
                with contextlib.suppress(EOFError, OSError):
                    async with asyncio.timeout(30):
                        await receive(stream, 17)
            assert asked == ([two.a.peer_id] if secret == way.offer.secret else [])

    two.run(main())
