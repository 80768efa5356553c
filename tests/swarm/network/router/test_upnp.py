"""A router that speaks UPnP forwards ports, whatever it is like, and what it may answer instead."""

import asyncio
import errno
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import pytest
from aiohttp import web

from benchmarks.homes.forwarding import Inner, Ports, UpnpRouter, failed
from swarm.core.errors import TransientError
from swarm.network.router import upnp
from swarm.network.router.forwarded import LIFETIME_S, Forwarded
from swarm.network.router.igd import MOST_BYTES, OTHER_PORTS
from swarm.network.router.port_mapper import PortMapper
from swarm.network.router.upnp import Upnp
from tests.ports import own_port

HOME, OUTSIDE = "127.0.0.1", "127.0.0.2"
INNER_AND_LEASE = ("NewInternalPort", "NewLeaseDuration")


def free_ports(count: int) -> list[int]:
    return [own_port() for _ in range(count)]


def listed(router: UpnpRouter, *inner: int) -> list[tuple[int, Inner]]:
    """What it forwards to these ports: whoever else on this machine looks for a router finds it too."""
    return [(outer, to) for outer, to in router.ports.listed if to[1] in inner]


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the program that asks takes longer to start than a router to answer."""
    monkeypatch.setattr(upnp, "WITHIN_S", 120.0)
    monkeypatch.setattr(upnp, "END_WITHIN_S", 120.0)


@asynccontextmanager
async def routing(router: UpnpRouter) -> AsyncIterator[Upnp]:
    async with await router.serve():
        yield Upnp(HOME)


def test_a_program_that_cannot_be_started_is_a_router_that_forwards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(TransientError, match="too many open files"):
        asyncio.run(Upnp().ask([4001]))
    asyncio.run(Upnp().end([4001]))


@pytest.mark.parametrize("leases", [True, False], ids=["for a time", "until it is told to end"])
def test_ports_are_forwarded_and_given_back(leases: bool) -> None:
    async def main() -> None:
        router = UpnpRouter(HOME, Ports(OUTSIDE), leases=leases)
        one, other, strangers = free_ports(3)
        async with routing(router) as way:
            stranger: Inner = (OUTSIDE, 4001)
            await router.ports.forward(stranger, strangers)
            found = await way.ask([one, other])
            assert found == Forwarded(OUTSIDE, HOME, {one: one, other: other}, LIFETIME_S)
            assert await way.ask([one, other]) == found, "asked again before it ends"
            ours = [(one, (HOME, one)), (other, (HOME, other))]
            assert listed(router, stranger[1], one, other) == [(strangers, stranger), *ours]
            await way.end([one, other])
            assert listed(router, stranger[1], one, other) == [(strangers, stranger)]

    asyncio.run(main())


def test_a_port_that_is_taken_is_forwarded_from_another() -> None:
    async def main() -> None:
        router = UpnpRouter(HOME, Ports(OUTSIDE))
        (port,) = free_ports(1)
        async with routing(router) as way:
            await router.ports.forward(("127.0.0.3", port), port)
            found = await way.ask([port])
            assert found.ports[port] != port
            assert (found.ports[port], (HOME, port)) in router.ports.listed

    asyncio.run(main())


class Asked(UpnpRouter):
    """Counts what it is asked to forward, and refuses some of it."""

    def __init__(self, *refused: int, leases: bool = True) -> None:
        """`refused`: inner ports."""
        super().__init__(HOME, Ports(OUTSIDE), leases=leases)
        self._refused = refused
        self.leases_asked: list[int] = []

    async def _act(self, request: web.Request) -> web.Response:
        said = await request.text()
        if "AddPortMapping" in request.headers["SOAPAction"]:
            inner, lease = (int(re.findall(f"<{name}>(\\d+)<", said)[0]) for name in INNER_AND_LEASE)
            self.leases_asked.append(lease)
            if inner in self._refused:
                return failed(718, "ConflictInMappingEntry")
        return await super()._act(request)


@pytest.mark.parametrize("leases", [True, False], ids=["for a time", "until it is told to end"])
def test_a_port_is_not_left_forwarded_where_another_is_refused(leases: bool) -> None:
    async def main() -> None:
        one, other = free_ports(2)
        router = Asked(other, leases=leases)
        async with routing(router) as way:
            with pytest.raises(TransientError, match="Conflict"):
                await way.ask([one, other])
            assert not listed(router, one, other)

    asyncio.run(main())


def test_a_port_is_asked_for_again_only_of_a_router_that_forwards_for_good_alone() -> None:
    async def main() -> None:
        taken, free = free_ports(2)
        router = Asked(taken)
        async with routing(router) as way:
            with pytest.raises(TransientError, match="Conflict"):
                await way.ask([taken])
            assert router.leases_asked == [LIFETIME_S] * (1 + OTHER_PORTS)
        router = Asked(leases=False)
        async with routing(router) as way:
            await way.ask([free])
            assert router.leases_asked == [LIFETIME_S, 0]

    asyncio.run(main())


class Silent(UpnpRouter):
    """Is found, and says no more."""

    async def _act(self, request: web.Request) -> web.Response:
        await asyncio.sleep(60.0)
        raise AssertionError


class Odd(UpnpRouter):
    """Has no address."""

    async def _act(self, request: web.Request) -> web.Response:
        self.ports.outside = "a&lt;b"
        return await super()._act(request)


class Full(UpnpRouter):
    """Has no port left."""

    async def _act(self, request: web.Request) -> web.Response:
        self.ports.forward = _no_port  # type: ignore[method-assign]
        return await super()._act(request)


class Endless(UpnpRouter):
    """Answers, and does not end: a device of the home had 3.4 GB of this machine's memory within the time it has."""

    sent_mib = 0

    async def _act(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        answer = web.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(bytes(1 << 20))
                self.sent_mib += 1
        return answer


async def _no_port(to: Inner, wanted: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("kind", "said"), [(Silent, "within 3 s"), (Odd, "means nothing|forwards a port"), (Full, "Conflict")]
)
def test_a_router_that_forwards_nothing_is_said(
    kind: type[UpnpRouter], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is Silent:
        monkeypatch.setattr(upnp, "WITHIN_S", 3.0)

    async def main() -> None:
        async with routing(kind(HOME, Ports(OUTSIDE))) as way:
            began = time.monotonic()
            with pytest.raises(TransientError, match=said):
                await way.ask(free_ports(1))
            assert kind is not Silent or time.monotonic() - began < 10.0

    asyncio.run(main())


def test_an_answer_without_an_end_takes_little_memory() -> None:
    async def main() -> None:
        router = Endless(HOME, Ports(OUTSIDE))
        async with routing(router) as way:
            with pytest.raises(TransientError, match="UPnP"):
                await way.ask(free_ports(1))
        assert 0 < router.sent_mib < 2 * MOST_BYTES >> 20

    asyncio.run(main())


def test_where_nobody_speaks_it_that_is_said_soon() -> None:
    async def main() -> None:
        with pytest.raises(TransientError, match="no router forwards a port"):
            await Upnp(HOME).ask([4001])
        await Upnp(HOME).end([4001])

    asyncio.run(main())


class Dumb:
    """A protocol that the router does not speak."""

    asked = 0

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        self.asked += 1
        raise TransientError("it says nothing")

    async def end(self, ports: Sequence[int]) -> None:
        raise AssertionError("it forwards nothing")


def test_what_the_router_speaks_is_tried_and_remembered() -> None:
    async def main() -> None:
        router, dumb = UpnpRouter(HOME, Ports(OUTSIDE)), Dumb()
        (port,) = free_ports(1)
        async with routing(router) as way:
            mapper = PortMapper([dumb, way])
            for _ in range(2):
                assert (await mapper.ask([port])).ports == {port: port}
            assert dumb.asked == 1
            await mapper.end([port])
            assert not listed(router, port)
        with pytest.raises(TransientError, match=r"UPnP.*; it says nothing"):
            await mapper.ask([port])

    asyncio.run(main())
