"""Choices among peers, made from certified facts, so that everyone makes the same."""

from collections.abc import Iterable

from swarm.core.canonical import Value, digest
from swarm.core.ids import PeerId


def rank(peers: Iterable[PeerId], purpose: str, *facts: Value) -> tuple[PeerId, ...]:
    """Peers ordered by H(purpose, facts, peer id): unknowable before the facts, the same for everyone."""
    return tuple(sorted(set(peers), key=lambda peer: digest(f"rank/{purpose}", [*facts, peer])))


def rotated(peers: Iterable[PeerId], turn: int) -> tuple[PeerId, ...]:
    """Peers in the order of ids, from another one on each turn: for work that each may have, when its turn comes.

    Nothing is drawn, so nobody can write anything that makes its turn come sooner.
    """
    ordered = sorted(set(peers))
    first = turn % max(1, len(ordered))
    return tuple(ordered[first:] + ordered[:first])
