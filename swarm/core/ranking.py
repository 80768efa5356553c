"""Choices among peers, drawn from certified facts, so that everyone draws the same."""

from collections.abc import Iterable

from swarm.core.canonical import Value, digest
from swarm.core.ids import PeerId


def rank(peers: Iterable[PeerId], purpose: str, *facts: Value) -> tuple[PeerId, ...]:
    """Peers ordered by H(purpose, facts, peer id): unknowable before the facts, the same for everyone."""
    return tuple(sorted(set(peers), key=lambda peer: digest(f"rank/{purpose}", [*facts, peer])))
