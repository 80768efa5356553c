"""A peer that nobody can dial is told so, takes a place at a relay, and is called through it, up to the budget."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from bootstrap.directory.relaying import HostRelay, RelaySettings
from peer.directory import reachability, relaying
from peer.directory.reachability import Reach, Reachability
from peer.directory.relaying import VolunteerRelay
from swarm.core.errors import LocalError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.host_protocol import RELAY, RelayOffer
from swarm.identity.key import Identity
from swarm.network.directory.dht import DHTDirectory
from swarm.network.directory.dial_back import DIAL_BACK, DialBackRequest, DialledAt, DialledBack
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.p2pd.relay import Relay
from swarm.network.transport import Message
from tests.ports import own_port
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes

T = TypeVar("T")
LISTEN = "/ip4/127.0.0.1/tcp/0"
OPEN = P2PSettings(listen=(LISTEN,))
HIDDEN = P2PSettings(listen=())
MIB = 1 << 20


class Scene:
    """A host, a peer that can be dialled, and two that cannot; all are connected to the host alone."""

    def __init__(self, run: Callable[[Awaitable[T]], T], transports: list[P2PTransport]) -> None:
        self.run = run
        self.transports = transports
        self.host, self.open, self.hidden, self.other = transports


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:

        async def set_up() -> list[P2PTransport]:
            settings = (OPEN, OPEN, HIDDEN, HIDDEN)
            made = [await P2PTransport.create(Identity.generate(), one) for one in settings]
            for transport in made:
                transport.serve("count", _count, max_body_bytes=4 * MIB)
                if transport is not made[0]:
                    await transport.connect(made[0].peer_id, made[0].addresses())
            return made

        transports = runner.run(set_up())
        directory = runner.run(DHTDirectory.create(Identity.generate(), transports[0]))
        yield Scene(runner.run, transports)
        runner.run(directory.close())
        for transport in transports:
            runner.run(transport.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


async def _count(_: PeerId, request: Message) -> Message:
    return Message({"count": len(request.body)})


async def call(caller: P2PTransport, callee: P2PTransport, num_bytes: int) -> None:
    request = Message({}, bytes(num_bytes))
    reply = await caller.call(callee.peer_id, "count", request, timeout_s=10, max_body_bytes=0)
    assert reply.meta == {"count": num_bytes}


def through(relay: Relay, peer: P2PTransport) -> tuple[str, ...]:
    return tuple(f"{address}/p2p-circuit/p2p/{peer.peer_id}" for address in relay.addresses)


def test_whoever_is_asked_dials_back_the_ports_it_is_told(scene: Scene) -> None:
    async def main() -> None:
        reached = await scene.open.ask_to_be_dialled(scene.host.peer_id)
        assert (reached.hosts, reached.answers) == (("127.0.0.1",), True)
        assert not (await scene.hidden.ask_to_be_dialled(scene.host.peer_id)).answers
        closed = own_port()
        for ports in ((closed,), (0, closed)):
            request = Message(DialBackRequest(ports, (), ()).to_value())
            reply = await scene.hidden.call(scene.host.peer_id, DIAL_BACK, request, timeout_s=5, max_body_bytes=0)
            assert not DialledBack.from_value(reply.meta).answers

    scene.run(main())


def test_nobody_relays_unasked(scene: Scene) -> None:
    with pytest.raises(TransientError, match="protocols not supported"):
        scene.run(scene.hidden.take_place(scene.host.peer_id))


def test_hidden_peers_are_called_through_a_relay_that_counts_and_ends_what_is_too_much(scene: Scene) -> None:
    async def main() -> None:
        relay = await Relay.start(Identity.generate(), (LISTEN,), 4 * MIB, scene.host)
        try:
            for transport in (scene.hidden, scene.other):
                await transport.connect(relay.peer_id, relay.addresses)
            place = await scene.hidden.take_place(relay.peer_id)
            assert place.limit_bytes == 4 * MIB
            assert await relay.carried_bytes() == 0
            await scene.other.connect(scene.hidden.peer_id, list(through(relay, scene.hidden)))
            await call(scene.other, scene.hidden, MIB)
            await call(scene.hidden, scene.other, MIB)  # the same connection serves both ways
            assert 2 * MIB < await relay.carried_bytes() < 2.2 * MIB
            with pytest.raises(TransientError):
                await call(scene.other, scene.hidden, 4 * MIB)
            await scene.other.connect(scene.hidden.peer_id, list(through(relay, scene.hidden)))
            await call(scene.other, scene.hidden, 100)
        finally:
            await relay.stop()
        with pytest.raises(LocalError, match="does not say"):
            await relay.carried_bytes()

    scene.run(main())


def test_a_peer_that_can_be_dialled_leaves_it_to_the_hidden_one(scene: Scene) -> None:
    async def main() -> None:
        relay = await Relay.start(Identity.generate(), (LISTEN,), 4 * MIB, scene.host)
        scene.open.dialled_back = DialledBack((DialledAt("127.0.0.1", True),))
        try:
            await scene.hidden.connect(relay.peer_id, relay.addresses)
            await scene.hidden.take_place(relay.peer_id)
            addresses = list(through(relay, scene.hidden))
            dialling = asyncio.ensure_future(scene.open.connect(scene.hidden.peer_id, addresses))
            await scene.hidden.connect(scene.open.peer_id, scene.open.addresses())
            await dialling
            await call(scene.open, scene.hidden, MIB)
            assert await relay.carried_bytes() == 0
        finally:
            scene.open.dialled_back = None
            await relay.stop()

    scene.run(main())


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(reachability, "OFFER_EVERY_S", 0.2)
    monkeypatch.setattr(relaying, "LOOK_EVERY_S", 0.2)


class HiddenPeer:
    """A hidden peer that keeps itself within reach, a host that relays for it, and what the host said."""

    def __init__(self, scene: Scene, folder: Path, budget_bytes: int) -> None:
        self.scene = scene
        self.folder = folder
        self.settings = RelaySettings(listen=(LISTEN,), budget_bytes=budget_bytes, bulk_bytes=MIB // 2)
        self.told: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        host, identity = self.scene.host, Identity.generate()
        self.relay = await HostRelay.open(self.folder, host, self.settings, self.told.append)

        async def offer(_: PeerId, request: Message) -> Message:
            return Message(self.relay.offer().to_value())

        host.serve(RELAY, offer, max_body_bytes=0)
        self.transport = await P2PTransport.create(identity, HIDDEN)
        self.transport.serve("count", _count, max_body_bytes=4 * MIB)
        self._directory = await DHTDirectory.create(identity, self.transport)
        self.reachability = Reachability(self.transport, self._directory, host.peer_id, host.addresses(), mapper=None)
        self._working = [asyncio.ensure_future(work) for work in (self.relay.run(), self.reachability.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._working:
            task.cancel()
        await asyncio.wait(self._working)
        await self.relay.close()
        await self._directory.close()
        await self.transport.close()

    async def wait_until(self, reach: Reach) -> None:
        await until(lambda: self.reachability.reach is reach)


def test_a_hosts_relay_ends_with_its_budget_also_after_a_restart(scene: Scene, tmp_path: Path) -> None:
    async def main() -> None:
        async with HiddenPeer(scene, tmp_path, 3 * MIB) as peer:
            hidden = peer.transport
            await peer.wait_until(Reach.RELAYED)
            assert hidden.addresses() == list(hidden.relayed)
            await scene.other.connect(hidden.peer_id, hidden.addresses())
            # Not all one way: a connection ends by itself after the budget each way.
            await call(hidden, scene.other, MIB)
            await until(lambda: not hidden.relay_carries_bulk)
            with pytest.raises(UnreachableError, match="carries no bulk any more"):
                await call(hidden, scene.other, MIB)
            await call(hidden, scene.other, 1000)
            for _ in range(2):
                await call(scene.other, hidden, MIB)
            await until(lambda: "relay budget of 0.00314573 GB is used up" in peer.reachability.why)
            assert peer.reachability.reach is Reach.OUTBOUND
            assert hidden.addresses() == []
            await until(lambda: len(peer.told) == 2)  # it is told after it is so
        assert [event["carried_bytes"] >= 3 * MIB for event in peer.told] == [False, True]
        again = await HostRelay.open(tmp_path, scene.host, peer.settings, peer.told.append)
        assert again.report() == peer.relay.report()
        assert again.offer().peer_id is None
        await again.close()

    scene.run(main())


def test_a_volunteer_relays_within_its_budget_also_while_the_host_is_away(scene: Scene, tmp_path: Path) -> None:
    async def main() -> None:
        identity, left, carried = Identity.generate(), 3 * MIB, list[int]()
        host, telling = scene.host, await DHTDirectory.create(Identity.generate(), scene.open)
        await telling.join(host.addresses())
        volunteer = VolunteerRelay(
            tmp_path / "relay.key",
            (LISTEN,),
            scene.open,
            telling,
            host.peer_id,
            left_bytes=lambda: left - sum(carried),
            carried=carried.append,
        )
        hidden = await P2PTransport.create(identity, HIDDEN)
        hidden.serve("count", _count, max_body_bytes=4 * MIB)
        directory = await DHTDirectory.create(identity, hidden)
        reach = Reachability(hidden, directory, host.peer_id, host.addresses(), mapper=None)
        away = True

        async def offer(_: PeerId, request: Message) -> Message:
            if away:
                raise TransientError("away")
            return Message(RelayOffer(refusal="this host relays for nobody").to_value())

        host.serve(RELAY, offer, max_body_bytes=0)
        scene.open.dialled_back = DialledBack((DialledAt("127.0.0.1", True),))
        working = [asyncio.ensure_future(work) for work in (reach.run(), volunteer.run())]
        try:
            await until(lambda: reach.reach is Reach.RELAYED)
            assert len(hidden.addresses()) == 1
            assert scene.open.addresses()[0].split("/tcp/")[0] in hidden.addresses()[0]
            await scene.other.connect(hidden.peer_id, hidden.addresses())
            await call(scene.other, hidden, MIB)
            await until(lambda: sum(carried) > MIB)
            away = False
            for caller, callee in (
                (scene.other, hidden),
                (hidden, scene.other),
            ):  # a way each
                await call(caller, callee, MIB)
            await until(lambda: "relays for nobody" in reach.why)
            assert reach.reach is Reach.OUTBOUND
            assert 3 * MIB <= sum(carried) < 3.5 * MIB
        finally:
            scene.open.dialled_back = None
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            await telling.close()
            await directory.close()
            await hidden.close()

    scene.run(main())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within 30 s")


def test_a_peer_that_lost_its_host_and_its_place_gets_both_back(scene: Scene, tmp_path: Path) -> None:
    async def main() -> None:
        async with HiddenPeer(scene, tmp_path, 100 * MIB) as peer:
            await peer.wait_until(Reach.RELAYED)
            relay = peer.relay.offer().peer_id
            assert relay is not None
            lost = {scene.host.peer_id, relay}
            for one in lost:
                await peer.transport.disconnect(one)
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(TransientError):  # it may be connected, but have no place yet
                        if lost <= set(await peer.transport.connected_peers()):
                            await scene.other.connect(relay, list(peer.relay.offer().addresses))
                            await scene.other.connect(peer.transport.peer_id, list(peer.transport.relayed))
                            await call(scene.other, peer.transport, MIB)
                            break
                    await asyncio.sleep(0.1)
            await peer.wait_until(Reach.RELAYED)

    scene.run(main())


@pytest.mark.soak
def test_a_daemon_relays_when_its_owner_says_so(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=5000, every=5000, founders=1) as swarm:
        swarm.start_host()
        invite = swarm.wait_for("listening")["invite"]
        argv = ["join", invite, "--stage", "1", "--dir", str(tmp_path / "p1a"), "--threads", "1", "--yes", "--verbose"]
        argv += ["--listen", "127.0.0.1:0", "--relay-gb", "1"]
        swarm.peers["p1a"] = zygote.start(argv, tmp_path / "p1a.log")
        swarm.start_peer("p0a", 0)
        swarm.wait_for("version", version=1)
        for _ in range(600):
            if "relays for peers that cannot be dialled, at 127.0.0.1" in (tmp_path / "p1a.log").read_text():
                break
            time.sleep(0.05)
        else:
            raise AssertionError("it does not relay")
        os.kill(swarm.peers["p1a"], signal.SIGINT)
        assert zygote.exit_code(swarm.peers["p1a"], timeout_s=30) == 0
    assert zygote.leftovers() == []
