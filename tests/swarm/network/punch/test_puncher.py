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
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
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
