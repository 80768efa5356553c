"""A router that speaks PCP forwards ports, and what it may answer instead."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.homes.forwarding import AskedRouter, PcpRouter, Ports
from swarm.core.errors import TransientError
from swarm.network.router import asking
from swarm.network.router.forwarded import LIFETIME_S, Forwarded
from swarm.network.router.nat_pmp import NatPmp
from swarm.network.router.pcp import Pcp
from swarm.network.router.port_mapper import PortMapper, Way
from tests.swarm.network.router.test_upnp import HOME, OUTSIDE, free_ports

Change = Callable[[bytes], bytes]
VERSION, RESULT, LIFETIME, NONCE, PROTOCOL, INNER, OUTER, ADDRESS = 0, 3, 4, 24, 36, 40, 42, 44
"""Where an answer has them."""


class Changed(PcpRouter):
    """Its answers are changed on their way."""

    def __init__(self, ports: Ports, change: Change) -> None:
        super().__init__(ports)
        self._change = change

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._to, self._transport = self._transport, self  # type: ignore[assignment]

    def sendto(self, data: bytes, addr: tuple[str, int]) -> None:
        self._to.sendto(self._change(data), addr)


def at(place: int, value: bytes) -> Change:
    return lambda data: data[:place] + value + data[place + len(value) :]


@asynccontextmanager
async def routing(router: AskedRouter) -> AsyncIterator[int]:
    """At this port."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: router, local_addr=(HOME, 0))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TRIES_S", (0.1, 0.1))


def test_ports_are_forwarded_and_given_back_also_where_the_router_speaks_nothing_older() -> None:
    async def main() -> None:
        ports = Ports(OUTSIDE)
        one, other = free_ports(2)
        async with routing(PcpRouter(ports)) as port:
            ways: list[Way] = [NatPmp(HOME, port=port), Pcp(HOME, port=port)]
            mapper = PortMapper(ways)
            found = await mapper.ask([one, other])
            assert found == Forwarded(OUTSIDE, HOME, {one: one, other: other}, LIFETIME_S)
            assert await mapper.ask([one, other]) == found, "asked again before it ends"
            with pytest.raises(TransientError, match="set to forward nothing"):
                await Pcp(HOME, port=port).ask([one])  # by another nonce, of another program
            await mapper.end([one, other])
            await asyncio.sleep(0.1)
            assert ports.listed == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "does not answer"),
        (lambda data: data[:59], "does not answer"),
        (at(NONCE, bytes(12)), "does not answer"),
        (at(INNER, b"\0\1"), "does not answer"),
        (at(VERSION, b"\3"), "another version"),
        (at(RESULT, b"\x08"), "no port left"),
        (at(RESULT, b"\x0c"), "another router in between"),
        (at(RESULT, b"\x4d"), "code 77"),
        (at(OUTER, bytes(2)), "forwards 0 to"),
        (at(LIFETIME, bytes(4)), "for 0 s"),
        (at(ADDRESS, struct.pack(">QQ", 0x20010DB8 << 32, 1)), "asked for"),
    ],
)
def test_a_router_that_forwards_nothing_is_said(change: Change, said: str) -> None:
    async def main() -> None:
        (one,) = free_ports(1)
        async with routing(Changed(Ports(OUTSIDE), change)) as port:
            with pytest.raises(TransientError, match=said):
                await Pcp(HOME, port=port).ask([one])

    asyncio.run(main())
