"""What a volunteer's offer of a relay may do to the peer that takes it."""

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from peer.directory.neighbours import Neighbours
from peer.directory.reachability import MAX_RELAYS_TRIED, Reach, Reachability
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.host_protocol import MAX_RELAY_ADDRESSES, RelayOffer, relay_topic
from swarm.identity.key import Identity
from swarm.network.directory.dial_back import DialledAt, DialledBack
from swarm.network.memory import MemoryNetwork
from swarm.network.p2pd.relay_place import RelayPlace
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import RUN_ID, small_settings

CLEARS = "\x1b[2J"
HOST, ME, RELAY = identity_of(0), identity_of(1), identity_of(2)
GOOD = f"/ip4/203.0.114.5/tcp/4000/p2p/{RELAY.peer_id}"


class Hidden:
    """A peer's transport: the host is away, and whatever relay it asks has a place."""

    def __init__(self) -> None:
        self.peer_id = ME.peer_id
        self.host: PeerId | None = None
        self.can_be_dialled = False
        self.relay_carries_bulk = True
        self.relayed: tuple[str, ...] = ()
        self.asked: list[PeerId] = []

    async def call(self, *args: Any, **more: Any) -> Any:
        raise TransientError("the host is away")

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        self.asked.append(peer_id)

    async def take_place(self, relay: PeerId) -> RelayPlace:
        return RelayPlace(0.0, 0)

    async def host_of(self, peer_id: PeerId) -> str | None:
        return "203.0.113.9"

    def addresses(self) -> list[str]:
        return list(self.relayed)


def reachability(transport: Any, network: MemoryNetwork) -> Reachability:
    directory: Any = network.directory(ME)
    return Reachability(transport, directory, HOST.peer_id, [], mapper=None)


async def told(
    network: MemoryNetwork, by: Identity, relay: PeerId, addresses: list[str], *, carries_bulk: bool = True
) -> None:
    listed: list[Value] = [*addresses]
    offer: dict[str, Value] = {"peer_id": relay, "addresses": listed, "refusal": "", "carries_bulk": carries_bulk}
    await network.directory(by).publish(relay_topic(HOST.peer_id), offer, ttl_s=100.0)


@pytest.mark.parametrize(
    "other",
    ["\U0001f41d" * 128, "no address", f"/dns4/{'a' * 60}.example/tcp/1", GOOD + "/p2p-circuit"],
    ids=["long", "none", "another", "relayed"],
)
def test_whoever_takes_a_place_goes_on_announcing_itself(other: str) -> None:
    """Its record has room for its addresses, whatever a relay says that its own are."""

    async def scenario() -> None:
        network, transport = MemoryNetwork(random.Random(0)), Hidden()
        await told(network, RELAY, RELAY.peer_id, [GOOD, *[other] * (MAX_RELAY_ADDRESSES - 1)])
        reach = reachability(transport, network)
        try:
            await reach._take_place()
        except TransientError:
            assert transport.relayed == ()
        events: Any = SimpleNamespace()
        context: Any = SimpleNamespace(settings=small_settings(1), run_id=RUN_ID, transport=transport, events=events)
        neighbours = Neighbours(
            context,
            network.directory(ME),
            StageIndex(0),
            lambda: Version(0),
            lambda peer, fields: True,
            dict,
            lambda: None,
        )
        await neighbours.announce_once()
        assert len(transport.relayed) < MAX_RELAY_ADDRESSES
        if reach.reach is Reach.RELAYED:
            assert transport.relayed[0].startswith(GOOD)

    asyncio.run(scenario())


def test_who_has_a_place_is_relayed_still_when_the_host_could_not_dial_it_once_more() -> None:
    """It has itself dialled every ten minutes, and its place is for longer."""

    class InTouch(Hidden):
        forwarded = None

        async def connected_peers(self) -> list[PeerId]:
            return [HOST.peer_id, RELAY.peer_id]

        async def ask_to_be_dialled(self, peer_id: PeerId) -> DialledBack:
            return DialledBack((DialledAt("203.0.113.1", False),))

        async def take_place(self, relay: PeerId) -> RelayPlace:
            return RelayPlace(time.time() + 3600.0, 0)

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        await told(network, RELAY, RELAY.peer_id, [GOOD])
        reach = reachability(InTouch(), network)
        reach._directory.num_neighbours = 1
        for _ in range(2):
            reach._ask_at = 0.0
            await reach._look()
            assert reach.reach is Reach.RELAYED, reach.why

    asyncio.run(scenario())


def test_another_peers_offer_does_not_say_where_a_relay_is_that_has_given_a_place() -> None:
    """The place is renewed over the connection that there is, which says nothing of other addresses."""

    async def scenario() -> None:
        network, transport = MemoryNetwork(random.Random(0)), Hidden()
        others = sorted((identity_of(number) for number in range(3, 9)), key=lambda one: one.peer_id)
        await told(network, others[-1], RELAY.peer_id, [GOOD])
        reach = reachability(transport, network)
        await reach._take_place()
        taken = transport.relayed
        assert taken[0].startswith(GOOD)
        await told(network, others[0], RELAY.peer_id, [GOOD.replace("4000", "1")], carries_bulk=False)
        await reach._take_place()
        assert transport.asked == [RELAY.peer_id, RELAY.peer_id]
        assert transport.relayed == taken
        assert transport.relay_carries_bulk

    asyncio.run(scenario())


def test_a_refusal_is_the_hosts_and_acts_on_no_terminal() -> None:
    """Why a peer has no relay is told in its owner's status."""

    class Refused(Hidden):
        refusal = "not now"

        async def call(self, *args: Any, **more: Any) -> Message:
            return Message(RelayOffer(refusal=self.refusal).to_value())

    async def scenario() -> None:
        network, transport = MemoryNetwork(random.Random(0)), Refused()
        offer: dict[str, Value] = {"peer_id": None, "addresses": [], "refusal": "nobody asked", "carries_bulk": True}
        await network.directory(RELAY).publish(relay_topic(HOST.peer_id), offer, ttl_s=100.0)
        reach = reachability(transport, network)
        await reach._take_place()
        assert "not now" in reach.why
        assert "nobody asked" not in reach.why
        transport.refusal = f"{CLEARS}not now"
        with pytest.raises(RemoteError, match=r"relay offer\.refusal is str of 11"):
            await reach._take_place()
        assert reach.why.isprintable()

    asyncio.run(scenario())


def test_nobody_knows_which_relays_a_peer_will_try() -> None:
    """Else who makes keys until theirs come first has all tries of a peer that it chose."""

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        for number in range(3, 35):
            identity = identity_of(number)
            await told(network, identity, identity.peer_id, [GOOD])
        orders = set()
        for _ in range(4):
            reach = reachability(Hidden(), network)
            offers = await reach._offers_of_volunteers()
            assert len(offers) == MAX_RELAYS_TRIED
            assert offers == await reach._offers_of_volunteers()
            orders.add(tuple(offers))
        assert len(orders) > 1

    asyncio.run(scenario())


def test_nobody_but_the_host_has_a_name_looked_up_nor_says_where_the_host_is() -> None:
    """A volunteer's offer of the host as a relay put its addresses in the place of the host's own, and a name stands
    for as many others' numbers as its owner likes."""

    async def scenario() -> None:
        network, transport = MemoryNetwork(random.Random(0)), Hidden()
        await told(network, identity_of(3), HOST.peer_id, [GOOD.replace(RELAY.peer_id, HOST.peer_id)])
        await told(network, identity_of(4), RELAY.peer_id, [f"/dns4/victims.example/tcp/25/p2p/{RELAY.peer_id}"])
        with pytest.raises(TransientError):
            await reachability(transport, network)._take_place()
        assert transport.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "looked_up", "told_at"),
    [
        ("dns4", [], ["/ip4/203.0.113.9"]),
        ("dns", ["2001:db8::1", "203.0.113.7"], ["/ip4/203.0.113.9", "/ip6/2001:db8::1"]),
        ("dns4", ["2001:db8::1", "203.0.113.7"], ["/ip4/203.0.113.9"]),
    ],
)
def test_a_hosts_relay_that_has_a_name_is_told_by_the_numbers_that_it_is_reached_at(
    kind: str, looked_up: list[str], told_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of each version of IP: who has reached it by IPv6 is found by those too who have IPv4 alone."""

    async def resolved(name: str) -> list[str]:
        return looked_up

    monkeypatch.setattr("peer.directory.reachability.resolved", resolved)

    class Offered(Hidden):
        async def call(self, *args: Any, **more: Any) -> Message:
            named = tuple(f"/{kind}/{name}.example/tcp/4002/p2p/{RELAY.peer_id}" for name in "ab")
            return Message(RelayOffer(peer_id=RELAY.peer_id, addresses=named).to_value())

    async def scenario() -> None:
        network, transport = MemoryNetwork(random.Random(0)), Offered()
        await reachability(transport, network)._take_place()
        circuit = f"/p2p/{RELAY.peer_id}/p2p-circuit/p2p/{ME.peer_id}"
        assert transport.relayed == tuple(f"{number}/tcp/4002{circuit}" for number in told_at)

    asyncio.run(scenario())
