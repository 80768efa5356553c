"""Who is found slow by what others measured, and what liars can make of it."""

import random
from dataclasses import replace

from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.contribution import Contribution, Rate
from swarm.core.state.slow_lines import slow_lines
from tests.swarm.core.audit.chances import NO_CHANCE

PEERS = tuple(PeerId(name) for name in "abcdefg")
A, B, C, D = PEERS[:4]
EVEN = dict.fromkeys((A, B, C, D), 8)


def contribution(peer: PeerId, **octaves: int) -> Contribution:
    rates = tuple(Rate(PeerId(name), octave) for name, octave in sorted(octaves.items()))
    return replace(Contribution("run", StageIndex(0), Step(0), bytes(32), peer, (), (), NO_CHANCE), rates=rates)


HONEST = [contribution(A, b=15, c=15, d=12), contribution(B, a=15, c=15, d=11), contribution(C, a=15, b=14, d=12)]


def test_a_line_of_a_tenth_is_slow_by_three_others_words_though_its_own_are_that_all_are() -> None:
    assert slow_lines([*HONEST, contribution(D, a=12, b=12, c=11)], EVEN) == {D}
    assert slow_lines(HONEST, EVEN) == {D}, "it brought no work"
    assert slow_lines(reversed(HONEST), EVEN) == {D}
    near = [replace(made, rates=(*made.rates[:-1], Rate(D, 13))) for made in HONEST]
    assert slow_lines(near, EVEN) == frozenset()


def test_words_of_half_of_all_others_are_not_enough() -> None:
    assert slow_lines([], EVEN) == frozenset()
    assert slow_lines(HONEST[:1], EVEN) == frozenset()
    assert slow_lines(HONEST, {**EVEN, A: 0, B: 0}) == frozenset(), "the two who say so have done nothing"
    assert slow_lines(HONEST, dict.fromkeys(PEERS, 8)) == frozenset(), "three of six"


def test_one_line_far_faster_than_all_others_makes_none_of_them_slow() -> None:
    peers = PEERS[:5]
    made = [
        contribution(peer, **{other: 30 if other == A else 15 for other in peers if other != peer}) for peer in peers
    ]
    assert slow_lines(made, dict.fromkeys(peers, 8)) == frozenset()
    assert slow_lines(made[1:], {**dict.fromkeys(peers, 8), A: 16}) == frozenset()


def test_liars_below_a_third_slow_nobody_down_and_hide_no_slow_one_of_others() -> None:
    rng = random.Random(7)
    weights = dict.fromkeys(PEERS, 8)
    liars = PEERS[5:]
    honest = PEERS[:5]
    for _ in range(200):
        slow = set(rng.sample(honest, rng.randint(0, 1)))
        made = [
            contribution(
                peer, **{other: (10 if other in slow else 15) + rng.randint(0, 1) for other in PEERS if other != peer}
            )
            for peer in honest
        ]
        lies = [
            contribution(peer, **{other: rng.choice((0, 12, 63)) for other in PEERS if other != peer}) for peer in liars
        ]
        assert slow_lines([*made, *lies], weights) == slow
