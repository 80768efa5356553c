"""This is where a member keeps count of a round's parts: which came, which it aggregates, which are reduced."""

from collections.abc import Container
from dataclasses import dataclass, field

from swarm.core.contribution import MAX_EXCLUSION_REASON, Departure, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round_facts import is_of

MAX_OFFERS = 4
"""Encodings of one part that one reducer may send in a round: one, and one more for each roster of other facts."""


@dataclass
class RoundParts:
    """What is known of each part. The bytes themselves are the driver's."""

    received: dict[int, set[PeerId]] = field(default_factory=dict)
    """Whose contributions to the part are here."""
    refused: dict[int, dict[PeerId, str]] = field(default_factory=dict)
    """Whose contributions to the part came but are nonsense, and why."""
    aggregating: set[int] = field(default_factory=set)
    aggregated: dict[int, ReducedPart] = field(default_factory=dict)
    """By this peer, whether it still is the part's reducer or not."""
    reduced: dict[int, ReducedPart] = field(default_factory=dict)
    """By the reducer that the roster named; the first counts."""
    held: set[tuple[int, bytes]] = field(default_factory=set)
    """(part, digest) of every reduced part whose bytes are here."""
    _offers: dict[tuple[int, PeerId], list[ReducedPart]] = field(default_factory=dict)

    def begin(self, part: int, roster: Roster, gone: Container[PeerId], *, late: bool) -> tuple[PeerId, ...]:
        """The contributors to aggregate the part over now; none if it is not time.

        It is time when every contributor's part is here, or those missing are gone, or `late`.
        """
        if part in self.aggregating or part in self.aggregated or part in self.reduced:
            return ()
        wanted = [made.peer_id for made in roster.contributions]
        here = tuple(peer for peer in wanted if peer in self.received.get(part, ()))
        bad = self.refused.get(part, {})
        if not here or (any(peer not in here and peer not in gone and peer not in bad for peer in wanted) and not late):
            return ()
        self.aggregating.add(part)
        return here

    def excluded(self, part: int, contributors: Container[PeerId], roster: Roster) -> tuple[Departure, ...]:
        """Who of the roster is not among the part's contributors, and why."""
        bad = self.refused.get(part, {})
        missing = [made.peer_id for made in roster.contributions if made.peer_id not in contributors]
        return tuple(Departure(peer, bad.get(peer, "its part did not come")[:MAX_EXCLUSION_REASON]) for peer in missing)

    def done(self, reduced: ReducedPart, roster: Roster | None) -> bool:
        """This peer has aggregated a part: whether it is of use under this roster."""
        self.held.add((reduced.part, reduced.digest))
        self.aggregating.discard(reduced.part)
        if roster is None or not is_of(reduced, roster):  # begun under a roster of other facts
            return False
        self.aggregated.setdefault(reduced.part, reduced)
        return True

    def offer(self, sender: PeerId, reduced: ReducedPart) -> None:
        """A reduced part came with its bytes. Raises RemoteError if its sender made too many of it."""
        offers = self._offers.setdefault((reduced.part, sender), [])
        if reduced not in offers:
            if len(offers) >= MAX_OFFERS:
                raise RemoteError("protocol", f"reduced part {reduced.part} was sent in too many versions", sender)
            offers.append(reduced)
        self.held.add((reduced.part, reduced.digest))

    def accept_offers(self, roster: Roster) -> None:
        """Take from the roster's reducers what came before the roster did."""
        for part, reducer in enumerate(roster.reducers):
            fitting = [reduced for reduced in self._offers.get((part, reducer), ()) if is_of(reduced, roster)]
            if fitting:
                self.reduced.setdefault(part, fitting[-1])

    def keep_what_fits(self, earlier: Roster, roster: Roster) -> None:
        """The facts have changed: of what was gathered, what was made of the same contributions stays."""
        before = {made.peer_id: made for made in earlier.contributions}
        same = {made.peer_id for made in roster.contributions if before.get(made.peer_id) == made}
        for peers in self.received.values():
            peers &= same
        for gathered in (self.aggregated, self.reduced):
            for part in [part for part, reduced in gathered.items() if not set(reduced.contributors) <= same]:
                del gathered[part]
        self.aggregating.clear()

    def forget_empty(self) -> None:
        """Parts that were given up in one view may be brought in the next."""
        for part in [part for part, reduced in self.reduced.items() if reduced.is_empty]:
            del self.reduced[part]

    def unreduced(self, roster: Roster) -> list[int]:
        """Parts that the roster's reducers have not brought."""
        return [part for part in range(len(roster.reducers)) if part not in self.reduced]

    def lacking(self, result: Result) -> list[ReducedPart]:
        """Parts of the result whose bytes are not here; an empty part has none."""
        return [
            reduced
            for reduced in result.parts
            if not reduced.is_empty and (reduced.part, reduced.digest) not in self.held
        ]
