"""Two peers and a host on one machine: streams by simultaneous open, sealed, for both to call by."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk.framing import ReplyHead
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.bulk.sockets import Stream
from swarm.network.loop import new_event_loop
from swarm.network.p2pd import idle_streams
from swarm.network.p2pd.p2p import SMALL_TALK_WAITS_S, P2PSettings, P2PTransport
from swarm.network.punch import puncher as module
from swarm.network.punch.puncher import PUNCH, Asked, Puncher
from swarm.network.transport import Message

pytestmark = pytest.mark.processes

T = TypeVar("T")
LOCAL = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",), punch_public_only=False)
BULK = os.urandom(300_000)


@dataclass
class Three:
    run: Callable[[Awaitable[T]], T]
    a: P2PTransport
    b: P2PTransport
    host: P2PTransport

    async def echo(self, caller: P2PTransport, callee: P2PTransport) -> None:
        answer = await caller.call(callee.peer_id, "echo", Message({}, BULK), timeout_s=10, max_body_bytes=1 << 20)
        assert bytes(answer.body) == BULK


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    """`a` and `b` know the host, and have no other direct way to each other."""

    async def echo(_: PeerId, request: Message) -> Message:
        return request

    async def not_dialled(peer_id: PeerId) -> bool:
        return False

    with asyncio.Runner(loop_factory=new_event_loop) as runner:

        async def set_up() -> Three:
            a, b, host = [await P2PTransport.create(Identity.generate(), LOCAL) for _ in range(3)]
            for peer in (a, b):
                peer.host = host.peer_id
                peer.serve("echo", echo, max_body_bytes=1 << 20)
                monkeypatch.setattr(peer._direct, "_dials", not_dialled)
                await peer.connect(host.peer_id, host.addresses())
            await a.connect(b.peer_id, b.addresses())
            return Three(runner.run, a, b, host)

        made = runner.run(set_up())
        yield made
        for peer in (made.a, made.b, made.host):
            runner.run(peer.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


def puncher(peer: P2PTransport) -> Puncher:
    assert peer._puncher is not None
    return peer._puncher


async def until_punched(one: P2PTransport, other: P2PTransport) -> None:
    task = puncher(one).punch(other.peer_id)
    assert task is not None
    assert await task


def test_bulk_of_both_goes_by_streams_of_one_punch_and_breaks_are_punched_again(three: Three) -> None:
    a, b = three.a, three.b

    async def main() -> None:
        await until_punched(a, b)
        await asyncio.wait(puncher(a)._tasks | puncher(b)._tasks, timeout=5)  # the same punch gives the callee some
        before = [puncher(peer).num_streams(other.peer_id) for peer, other in ((a, b), (b, a))]
        assert min(before) >= 1
        for peer in (a, b):
            peer._control.open_stream = refuse  # type: ignore[method-assign]
        await asyncio.gather(*(three.echo(a, b) for _ in range(4)), *(three.echo(b, a) for _ in range(3)))
        for stream in list(puncher(a)._links[b.peer_id].streams):
            assert isinstance(stream, SealedSocket)
            stream.break_off()
        del a._control.open_stream, b._control.open_stream
        a._idle.drop(b.peer_id)
        assert not puncher(a).num_streams(b.peer_id)
        await three.echo(a, b)
        await asyncio.gather(*a._direct._asking.values())
        assert puncher(a).num_streams(b.peer_id)

    async def refuse(_: PeerId, protocol: str) -> None:
        raise AssertionError(f"p2pd was asked for a stream of {protocol}")

    three.run(main())


@pytest.mark.parametrize("most_punched", [0, idle_streams.MOST_PUNCHED])
def test_a_punch_succeeds_however_many_streams_rest(
    three: Three, most_punched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_streams, "MOST_PUNCHED", most_punched)
    monkeypatch.setattr(idle_streams, "MOST_OF_ALL", 0)  # all of them rest already
    a, b = three.a, three.b

    async def main() -> None:
        await until_punched(a, b)
        await asyncio.wait(puncher(a)._tasks | puncher(b)._tasks, timeout=5)
        assert puncher(a)._links[b.peer_id].again_at == 0.0, "it is not one that failed"
        assert bool(puncher(a).num_streams(b.peer_id)) == bool(most_punched)

    three.run(main())


@pytest.mark.parametrize("error", [TransientError("not now"), RemoteError("malformed", "no")])
def test_a_refusal_costs_no_punched_stream(three: Three, error: Exception) -> None:
    a, b = three.a, three.b

    async def refuse(_: PeerId, request: Message) -> Message:
        raise error

    async def main() -> None:
        b.serve("refuse", refuse, max_body_bytes=1 << 20)
        await until_punched(a, b)
        await asyncio.wait(puncher(a)._tasks | puncher(b)._tasks, timeout=5)
        punched = set(puncher(a)._links[b.peer_id].streams)
        for _ in range(2 * len(punched)):
            with pytest.raises(type(error), match=str(error)):
                await a.call(b.peer_id, "refuse", Message({}, BULK), timeout_s=10, max_body_bytes=0)
        assert all(stream.fileno() >= 0 for stream in punched)
        await three.echo(a, b)

    three.run(main())


def test_nobody_is_dialled_on_a_word_that_is_not_the_hosts(three: Three) -> None:
    a, b = three.a, three.b

    async def main() -> None:
        b.host = Identity.generate().peer_id  # whoever saw `a`, it is not b's host
        task = puncher(a).punch(b.peer_id)
        assert task is not None
        assert not await task
        assert puncher(a).punch(b.peer_id) is None, "the next try waits"

    three.run(main())


def test_a_peer_causes_so_many_punches_within_a_minute_and_needs_ports_that_were_seen(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEGIN_S", 0.5)
    a, b = three.a, three.b
    asked: list[Message] = []

    async def main() -> None:
        plain = a.call

        async def call(peer: PeerId, method: str, request: Message, **limits: float) -> Message:
            if method == PUNCH:
                asked.append(request)
                raise TransientError("overheard")
            return await plain(peer, method, request, **limits)  # type: ignore[arg-type]

        a.call = call  # type: ignore[method-assign,assignment]
        task = puncher(a).punch(b.peer_id)
        assert task is not None
        assert not await task
        ask = Asked.from_value(asked[0].meta)
        first = ask.side.ports[0].words[0]
        for words in ((), (replace(first, port=first.port + 1),), (replace(first, host="127.0.0.2"),)):
            side = replace(ask.side, ports=(replace(ask.side.ports[0], words=words),))
            with pytest.raises(RemoteError):
                await puncher(b).asked(a.peer_id, Message(replace(ask, side=side).to_value()))
        with pytest.raises(RemoteError, match="by another"):  # overheard by a third
            await puncher(b).asked(three.host.peer_id, Message(ask.to_value()))
        assert not puncher(b)._agreed
        for _ in range(20):  # each at most as long as none is under way of the same session
            with contextlib.suppress(TransientError, RemoteError):
                await puncher(b).asked(a.peer_id, Message(ask.to_value()))
                with pytest.raises(TransientError):
                    await puncher(b).asked(a.peer_id, Message(ask.to_value()))
            puncher(b)._forget(a.peer_id, ask.session)
        with pytest.raises(TransientError, match="within a minute"):
            await puncher(b).asked(a.peer_id, Message(ask.to_value()))
        for agreed in list(puncher(b)._agreed):
            puncher(b)._forget(*agreed)

    three.run(main())


def by_a_relay_alone(one: P2PTransport, other: P2PTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """As p2pd lists its peers."""
    plain = one._control.remote_hosts

    async def remote_hosts() -> dict[PeerId, str | None]:
        return {**await plain(), other.peer_id: None}

    monkeypatch.setattr(one._control, "remote_hosts", remote_hosts)


def answered_by(peer: P2PTransport, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Of each answer that a peer reads from now on: the method, and whether it came by a stream past p2pd."""
    found: list[tuple[str, bool]] = []
    plain = peer._read_reply

    async def read_reply(stream: Stream, method: str, head: ReplyHead, max_body_bytes: int) -> Message:
        found.append((method, isinstance(stream, SealedSocket)))
        return await plain(stream, method, head, max_body_bytes)

    monkeypatch.setattr(peer, "_read_reply", read_reply)
    return found


@pytest.mark.parametrize("asked", ["give", "note", "take"])
def test_what_a_relay_would_carry_waits_for_a_punch_from_the_first_call_on(
    three: Three, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the answer that is long, or the request, and there what it says or what it brings."""
    a, b = three.a, three.b
    found = answered_by(a, monkeypatch)
    by_a_relay_alone(a, b, monkeypatch)

    async def answer(_: PeerId, request: Message) -> Message:
        return Message({}, BULK if asked == "give" else b"")

    async def main() -> None:
        b.serve(asked, answer, max_body_bytes=1 << 20)
        requests = {"give": Message(), "note": Message({"said": BULK[:10_000]}), "take": Message({}, BULK[:10_000])}
        await a.call(b.peer_id, asked, requests[asked], timeout_s=30, max_body_bytes=1 << 20 if asked == "give" else 0)

    three.run(main())
    assert (asked, True) in found
    assert (asked, False) not in found


def test_small_talk_takes_the_next_punched_stream_that_rests(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = three.a, three.b
    found = answered_by(a, monkeypatch)
    by_a_relay_alone(a, b, monkeypatch)

    async def linger(_: PeerId, request: Message) -> Message:
        await asyncio.sleep(SMALL_TALK_WAITS_S / 2)
        return request

    async def hang(_: PeerId, request: Message) -> Message:
        await asyncio.sleep(10 * SMALL_TALK_WAITS_S)
        return request

    async def call(method: str) -> None:
        await a.call(b.peer_id, method, Message(), timeout_s=10, max_body_bytes=0)

    async def main() -> None:
        b.serve("linger", linger, max_body_bytes=0)
        b.serve("hang", hang, max_body_bytes=0)
        await until_punched(a, b)
        await asyncio.wait(puncher(a)._tasks | puncher(b)._tasks, timeout=5)
        num_streams = puncher(a).num_streams(b.peer_id)
        busy = [asyncio.ensure_future(call("linger")) for _ in range(num_streams)]
        await asyncio.sleep(0)
        await call("echo")
        await asyncio.gather(*busy)
        assert ("echo", True) in found
        assert ("echo", False) not in found
        busy = [asyncio.ensure_future(call("hang")) for _ in range(puncher(a).num_streams(b.peer_id))]
        await asyncio.sleep(0)
        await call("echo")  # none comes to rest in time: it has its answer all the same
        assert found[-1] == ("echo", False)
        await asyncio.gather(*busy)

    three.run(main())
