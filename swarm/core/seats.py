"""What a member's certified work is worth: the weight of its vote, and its share of what is drawn.

A peer that does nothing weighs nothing, however many identities it has; who wants a third of a stage's votes does a
third of its work. One member that does more than a third is cut to a third, so that no stage hangs on one machine. The
cut goes by what all have done, not by the median of heads: that is for sale, for a microbatch an identity.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from swarm.core.canonical import Value, digest
from swarm.core.ids import PeerId
from swarm.core.ranking import rank

GOLDEN_SECTION = 0x9E3779B97F4A7C15
"""Of 2^64: multiples of it lie evenly in a circle, however many."""
LARGEST_SHARE = 3
"""Nobody weighs more than one part in so many of all members' weight, where so many have done anything."""


def seats(work: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Weight of each member by the tokens it has done: of those who weigh anything, in the order of ids.

    Where nobody has done anything all weigh the same: somebody must go on.
    """
    done = {peer: tokens for peer, tokens in sorted(work.items()) if tokens > 0}
    if not done:
        return dict.fromkeys(sorted(work), 1)
    limit = _limit(sorted(done.values(), reverse=True))
    return {peer: min(tokens, limit) for peer, tokens in done.items()}


def _limit(tokens: list[int]) -> int:
    """The most that a member may weigh, of what was done, the most first: the largest c for which
    parts * c <= sum of min(tokens, c)."""
    parts, rest, num_cut = min(LARGEST_SHARE, len(tokens)), sum(tokens), 0
    while tokens[num_cut] * (parts - num_cut) > rest:
        rest -= tokens[num_cut]
        num_cut += 1
    return rest // (parts - num_cut) if num_cut else tokens[0]


def hangs_on_few(work: Mapping[PeerId, int], few: int) -> bool:
    """Whether fewer than so many have done anything, or one of them more than a third of all."""
    done = [tokens for tokens in work.values() if tokens > 0]
    return len(done) < few or LARGEST_SHARE * max(done) > sum(done)


def drawn(weights: Mapping[PeerId, int], purpose: str, *facts: Value) -> tuple[PeerId, ...]:
    """All peers in an order drawn from the facts, each place in proportion to the weights of those who are left; who
    weighs nothing comes last."""
    left = {peer: weight for peer, weight in sorted(weights.items()) if weight > 0}
    total = sum(left.values())
    order: list[PeerId] = []
    while left:
        at = int.from_bytes(digest(f"drawn/{purpose}", [*facts, len(order)]), "big") % total
        chosen = next(peer for peer, end in zip(left, accumulate(left.values()), strict=True) if at < end)
        order.append(chosen)
        total -= left.pop(chosen)
    return (*order, *rank(set(weights) - set(order), purpose, *facts))


def in_turn(weights: Mapping[PeerId, int], turn: int) -> tuple[PeerId, ...]:
    """Peers in the order of ids, from another one on each turn, from each in proportion to its weight.

    The peers lie in a row, each as wide as it weighs, and each turn begins a golden section further. Nothing is drawn,
    so nobody can write anything that makes its turn come sooner.
    """
    ordered = sorted(weights)
    at = (turn * GOLDEN_SECTION % (1 << 64)) * sum(weights.values()) >> 64
    first = next(place for place, end in enumerate(accumulate(weights[peer] for peer in ordered)) if at < end)
    return tuple(ordered[first:] + ordered[:first])


def spread(weights: Mapping[PeerId, int], num_seats: int, purpose: str, *facts: Value) -> dict[PeerId, int]:
    """So many seats among many: each has its share of them, rounded up or down as the facts draw it.

    The peers stand in a row in a drawn order, each as wide as it weighs, and seats lie in it at equal distances.
    """
    total = sum(weights.values())
    end = int.from_bytes(digest(f"spread/{purpose}", list(facts)), "big") % total
    found = {}
    for peer in rank(weights, purpose, *facts):
        begin, end = end, end + weights[peer] * num_seats
        if end // total > begin // total:
            found[peer] = end // total - begin // total
    return dict(sorted(found.items()))


def weight_of(weights: Mapping[PeerId, int], peers: Iterable[PeerId]) -> int:
    """Of these together, each once."""
    return sum(weights.get(peer, 0) for peer in set(peers))
