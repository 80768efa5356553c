"""A member's count of a round's parts: which came, which it aggregates, which are reduced."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Exclusion, ReducedPart, Result, Roster
from swarm.core.round.facts import is_of

MAX_OFFERS = 4
"""Encodings of one part that one reducer may send in a round, beside one for each contribution that is left out: one,
and one more for each roster of other facts."""

Slot: TypeAlias = tuple[int, int | None]
"""A part, and the cohort whose share of it is meant; None: the whole."""


@dataclass
class RoundParts:
    """What is known of each part. The bytes themselves are the driver's."""

    received: dict[int, set[PeerId]] = field(default_factory=dict)
    """Whose contributions to the part are here."""
    malformed: dict[int, set[PeerId]] = field(default_factory=dict)
    """Whose contributions to the part came but are nonsense."""
    aggregating: set[Slot] = field(default_factory=set)
    aggregated: dict[Slot, ReducedPart] = field(default_factory=dict)
    """By this peer, whether it still is the part's reducer or not."""
    reduced: dict[int, ReducedPart] = field(default_factory=dict)
    """By the reducer that the roster named; the first counts."""
    shares: dict[Slot, tuple[PeerId, ReducedPart]] = field(default_factory=dict)
    """Of cohorts, at who combines them, and who made them."""
    announced: set[Slot] = field(default_factory=set)
    """Shares that their reducers say are made; whoever leads knows then whom it waits for."""
    held: set[tuple[int, bytes]] = field(default_factory=set)
    """(part, digest) of every reduced part or share whose bytes are here."""
    stated: set[ReducedPart] = field(default_factory=set)
    """Reduced parts as the peer that reduced them has signed for them, each with its bytes here."""
    _offers: dict[tuple[Slot, PeerId], list[ReducedPart]] = field(default_factory=dict)

    def begin(self, slot: Slot, roster: Roster) -> tuple[PeerId, ...] | None:
        """The contributors to aggregate over now; None if it is not time.

        It is time when every contributor's part is here, or what is here of it is nonsense. Nothing is made of
        nobody's, but for a cohort's share: the other cohorts go on without it.
        """
        wanted = _wanted(slot, roster)
        if self.is_begun(slot) or not wanted or self.missing(slot, roster):
            return None
        here = tuple(peer for peer in wanted if peer in self.received.get(slot[0], ()))
        if not here and slot[1] is None:
            return None
        self.aggregating.add(slot)
        return here

    def missing(self, slot: Slot, roster: Roster) -> list[PeerId]:
        """Whose contributions to it are not here."""
        here = self.received.get(slot[0], set()) | self.malformed.get(slot[0], set())
        return [peer for peer in _wanted(slot, roster) if peer not in here]

    def excluded(self, slot: Slot, contributors: Container[PeerId], roster: Roster) -> tuple[Exclusion, ...]:
        """Who of the roster is not among the contributors, and why."""
        return tuple(Exclusion(peer, "malformed") for peer in _wanted(slot, roster) if peer not in contributors)

    def done(self, reduced: ReducedPart, roster: Roster | None) -> bool:
        """This peer has aggregated a part or a share: whether it is of use under this roster."""
        self._hold(reduced)
        self.aggregating.discard(reduced.slot)
        if roster is None or not is_of(reduced, roster):  # begun under a roster of other facts
            return False
        self.aggregated.setdefault(reduced.slot, reduced)
        return True

    def offer(self, sender: PeerId, reduced: ReducedPart, *, num_left_out: int) -> None:
        """A reduced part or share came with its bytes. Raises RemoteError if its sender made too many of it."""
        offers = self._offers.setdefault((reduced.slot, sender), [])
        if reduced not in offers:
            if len(offers) >= MAX_OFFERS + num_left_out:
                raise RemoteError("protocol", f"reduced part {reduced.part} was sent in too many versions", sender)
            offers.append(reduced)
        self._hold(reduced)

    def offers(self) -> list[tuple[PeerId, ReducedPart]]:
        """All that came, the latest of each sender first."""
        return [(sender, made) for (_, sender), offers in self._offers.items() for made in reversed(offers)]

    def _hold(self, reduced: ReducedPart) -> None:
        if not reduced.is_empty:
            self.held.add((reduced.part, reduced.digest))
            self.stated.add(reduced)

    def keep_what_fits(self, earlier: Roster, roster: Roster) -> None:
        """The facts have changed: of what was gathered, what was made of the same contributions stays."""
        before = {made.peer_id: made for made in earlier.contributions}
        same = {made.peer_id for made in roster.contributions if before.get(made.peer_id) == made}
        for peers in self.received.values():
            peers &= same

        def stays(made: ReducedPart) -> bool:
            """Whose nonsense it says that it does without may be out as a whole: no result could name it then."""
            return set(made.contributors) <= same and is_of(made, roster)

        self.aggregated = {slot: made for slot, made in self.aggregated.items() if stays(made)}
        self.reduced = {part: made for part, made in self.reduced.items() if made.is_empty or stays(made)}
        fits = {slot for slot, (_, made) in self.shares.items() if is_of(made, roster)}
        self.shares = {slot: held for slot, held in self.shares.items() if slot in fits}
        self.announced.clear()
        self.aggregating.clear()

    def forget_empty(self) -> None:
        """Parts that were given up in one view may be brought in the next."""
        for part in [part for part, reduced in self.reduced.items() if reduced.is_empty]:
            del self.reduced[part]

    def unreduced(self, roster: Roster) -> list[int]:
        """Parts that the roster's reducers have not brought."""
        return [part for part in range(roster.num_parts) if part not in self.reduced]

    def is_begun(self, slot: Slot) -> bool:
        """Whether nothing need be aggregated for it here any more."""
        return slot in self.aggregating or slot in self.aggregated or slot[0] in self.reduced

    def is_made(self, slot: Slot) -> bool:
        """Whether a cohort's share is known to be made, here or by what its reducer says."""
        return slot in self.announced or slot in self.shares or slot in self.aggregated

    def fetched(self, reduced: ReducedPart) -> None:
        """Its bytes came, with its reducer's word; once the outcome is certified, its bytes are enough."""
        self._hold(reduced)

    def unproved(self, result: Result) -> list[ReducedPart]:
        """Parts of a result that is voted on of which more is said than their reducers have signed for, as far as is
        known here; or that are left empty, though a reducer has brought them.

        So whoever proposes a result fills in nothing: neither who is in a part, nor the squares that the step is
        clipped by, nor that nobody brought it.
        """
        brought = {made.part for made in self.stated if made.cohort is None and is_of(made, result.roster)}
        return [
            reduced
            for reduced in result.parts
            if (reduced.part in brought if reduced.is_empty else reduced not in self.stated)
        ]

    def lacking(self, result: Result) -> list[ReducedPart]:
        """Parts of the result whose bytes are not here; an empty part has none."""
        return [
            reduced
            for reduced in result.parts
            if not reduced.is_empty and (reduced.part, reduced.digest) not in self.held
        ]


def _wanted(slot: Slot, roster: Roster) -> tuple[PeerId, ...]:
    """Whose contributions the roster wants there, in the order of peer ids."""
    if slot[1] is None:
        return tuple(made.peer_id for made in roster.contributions)
    return roster.contributors[slot[1]]
