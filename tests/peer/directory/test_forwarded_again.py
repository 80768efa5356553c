"""A port that a router forwards is told of as long as it is forwarded, and asked for again before that ends."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from peer.directory import reachability as module
from peer.directory.reachability import Reachability
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.directory.dial_back import DialledAt, DialledBack
from swarm.network.router.forwarded import Forwarded
from tests.swarm_in_process import identity_of

ME, HOST = identity_of(0), identity_of(1)
PORT, OUTSIDE = 4001, "203.0.113.5"


class Router:
    """Forwards a port by its own number, while it answers."""

    def __init__(self) -> None:
        self.answers = True
        self.num_asked = 0
        self.leads_here = False
        self.ended: list[int] = []

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        self.num_asked += 1
        if not self.answers:
            raise TransientError("the router does not answer")
        self.leads_here = True
        return Forwarded(OUTSIDE, "192.168.1.7", {port: port for port in ports}, 1800)

    async def end(self, ports: Sequence[int]) -> None:
        self.leads_here = False
        self.ended += ports


class AtHome:
    """A peer's transport, behind that router: the host gets through at the port while the router forwards it."""

    def __init__(self, router: Router) -> None:
        self.peer_id = ME.peer_id
        self.host: PeerId | None = None
        self.forwarded: Forwarded | None = None
        self.dialled_back: DialledBack | None = None
        self.relayed: tuple[str, ...] = ()
        self.told_meanwhile: list[Forwarded | None] = []
        self._router = router

    @property
    def can_be_dialled(self) -> bool | None:
        return self.dialled_back.answers if self.dialled_back is not None else None

    async def connected_peers(self) -> list[PeerId]:
        return [HOST.peer_id]

    async def call(self, *args: Any, **more: Any) -> Any:
        raise TransientError("no clock")

    async def ask_to_be_dialled(self, host: PeerId, addresses: Sequence[str] | None = None) -> DialledBack:
        self.told_meanwhile.append(self.forwarded)
        return DialledBack((DialledAt(OUTSIDE, self._router.leads_here),))

    def ports(self) -> list[int]:
        return [PORT]

    def addresses_at(self, forwarded: Forwarded) -> list[str]:
        return [f"/ip4/{forwarded.outside}/tcp/{forwarded.ports[PORT]}"]

    def addresses_by(self, version: int) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.0)


async def looked(transport: AtHome, router: Router, times: int) -> "asyncio.Task[None]":
    """At work, once the router was asked so often."""
    directory: Any = type("Directory", (), {"num_neighbours": 1})()
    mapper: Any = router
    inner: Any = transport
    working = asyncio.ensure_future(Reachability(inner, directory, HOST.peer_id, [], mapper=mapper).run())
    async with asyncio.timeout(30):
        while router.num_asked < times:  # noqa: ASYNC110 - it looks
            await asyncio.sleep(0.01)
    return working


def test_a_forwarded_port_is_asked_for_again_and_given_back_at_the_end() -> None:
    async def main() -> None:
        router = Router()
        transport = AtHome(router)
        working = await looked(transport, router, 3)
        assert transport.forwarded is not None
        assert transport.told_meanwhile[0] is None
        assert None not in transport.told_meanwhile[2:], "what is forwarded is told of while the host dials"
        working.cancel()
        await asyncio.wait({working})
        assert router.ended == [PORT]

    asyncio.run(main())


def test_a_router_that_does_not_answer_once_forwards_until_its_time_is_over() -> None:
    async def main() -> None:
        router = Router()
        transport = AtHome(router)
        working = await looked(transport, router, 2)
        router.answers = False
        asked = router.num_asked
        async with asyncio.timeout(30):
            while router.num_asked < asked + 3:  # noqa: ASYNC110 - it looks
                await asyncio.sleep(0.01)
        assert transport.forwarded is not None
        router.leads_here = False  # and then its time is over
        async with asyncio.timeout(30):
            while transport.forwarded is not None:  # noqa: ASYNC110 - it looks
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait({working})

    asyncio.run(main())
