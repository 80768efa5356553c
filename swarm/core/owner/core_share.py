"""How many threads a daemon computes with, of the cores that its machine has free.

Threads of one computation wait for the slowest of them: one more than there are free cores makes all wait for a core
that somebody else has. So a daemon takes no more than its share of what is free, and at least one.
"""

import math
from dataclasses import dataclass

MOST_USED = 0.4
"""A core of which the owner's programs use more than this counts as theirs."""
MORE_AFTER_S = 20.0
"""More threads are taken once they could have been for this long; fewer at once."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What a daemon knows of its machine's cores at a moment."""

    usable: int
    """That this daemon may run on."""
    others_use: float = 0.0
    """How many of them programs use to which this daemon gives way, as an average of some seconds."""
    claimed: int = 0
    """That daemons with a number of threads of their own keep to."""
    daemons: int = 1
    """That share the others, this one among them."""
    rank: int = 0
    """Of this daemon among them, from 0: what cannot be shared out evenly goes to the first."""


@dataclass(frozen=True)
class Threads:
    """How many, and why so many."""

    number: int
    reason: str


class CoreShare:
    """Decides from moment to moment, without flapping."""

    def __init__(self, most: int) -> None:
        assert most >= 1, f"{most} threads"
        self._most = most
        self._now: Threads | None = None
        self._more_since: float | None = None
        self._least_more = most
        """The fewest that could have been taken since then."""

    def decide(self, cores: Cores, *, now: float) -> Threads:
        """How many threads from `now` on. Times are seconds of a clock that only grows."""
        wanted = share_of(cores, self._most)
        if self._now is None or wanted.number <= self._now.number:
            self._more_since = None
            if self._now is None or wanted.number < self._now.number:
                self._now = wanted
            return self._now
        if self._more_since is None:
            self._more_since, self._least_more = now, wanted.number
        self._least_more = min(self._least_more, wanted.number)
        if now - self._more_since >= MORE_AFTER_S:
            self._more_since = None
            self._now = Threads(self._least_more, wanted.reason)
        return self._now


def share_of(cores: Cores, most: int) -> Threads:
    """A daemon's share of what is free at a moment: `most` at most, and one at least."""
    left = cores.usable - cores.claimed - cores.others_use
    free = max(0, math.floor(left + MOST_USED))
    share = free // cores.daemons + (cores.rank < free % cores.daemons)
    number = min(most, max(1, share))
    return Threads(
        number,
        f"{free} of {cores.usable} cores are free: others use {cores.others_use:.1f}, daemons claim {cores.claimed}, "
        f"{cores.daemons} share what is left",
    )
