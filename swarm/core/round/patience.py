"""How long a member of a round waits: for votes if it leads, else for its leader; and for whose parts.

Deadlines of messages are multiples of `phase_s`: a leader waits 2 before it asks once more, 3 before it goes on without
a member, or 1 once only late ones are missing (`RoundFacts.late`), 2 before it relieves a reducer of which nothing is
heard; others wait 4 before they turn to the next leader, and longer each time, so that views do not run away from a
stage that is cut in two. While bytes move nobody turns away.
While parts are awaited under a roster, nobody turns from its leader before reducers could have said who is silent: only
they see what comes to them, and a view that ends sooner begins their waits anew.

A member's parts are waited for while they come, until most others' are all here; from then on as long again as the run
allows of the step's time. Who let rounds wait for nothing lately, or is known to be much slower, is not waited for at
all.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.core.ids import PeerId
from swarm.core.transfers import WINDOW_S, straggler_s

UNBROUGHT_PHASES = 4
"""So long reducers have had at least when an honest leader leaves a part empty: it gave it to one after another."""
LONGEST_PATIENCE = 8
"""A leader that follows so many that were given up is waited for so many times as long as the first."""


@dataclass
class Patience:
    phase_s: float
    due: float | None = None
    """When this peer acts as leader, or gives up on its leader; None while nothing is waited for."""
    num_turns: int = 0
    """Leaders given up since anything was heard."""
    roster_until: float = -math.inf
    """Until when a leader is waited for whose roster is followed while parts under it are awaited, whatever is heard of
    it: counted from the first roster of its view, so that a later one buys no time."""
    result_until: float = -math.inf
    """Until when a leader is waited for whose result was voted for, or is to be, whatever is heard of the round."""
    empty_from: float | None = None
    """From when on a result of the view may leave parts empty; None before anything is heard of its roster."""

    def heard(self) -> None:
        """Of a leader that does its work."""
        self.num_turns = 0

    def given_up(self) -> None:
        self.num_turns += 1

    def turned(self) -> None:
        """A later view begins."""
        self.due, self.result_until, self.empty_from = None, -math.inf, None

    @property
    def num_phases(self) -> int:
        """For so many a voter waits for its leader."""
        return 4 * min(1 + self.num_turns // 2, LONGEST_PATIENCE)

    def wait(self, phases: float, *, now: float) -> None:
        self.due = now + phases * self.phase_s

    def follow(self, silence_s: float, *, now: float) -> None:
        """The first roster of a view is here: `silence_s` after it has come to them too, reducers say who is silent."""
        self.roster_until = now + silence_s + 2 * self.phase_s
        self._roster_is_here(now)

    def may_be_empty(self, *, now: float) -> bool:
        """Whether reducers had the time that whoever leads must give them before it leaves a part empty."""
        return now >= self._roster_is_here(now)

    def _roster_is_here(self, now: float) -> float:
        if self.empty_from is None:
            self.empty_from = now + UNBROUGHT_PHASES * self.phase_s
        return self.empty_from

    def vote_on_result(self, allowed_s: float, *, now: float) -> None:
        """The leader waits `allowed_s` for whoever still fetches: who turned away meanwhile would begin it all anew."""
        self.result_until = now + 2 * self.phase_s + allowed_s

    def wait_for_leader(self, *, leads: bool, calm: int, parts_are_awaited: bool, now: float) -> None:
        """`leads`: this peer is the leader, and waits for the others; else it waits `calm` times as long as a voter."""
        if leads:
            self.wait(2, now=now)
            return
        until = max(self.result_until, self.roster_until if parts_are_awaited else -math.inf)
        self.due = max(now + calm * self.num_phases * self.phase_s, until)


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What one member knows of how long to wait in a round, beside `phase_s`. Times are seconds of its clock."""

    opened_at: float = 0.0
    """When the step opened here: the step's time counts from then."""
    straggler_share: float = 0.0
    """Of the step's time so far: how long a round waits for the last members (`averaging.straggler_share`)."""
    longest_s: float = math.inf
    """After which parts are not waited for however they come: their bytes at the least rate, four times over."""
    silence_s: float = 0.0
    """Of a member that lives: how long nothing need come of it, between two messages on the slowest line; where a phase
    was measured on faster ones, it says nothing of that."""
    not_waited_for: frozenset[PeerId] = frozenset()
    """Who was waited for in vain lately, or whose parts came much slower than others'."""


@dataclass
class Arrivals:
    """Of the parts that one member awaits under a roster."""

    waits: Waits
    phase_s: float
    _began: float = 0.0
    _heard: dict[PeerId, float] = field(default_factory=dict)
    _most_at: float | None = None

    def begin(self, *, now: float) -> None:
        """A roster is followed."""
        self._began, self._most_at = now, None

    def moved(self, peer: PeerId, *, now: float) -> None:
        """Bytes of its parts have come, or bytes have gone to it."""
        self._heard[peer] = now

    def most_are_here(self, *, now: float) -> None:
        """All parts of more than half of the members are."""
        if self._most_at is None:
            self._most_at = now

    def allowed_s(self, *, now: float) -> float:
        """How long the last members may keep all others waiting from now on."""
        return max(self.phase_s, straggler_s(self.waits.straggler_share, now - self.waits.opened_at))

    @property
    def ends_at(self) -> float:
        """Whatever still comes."""
        return self._began + self.phase_s + self.waits.longest_s

    @property
    def _moment_s(self) -> float:
        """Without bytes for so long, a transfer does not move."""
        return min(WINDOW_S, 2 * self.phase_s)

    def is_moving(self, peer: PeerId, *, now: float) -> bool:
        """Whether bytes were, a moment ago."""
        return now < self._heard.get(peer, -math.inf) + self._moment_s

    @property
    def window_s(self) -> float:
        """So long nothing need come of a member that sends."""
        return max(self.waits.silence_s, self._moment_s)

    def is_silent(self, peer: PeerId, *, since: float, now: float) -> bool:
        """Whether nothing came of it in such a time, of which it had one at least `since` then."""
        return now >= max(since, self._heard.get(peer, -math.inf)) + self.window_s

    def until(self, peer: PeerId) -> float:
        """Until when the member's parts are waited for, unless more comes of them."""
        heard_at = max(self._began, self._heard.get(peer, -math.inf))
        alive_until = max(self._began + self.phase_s, heard_at + self.window_s)
        limits = [alive_until, self.ends_at]
        if self._most_at is not None:
            is_waited_for = peer not in self.waits.not_waited_for
            limits.append(self._most_at + (self.allowed_s(now=self._most_at) if is_waited_for else 0.0))
        return min(limits)

    def awaited(self, peers: Collection[PeerId], *, now: float) -> frozenset[PeerId]:
        """Those of them that are still waited for."""
        return frozenset(peer for peer in peers if now < self.until(peer))
