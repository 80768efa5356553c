"""A router is asked to forward ports: what it may answer, and a peer that is dialled through it."""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.homes.forwarding import carry
from peer.directory import reachability
from peer.directory.reachability import Reach, Reachability
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.directory.dht import DHTDirectory
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.router import asking, nat_pmp
from swarm.network.router.forwarded import Forwarded
from swarm.network.router.nat_pmp import NatPmp, gateway
from swarm.network.router.pcp import Pcp
from swarm.network.router.port_mapper import PortMapper
from swarm.network.transport import Message
from tests.ports import own_port

ROUTER = "127.0.0.1"
NOWHERE = 1
"""A port at which nothing answers."""
Answer = Callable[[bytes], list[bytes]]


class Router(asyncio.DatagramProtocol):
    """Answers as it is told; keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[bytes] = []
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked.append(data)
        for reply in self._answer(data):
            self.transport.sendto(reply, addr)  # type: ignore[attr-defined]


def address(of: str = "203.0.113.5", *, result: int = 0) -> bytes:
    return struct.pack(">BBHI4s", 0, 128, result, 7, socket.inet_aton(of))


def mapping(inner: int, outer: int, *, seconds: int = 600, result: int = 0) -> bytes:
    return struct.pack(">BBHIHHI", 0, 130, result, 7, inner, outer, seconds)


def honest(outer_of: Callable[[int], int]) -> Answer:
    """Forwards each port as another."""

    def answer(data: bytes) -> list[bytes]:
        if data[1] == 0:
            return [address()]
        _, inner, _, _ = struct.unpack(">HHHI", data[2:])
        return [mapping(inner, outer_of(inner))]

    return answer


@asynccontextmanager
async def routing(answer: Answer) -> AsyncIterator[tuple[Router, PortMapper]]:
    made = Router(answer)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: made, local_addr=(ROUTER, 0))
    try:
        yield made, PortMapper([NatPmp(ROUTER, port=transport.get_extra_info("sockname")[1])])
    finally:
        transport.close()


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TRIES_S", (0.1, 1.0))
    monkeypatch.setattr(reachability, "LOOK_EVERY_S", 0.2)


def test_ports_are_forwarded_and_given_back() -> None:
    async def main() -> None:
        async with routing(honest(lambda inner: inner + 1)) as (router, mapper):
            found = await mapper.ask([4001, 4002])
            assert found == Forwarded("203.0.113.5", ROUTER, {4001: 4002, 4002: 4003}, 600)
            await mapper.end([4001])
            await asyncio.sleep(0.1)
            assert struct.unpack(">BBHHHI", router.asked[-1]) == (0, 2, 0, 4001, 0, 0)

    asyncio.run(main())


def test_what_another_question_was_answered_with_is_passed_over() -> None:
    def answer(data: bytes) -> list[bytes]:
        other = [b"", b"\0", address()[:8], mapping(1, 2), bytes(4), address(result=0)[:-1]]
        return [*other, *honest(lambda inner: inner)(data)] if data[1] == 0 else honest(lambda inner: inner)(data)

    async def main() -> None:
        async with routing(answer) as (_, mapper):
            assert (await mapper.ask([4001])).ports == {4001: 4001}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda data: [], "does not answer"),
        (lambda data: [address(result=2)], "set to forward nothing"),
        (lambda data: [struct.pack(">BBH", 0, 128, 1)], "another version"),
        (lambda data: [address(result=77)], "code 77"),
        (lambda data: [address()] if data[1] == 0 else [mapping(4001, 0)], "asked for 4001"),
        (lambda data: [address()] if data[1] == 0 else [mapping(9, 9)], "asked for 4001"),
        (lambda data: [address()] if data[1] == 0 else [mapping(4001, 4001, seconds=0)], "asked for 4001"),
        (lambda data: [address()] if data[1] == 0 else [mapping(0, 0, result=4)], "no port left"),
    ],
)
def test_a_router_that_forwards_nothing_is_said(answer: Answer, said: str) -> None:
    async def main() -> None:
        async with routing(answer) as (_, mapper):
            with pytest.raises(TransientError, match=said):
                await mapper.ask([4001])

    asyncio.run(main())


def test_who_cannot_be_asked_need_not_be_told_of_the_end() -> None:
    for way in (NatPmp("255.255.255.255"), Pcp("255.255.255.255")):  # not without leave to broadcast
        with pytest.raises(TransientError, match="cannot be asked"):
            asyncio.run(way.ask([4001]))
        asyncio.run(way.end([4001]))


def test_who_is_in_the_same_home_dials_the_port_itself() -> None:
    forwarded = Forwarded("203.0.113.5", "192.168.1.7", {4001: 5001}, 600)
    assert forwarded.is_beside("192.168.1.20")
    assert not any(map(forwarded.is_beside, ("192.168.2.20", "198.51.100.1", "2001:db8::1", None)))


def test_the_default_route_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = tmp_path / "route"
    monkeypatch.setattr(nat_pmp, "_ROUTES", routes)
    assert gateway() is None
    head = "Iface\tDestination\tGateway\tFlags\n"
    routes.write_text(f"{head}eth0\t0001A8C0\t00000000\t0001\ntun0\t00000000\t00000000\t0001\n")
    assert gateway() is None
    routes.write_text(f"{head}eth0\t0001A8C0\t00000000\t0001\neth0\t00000000\t0101A8C0\t0003\n")
    assert gateway() == "192.168.1.1"


@asynccontextmanager
async def piped(port: int, used: Counter[int]) -> AsyncIterator[int]:
    """Another port that leads to this one, as a router's does."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        used[port] += 1
        await carry((ROUTER, port), reader, writer)

    server = await asyncio.start_server(accept, ROUTER, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.processes
def test_a_peer_that_nobody_could_dial_is_dialled_through_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are told a port of it at which nothing answers, as behind a router."""
    monkeypatch.setattr(Forwarded, "is_beside", lambda forwarded, host: False)
    identities = [Identity.generate() for _ in range(3)]
    listened = own_port()

    def settings_of(place: int) -> P2PSettings:
        if place < 2:
            return P2PSettings(listen=(f"/ip4/{ROUTER}/tcp/0",))
        return P2PSettings(listen=(f"/ip4/{ROUTER}/tcp/{listened}",), announce=(f"/ip4/{ROUTER}/tcp/{NOWHERE}",))

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            made = []
            for place, identity in enumerate(identities):
                made.append(await P2PTransport.create(identity, settings_of(place)))
                stack.push_async_callback(made[-1].close)
            host, other, hidden = made
            hidden.serve("count", _count, max_body_bytes=4 << 20)
            for one in (other, hidden):
                await one.connect(host.peer_id, host.addresses())
            directories = [await DHTDirectory.create(identities[place], made[place]) for place in (0, 2)]
            for one in directories:
                stack.push_async_callback(one.close)
            told, direct = hidden.ports()
            assert told == NOWHERE
            used = Counter[int]()
            outer = {
                told: await stack.enter_async_context(piped(listened, used)),
                direct: await stack.enter_async_context(piped(direct, used)),
            }
            router, mapper = await stack.enter_async_context(routing(honest(outer.__getitem__)))
            reach = Reachability(hidden, directories[1], host.peer_id, host.addresses(), mapper=mapper)
            working = asyncio.ensure_future(reach.run())
            try:
                for _ in range(400):
                    if reach.reach is Reach.REACHABLE:
                        break
                    await asyncio.sleep(0.05)
                assert "at a port that its router forwards" in reach.why
                at = hidden.addresses()[0]
                assert at == f"/ip4/{ROUTER}/tcp/{outer[told]}/p2p/{hidden.peer_id}"
                await other.connect(hidden.peer_id, [at])
                body = bytes(2 << 20)
                async with asyncio.timeout(30.0):
                    while not used[direct]:
                        reply = await other.call(
                            hidden.peer_id, "count", Message({}, body), timeout_s=20.0, max_body_bytes=0
                        )
                        assert reply.meta == {"bytes": len(body)}
                assert used[listened]
            finally:
                working.cancel()
                await asyncio.wait({working})
            assert hidden.forwarded is None
            await asyncio.sleep(0.2)
            ended = [struct.unpack(">BBHHHI", one)[3:] for one in router.asked[-2:]]
            assert sorted(ended) == sorted([(told, 0, 0), (direct, 0, 0)])

    asyncio.run(main())


async def _count(_: PeerId, request: Message) -> Message:
    return Message({"bytes": len(request.body)})
