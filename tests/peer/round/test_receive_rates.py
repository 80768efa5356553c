"""Who reduces how much: rates as receivers measure them, and the turns that follow from them."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from peer.round.receive_rates import ReceiveRates
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.contribution import Contribution, Rate, Roster
from swarm.core.round.proposal import reducer_turns
from tests.swarm.core.audit.chances import NO_CHANCE

A, B, C, D = (PeerId(name) for name in "abcd")
MIB, LANES = 1 << 20, 4


def contribution(peer: PeerId, **octaves: int) -> Contribution:
    rates = tuple(Rate(PeerId(name), octave) for name, octave in sorted(octaves.items()))
    return replace(Contribution("run", StageIndex(0), Step(0), bytes(32), peer, (), (), NO_CHANCE), rates=rates)


def roster(step: int) -> Roster:
    return Roster("run", StageIndex(0), Step(step), 0, 0, A, bytes(32), (A, B, C), (), (), (), (), "")


def test_a_rate_is_of_all_bytes_since_the_roster_and_averaged_over_rounds() -> None:
    rates = ReceiveRates()
    first = roster(0)
    rates.begin(first, now=0.0)
    for count in range(1, 5):
        rates.arrived(A, MIB, now=float(count))
        rates.begin(first, now=float(count))  # it is known already
    rates.arrived(B, MIB // 2, now=1.0)  # so little measures nothing
    rates.arrived(D, MIB // 8, now=4.0)  # unless it takes long
    rates.end_round()
    assert rates.of((A, B, C, D), me=C) == (Rate(A, 20), Rate(D, 15))
    rates.begin(roster(1), now=10.0)
    for count in range(1, 5):
        rates.arrived(A, MIB // 16, now=10.0 + count)
    rates.end_round()
    assert rates.of((A, B, C), me=C) == (Rate(A, 17),)  # 0.3 * 16 + 0.7 * 1 seconds a MiB
    assert rates.of((A, B), me=A) == ()


def test_a_rate_begins_anew_with_another_roster() -> None:
    rates = ReceiveRates()
    rates.begin(roster(0), now=0.0)
    rates.arrived(A, MIB, now=1.0)
    rates.begin(roster(0), now=8.0)  # the first one's reducer was lost
    rates.arrived(A, 4 * MIB, now=9.0)
    assert rates.of((A, B), me=B) == (Rate(A, 20),)  # what the first one has shown
    rates.end_round()
    rates.arrived(A, MIB, now=20.0)  # of the next round, whose roster is not known
    rates.begin(roster(1), now=20.0)
    for count in range(1, 9):
        rates.arrived(A, 4 * MIB, now=20.0 + count)
        rates.begin(roster(1 + count), now=20.0 + count)
    assert rates.of((A, B), me=B) == (Rate(A, 21),)


def test_who_is_much_slower_than_half_of_the_others_is_known_here_alone() -> None:
    rates = ReceiveRates()
    assert rates.slow() == frozenset()
    rates.begin(roster(0), now=0.0)
    for peer, num_bytes in ((A, 64 * MIB), (B, 8 * MIB), (C, 2 * MIB), (D, MIB // 2)):
        rates.arrived(peer, num_bytes, now=8.0)
    rates.end_round()
    assert rates.slow() == {D}


@dataclass
class _Flight:
    to: PeerId
    left: int = MIB


def arrivals(parts: dict[PeerId, int], bytes_per_s: float) -> list[tuple[float, PeerId]]:
    """When each receiver gets each of its parts of 1 MiB from one sender: several to each are under way at a time, and
    all of them share its line."""
    waiting, under_way, came, now = dict(parts), list[_Flight](), list[tuple[float, PeerId]](), 0.0
    while any(waiting.values()) or under_way:
        for peer, left in waiting.items():
            begun = min(left, LANES - sum(flight.to == peer for flight in under_way))
            waiting[peer] = left - begun
            under_way += [_Flight(peer) for _ in range(begun)]
        least = min(flight.left for flight in under_way)
        now += least * len(under_way) / bytes_per_s
        for flight in under_way:
            flight.left -= least
        came += [(now, flight.to) for flight in under_way if not flight.left]
        under_way = [flight for flight in under_way if flight.left]
    return came


@pytest.mark.parametrize("slow", [False, True])
def test_shares_follow_lines_wherever_they_begin(slow: bool) -> None:
    """Whoever reduces nearly all has little to send, which is soon there; that must not make it the fastest."""
    uplinks = {A: 100e6, B: 100e6, C: 10e6 if slow else 100e6}
    known = {peer: ReceiveRates() for peer in uplinks}
    turns = [A] * 19 + [B] * 3 + [C] * 2
    for step in range(12):
        shares, sent = Counter(turns), roster(step)
        for rates in known.values():
            rates.begin(sent, now=0.0)
        for peer, uplink in uplinks.items():
            to_send = {other: shares[other] for other in uplinks if other != peer}
            for at, (now, receiver) in enumerate(arrivals(to_send, uplink)):
                known[receiver].arrived(peer, MIB, now=now + 0.005 + 0.0001 * at)
        for rates in known.values():
            rates.end_round()
        made = [replace(contribution(peer), rates=rates.of(tuple(uplinks), me=peer)) for peer, rates in known.items()]
        order = reducer_turns([A, B, C], made)
        turns = [order[part % len(order)] for part in range(24)]
    assert Counter(order) == ({A: 8, B: 8, C: 2} if slow else {A: 8, B: 8, C: 8})


def test_turns_are_equal_when_nobody_is_more_than_an_octave_slower() -> None:
    made = [contribution(A, b=23, c=24), contribution(B, a=24, c=24), contribution(C, a=24, b=23)]
    assert Counter(reducer_turns([A, B, C], made)) == {A: 8, B: 8, C: 8}
    assert Counter(reducer_turns([A, B, C], [])) == {A: 8, B: 8, C: 8}


def test_a_slow_peer_has_fewer_turns_spread_over_all() -> None:
    made = [contribution(A, b=24, c=21), contribution(B, a=24, c=21), contribution(C, a=24, b=24)]
    turns = reducer_turns([A, B, C], made)
    assert Counter(turns) == {A: 8, B: 8, C: 2}
    assert {A, B} <= set(turns[:3])
    assert turns.index(C) < 9 <= len(turns) - 1 - turns[::-1].index(C)
    assert Counter(reducer_turns([A, B, C], [contribution(A, b=40, c=3)]))[C] == 1


def test_one_liar_of_four_moves_nobody() -> None:
    honest = [contribution(A, b=24, c=24, d=24), contribution(B, a=24, c=24, d=24), contribution(C, a=24, b=24, d=24)]
    liar = contribution(D, a=2, b=2, c=60)
    assert Counter(reducer_turns([A, B, C, D], [*honest, liar])) == {A: 8, B: 8, C: 8, D: 8}
