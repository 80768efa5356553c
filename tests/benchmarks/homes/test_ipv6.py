"""Homes with IPv6: reached by it past routers of IPv4 that let nobody in, and punched where it has a firewall."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.homes.emulated import IPv6, Paths, Router, routing
from benchmarks.homes.namespaces import INSIDE, PUBLIC_SUBNET, Namespaces, why_not
from benchmarks.homes.punching import Peer, peer
from benchmarks.homes.translation import Kind
from tests.swarm.network.p2pd.test_ipv6 import has_loopback

pytestmark = [pytest.mark.processes, pytest.mark.soak]

HOST, OLD_HOST = "host", "old-host"
HOMES: dict[str, tuple[Kind, IPv6 | None]] = {
    "open-a": (Kind.RANDOM, IPv6.OPEN),
    "open-b": (Kind.RANDOM, IPv6.OPEN),
    "kept-a": (Kind.RANDOM, IPv6.FIREWALLED),
    "kept-b": (Kind.RANDOM, IPv6.FIREWALLED),
    "four-a": (Kind.PORT_RESTRICTED, None),
    "four-b": (Kind.PORT_RESTRICTED, IPv6.FIREWALLED),
}
"""Nobody punches through two routers of `Kind.RANDOM` by IPv4."""
BULK_BYTES = 3_000_000
SMALL_TALK_BYTES = BULK_BYTES // 4
"""What the relay carries before a way is found."""


@dataclass
class Street:
    network: Namespaces
    router: Router
    peers: dict[str, Peer]
    stack: ExitStack

    def start(self, name: str, host: Peer, kind: Kind, ipv6: IPv6 | None) -> Peer:
        """A home's peer, once the host has dialled it back; its addresses as it tells others."""
        six = [] if ipv6 is None else [self.network.outside6(name)]
        made = self.stack.enter_context(peer(self.network, name, INSIDE, *six))
        own = [address for address in made.addresses if "/ip6/" in address]
        at: dict[str, Any] = {"host": host.peer_id, "host_addresses": host.addresses}
        at |= {key: host.said[key] for key in ("relay", "relay_addresses")}
        told = made.do("join", **at)
        made.said |= told
        made.addresses = [*own, *told["addresses"]]
        return made

    def relayed_bytes(self, host: str = HOST) -> int:
        return int(self.peers[host].do("carried")["bytes"])


@pytest.fixture(scope="module")
def street() -> Iterator[Street]:
    reason = why_not()
    if reason is not None or not has_loopback():
        pytest.skip(reason or "this machine has no IPv6")
    names = [HOST, OLD_HOST, *HOMES]
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces(names, bridged=False, subnet=PUBLIC_SUBNET, routed=tuple(HOMES)))
        ipv6 = {name: how for name, (_, how) in HOMES.items() if how is not None} | {HOST: IPv6.OPEN}
        behind = {name: [kind] for name, (kind, _) in HOMES.items()}
        router = stack.enter_context(routing(network, names, behind, ipv6))
        made = Street(network, router, {}, stack)
        at = {HOST: [network.outside(HOST), network.outside6(HOST)], OLD_HOST: [network.outside(OLD_HOST)]}
        for name, addresses in at.items():
            made.peers[name] = stack.enter_context(peer(network, name, *addresses, "--relay"))
        router.limit(Paths(20.0, 0.0), up_mbit=100.0, down_mbit=100.0)
        with ThreadPoolExecutor(len(HOMES)) as threads:
            started = threads.map(lambda name: made.start(name, made.peers[HOST], *HOMES[name]), HOMES)
            made.peers |= dict(zip(HOMES, started, strict=True))
        yield made


def reach(street: Street, one: str, other: str) -> tuple[str, int]:
    """By which way one home reaches another and sends it bulk, and how much of that the relay carried."""
    caller, callee = street.peers[one], street.peers[other]
    before = street.relayed_bytes()
    caller.do("connect", peer_id=callee.peer_id, addresses=callee.addresses)
    caller.do("send", peer_id=callee.peer_id, num_bytes=BULK_BYTES)
    way, relayed = caller.do("look", peer_id=callee.peer_id)["way"], street.relayed_bytes() - before
    print(f"{one} to {other}: {way}, {relayed} bytes relayed")
    return way, relayed


def test_the_host_dials_back_whom_ipv6_leads_to(street: Street) -> None:
    dialled = {name: street.peers[name].said["dialled_back"] for name in HOMES}
    assert dialled == {
        "open-a": True,
        "open-b": True,
        "kept-a": False,
        "kept-b": False,
        "four-a": False,
        "four-b": False,
    }


def test_two_with_ipv6_reach_each_other_past_routers_that_nobody_punches(street: Street) -> None:
    for one, other in (("open-a", "open-b"), ("open-b", "open-a"), ("kept-a", "open-a"), ("open-a", "kept-a")):
        way, relayed = reach(street, one, other)
        assert (way in ("direct", "punched"), relayed < SMALL_TALK_BYTES) == (True, True), (one, other, way, relayed)
    assert reach(street, "open-a", "open-b")[0] == "direct"


def test_firewalls_of_ipv6_are_punched_where_routers_of_ipv4_cannot_be(street: Street) -> None:
    way, relayed = reach(street, "kept-a", "kept-b")
    assert way == "punched"
    assert relayed < SMALL_TALK_BYTES


def test_with_one_that_has_no_ipv6_they_punch_by_ipv4(street: Street) -> None:
    way, relayed = reach(street, "four-b", "four-a")
    assert way == "punched"
    assert relayed < SMALL_TALK_BYTES


def test_what_neither_version_lets_through_goes_by_the_relay(street: Street) -> None:
    way, relayed = reach(street, "kept-b", "four-a")
    assert way == "relayed"
    assert relayed > 0.9 * BULK_BYTES


def test_two_with_ipv6_reach_each_other_though_their_host_has_none(street: Street) -> None:
    old = street.peers[OLD_HOST]
    with ExitStack() as street.stack:
        one, other = (street.start(name, old, *HOMES[name]) for name in ("open-a", "open-b"))
        assert not one.said["dialled_back"]
        one.do("connect", peer_id=other.peer_id, addresses=other.addresses)
        one.do("send", peer_id=other.peer_id, num_bytes=BULK_BYTES)
        assert one.do("look", peer_id=other.peer_id)["way"] == "direct"
        relayed = street.relayed_bytes(OLD_HOST)
        print(f"{relayed} bytes relayed")
        assert relayed < SMALL_TALK_BYTES
