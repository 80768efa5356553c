"""Who reduces how much: rates as receivers measure them, and the turns that follow from them."""

from collections import Counter
from dataclasses import replace

from peer.receive_rates import ReceiveRates
from swarm.core.contribution import Contribution, Rate
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round_proposal import reducer_turns

A, B, C, D = (PeerId(name) for name in "abcd")
MIB = 1 << 20


def contribution(peer: PeerId, **octaves: int) -> Contribution:
    rates = tuple(Rate(PeerId(name), octave) for name, octave in sorted(octaves.items()))
    return replace(Contribution("run", StageIndex(0), Step(0), bytes(32), peer, (), ()), rates=rates)


def test_a_rate_is_of_the_bytes_after_the_first_part_and_averaged_over_rounds() -> None:
    rates = ReceiveRates()
    for count in range(5):
        rates.arrived(A, MIB, now=float(count))
    rates.arrived(B, MIB, now=0.0)  # one part only measures nothing
    rates.end_round()
    assert rates.of((A, B, C), me=C) == (Rate(A, 20),)
    for count in range(5):
        rates.arrived(A, 16 * MIB, now=10.0 + count)
    rates.end_round()
    assert rates.of((A, B, C), me=C) == (Rate(A, 22),)  # 0.3 * 16 + 0.7 * 1 MiB/s
    assert rates.of((A, B), me=A) == ()


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
