"""Peers with both versions of IP, on loopback addresses: dialled back by both, called by what connects."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.addresses import ports_of
from swarm.network.directory.dial_back import DIAL_BACK, DialBackRequest, DialledAt, DialledBack
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.punch.seen import Seen
from swarm.network.transport import Message

pytestmark = pytest.mark.processes

T = TypeVar("T")
FOUR, SIX = "/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"
BOTH = P2PSettings(listen=(FOUR, SIX), punch_public_only=False)
BULK = os.urandom(300_000)


def has_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@dataclass
class Met:
    run: Callable[[Awaitable[T]], T]
    host: P2PTransport
    peers: list[P2PTransport]

    async def joined(self, settings: P2PSettings, *, by: int = 4) -> P2PTransport:
        """A peer that p2pd has connected to the host by this version of IP, and that knows its other addresses."""
        peer = await P2PTransport.create(Identity.generate(), settings)
        self.peers.append(peer)
        peer.host = self.host.peer_id
        peer.serve("echo", echo, max_body_bytes=1 << 20)
        for addresses in (self.host.addresses_by(by), self.host.addresses()):
            await peer.connect(self.host.peer_id, addresses)
        return peer


async def echo(_: PeerId, request: Message) -> Message:
    return request


@pytest.fixture
def met() -> Iterator[Met]:
    if not has_loopback():
        pytest.skip("this machine has no IPv6")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        made = Met(runner.run, runner.run(P2PTransport.create(Identity.generate(), BOTH)), [])
        yield made
        for transport in (*made.peers, made.host):
            runner.run(transport.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


@pytest.mark.parametrize("by", [4, 6])
def test_a_peer_is_dialled_back_by_both_versions_whichever_it_called_by(met: Met, by: int) -> None:
    async def main() -> None:
        peer = await met.joined(BOTH, by=by)
        told = await peer.ask_to_be_dialled(met.host.peer_id)
        places = [DialledAt("127.0.0.1", True), DialledAt("::1", True)]
        assert told == DialledBack(tuple(places if by == 4 else reversed(places)))

    met.run(main())


def test_a_peer_that_answers_by_ipv6_alone_can_be_dialled(met: Met) -> None:
    async def main() -> None:
        peer = await met.joined(replace(BOTH, listen=(SIX,)))
        assert len(set(met.host._direct_listener.ports())) == 1, "of both versions, if the system chooses"
        peer.dialled_back = told = await peer.ask_to_be_dialled(met.host.peer_id)
        assert told == DialledBack((DialledAt("127.0.0.1", False), DialledAt("::1", True)))
        assert peer.can_be_dialled
        assert told.hosts == ("::1",)
        assert (told.is_silent(4), told.is_silent(6)) == (True, False)

    met.run(main())


def test_nobody_is_dialled_at_an_address_that_the_asked_one_has_not_seen_it_at(met: Met) -> None:
    async def main() -> None:
        peer, other = await met.joined(BOTH), Identity.generate()
        now_ms = round(swarm_time.now() * 1000)
        true = Seen(met.host.peer_id, peer.peer_id, "::1", 4001, now_ms)
        for word in (
            true.signed_by(other),
            replace(true, onlooker=other.peer_id).signed_by(other),
            replace(true, peer_id=other.peer_id).signed_by(met.host._identity),
            replace(true, at_ms=now_ms - 120_000).signed_by(met.host._identity),
        ):
            request = Message(DialBackRequest((), tuple(ports_of(peer.addresses(), 6)), (word,)).to_value())
            with pytest.raises(RemoteError) as refused:
                await peer.call(met.host.peer_id, DIAL_BACK, request, timeout_s=5, max_body_bytes=0)
            assert refused.value.kind == "unseen"

    met.run(main())


async def carry(caller: P2PTransport, callee: P2PTransport) -> None:
    answer = await caller.call(callee.peer_id, "echo", Message({}, BULK), timeout_s=15, max_body_bytes=1 << 20)
    assert bytes(answer.body) == BULK


def test_bulk_goes_by_ipv6_where_p2pd_does(met: Met) -> None:
    async def main() -> None:
        # Not by IPv4 too: p2pd connects to whom its host knows by any address that it has.
        one, other = [await met.joined(replace(BOTH, listen=(SIX,))) for _ in range(2)]
        await one.connect(other.peer_id, other.addresses())
        for caller, callee in ((one, other), (other, one)):
            await carry(caller, callee)
            assert caller._direct._known[callee.peer_id].host == "::1"

    met.run(main())


def test_bulk_goes_by_ipv6_where_p2pds_own_way_takes_none(met: Met) -> None:
    async def main() -> None:
        one, other = await met.joined(BOTH), await met.joined(BOTH)
        await one.connect(other.peer_id, other.addresses_by(4))
        await one.connect(other.peer_id, other.addresses())
        _, six = other._direct_listener.ports()
        other._direct_ports = lambda _: (None, six)  # type: ignore[method-assign,assignment]
        await carry(one, other)
        assert one._direct._known[other.peer_id].host == "::1"

    met.run(main())


async def cannot_be_dialled(_: PeerId) -> bool:
    return False


async def punched(asker: P2PTransport, callee: P2PTransport) -> set[str]:
    """Where streams lead to that came of a punch."""
    for peer in (asker, callee):
        peer._direct._dials = cannot_be_dialled  # type: ignore[method-assign,assignment]
    await asker.connect(callee.peer_id, callee.addresses())
    assert asker._puncher is not None
    assert await asker.punch(callee.peer_id)
    streams = list(asker._puncher._links[callee.peer_id].streams)
    await carry(asker, callee)
    return {stream._connection.getpeername()[0] for stream in streams}


@pytest.mark.parametrize("by", [4, 6])
def test_two_with_ipv6_punch_by_it_whichever_they_reached_the_host_by(met: Met, by: int) -> None:
    async def main() -> None:
        one, other = await met.joined(BOTH, by=by), await met.joined(BOTH, by=by)
        assert await punched(one, other) == {"::1"}

    met.run(main())


def test_where_one_has_no_ipv6_they_punch_by_ipv4(met: Met) -> None:
    async def main() -> None:
        one, other = await met.joined(BOTH), await met.joined(replace(BOTH, listen=(FOUR,)))
        assert await punched(one, other) == {"127.0.0.1"}
        with_both = await met.joined(BOTH, by=6)
        with_both._puncher._around.bind_hosts.pop(6)  # type: ignore[union-attr]
        assert await punched(one, with_both) == {"127.0.0.1"}, "the callee refuses by the other version"

    met.run(main())
