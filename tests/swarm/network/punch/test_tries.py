"""Ports near by meet through routers that count up; and nobody causes more tries than the limits."""

import random

import pytest

from benchmarks.homes.translation import Kind, Translation
from swarm.core.ids import PeerId
from swarm.network.punch.seen import Endpoint
from swarm.network.punch.tries import Limits, moves, to_dial

SYN = 0x02
ONLOOKER = (bytes([5, 0, 0, 1]), 80)
ONE, OTHER = bytes([5, 0, 0, 2]), bytes([5, 0, 0, 3])
INNER = (bytes([192, 168, 0, 2]), 5000)


def meet(kinds: tuple[Kind, Kind], *, near: bool) -> bool:
    """Whether one side's packet comes in where the other's router sent one from."""
    routers = [Translation(kind, at, rng=random.Random(7)) for kind, at in zip(kinds, (ONE, OTHER), strict=True)]
    seen = [router.out(INNER, ONLOOKER, SYN, 0.0) for router in routers]
    sent = []
    for router, to, port in zip(routers, (OTHER, ONE), reversed(seen), strict=True):
        dialled = to_dial([Endpoint("5.0.0.9", port)], near=near)
        sent.append([(router.out(INNER, (to, endpoint.port), SYN, 1.0), endpoint.port) for endpoint in dialled])
    return any(
        routers[1].into(to, (ONE, source), SYN, 2.0) is not None
        and routers[0].into(source, (OTHER, to), SYN, 2.0) is not None
        for source, to in sent[0]
    )


CONES = (Kind.FULL_CONE, Kind.RESTRICTED, Kind.PORT_RESTRICTED)


@pytest.mark.parametrize("one", CONES)
@pytest.mark.parametrize("other", CONES)
def test_mappings_that_stand_meet_where_they_were_seen_and_near_by(one: Kind, other: Kind) -> None:
    assert meet((one, other), near=False)
    assert meet((one, other), near=True)


@pytest.mark.parametrize("other", [*CONES, Kind.SYMMETRIC])
def test_mappings_that_count_up_meet_near_by(other: Kind) -> None:
    assert meet((Kind.SYMMETRIC, other), near=True)
    assert meet((other, Kind.SYMMETRIC), near=True)
    if other in (Kind.PORT_RESTRICTED, Kind.SYMMETRIC):
        assert not meet((Kind.SYMMETRIC, other), near=False)


def test_mappings_are_known_to_move_when_two_onlookers_saw_two_ports() -> None:
    assert not moves([4000])
    assert not moves([4000, 4000])
    assert moves([4001, 4000])


def test_ports_past_the_last_one_are_not_dialled() -> None:
    assert all(endpoint.port <= 65535 for endpoint in to_dial([Endpoint("5.0.0.9", 65534)], near=True))


def test_tries_of_one_peer_and_of_all_are_limited_within_a_minute() -> None:
    limits = Limits()
    one = [limits.take(PeerId("one"), is_stranger=False, now=float(second)) for second in range(22)]
    assert one == [True] * 20 + [False] * 2
    assert limits.take(PeerId("one"), is_stranger=False, now=61.5)
    taken = [limits.take(PeerId(f"peer {number}"), is_stranger=False, now=62.0) for number in range(2000)]
    assert sum(taken) < 240


def test_a_crowd_of_keys_leaves_members_three_fourths_of_all_tries() -> None:
    limits = Limits()
    assert sum(limits.take(PeerId(f"key {number}"), is_stranger=True, now=0.0) for number in range(2000)) == 60
    assert sum(limits.take(PeerId(f"member {number}"), is_stranger=False, now=1.0) for number in range(200)) == 180
