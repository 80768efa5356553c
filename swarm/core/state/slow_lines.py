"""Whose lines are slow, by what other members of a round have measured and signed (`Contribution.rates`)."""

from collections.abc import Iterable, Mapping

from swarm.core.ids import PeerId
from swarm.core.round.contribution import Contribution

SLOW_OCTAVES = 3
"""So far below most others: more than four times slower. Lines that share a receiver's differ by one or two."""


def slow_lines(contributions: Iterable[Contribution], weights: Mapping[PeerId, int]) -> frozenset[PeerId]:
    """Members whose parts come in much slower than those of members who weigh at least half of all.

    A member's octave counts as so high, or so low, as others say who together weigh more than half of all others. As
    nobody weighs more than a third (`swarm.core.seats`), liars who weigh less than a third neither slow anybody down
    nor hide a slow one, and a member of theirs that is as fast as can be makes nobody slow beside it. A contribution
    rates a few members only (`MAX_RATES`): among many nobody is found slow.
    """
    said: dict[PeerId, list[tuple[int, int]]] = {}
    for made in contributions:
        for rate in made.rates:
            said.setdefault(rate.peer_id, []).append((rate.octave, weights.get(made.peer_id, 0)))
    of_all = sum(weights.values())
    of_others = {peer: of_all - weights.get(peer, 0) for peer in said}
    highs = {peer: _reached(sorted(said[peer], reverse=True), of_others[peer]) for peer in said}
    rated = [(high, weights.get(peer, 0)) for peer, high in highs.items() if high is not None]
    usual = _reached(sorted(rated, reverse=True), of_all - 1)
    if usual is None:
        return frozenset()
    lows = {peer: _reached(sorted(said[peer]), of_others[peer]) for peer in said}
    return frozenset(peer for peer, low in lows.items() if low is not None and low <= usual - SLOW_OCTAVES)


def _reached(said: Iterable[tuple[int, int]], weight_of_all: int) -> int | None:
    """The octave, of some with weights, by which more than half of this weight has been met; None: so much is not."""
    met = 0
    for octave, weight in said:
        met += weight
        if 2 * met > weight_of_all:
            return octave
    return None
