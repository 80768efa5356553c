"""A member under a certified roster: parts to their reducers, reduced parts to everyone.

It knows nothing of votes: whoever reduces, sends and fetches does so because a roster or a result was certified.

Where the stage is one cohort, the reducer of a part aggregates and encodes it for all. Where it is several, each
cohort's reducer aggregates its cohort's contributions to a share in fp32; one of them, the combiner, combines the
shares and encodes the part once, and each of the others hands it on to its cohort.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from swarm.core.cohorts import num_cohorts
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Contribution, Lack, ReducedPart, Result, Roster, Share
from swarm.core.round.facts import RoundFacts, is_of
from swarm.core.round.instructions import (
    AggregatePart,
    AnnounceShare,
    CombineShares,
    FetchPart,
    Instructions,
    SayMissing,
    SendPart,
    SendReduced,
)
from swarm.core.round.parts import RoundParts, Slot
from swarm.core.round.patience import Arrivals, Waits
from swarm.core.round.proposal import left_by, with_reducers
from swarm.core.round.voting import Sign

MOST_OVERTAKEN = 8


@dataclass
class RoundReduction:
    """What one member sends, reduces and holds of a round's parts."""

    facts: RoundFacts
    me: PeerId
    sign: Sign
    gone: Container[PeerId]
    """Peers that seem to be away now."""
    contribution: Contribution | None = None
    """The own one, once it is made."""
    roster: Roster | None = None
    """The certified roster that is followed."""
    parts: RoundParts = field(default_factory=RoundParts)
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(Waits(), 1.0))
    given_up: set[PeerId] = field(default_factory=set)
    """Whose parts this peer has said that it waits for no longer, in this round: it does not wait for them again under
    another leader."""
    due: float | None = None
    """When this peer says whose parts it still lacks."""
    is_over: bool = False
    """The outcome is certified: nothing is reduced any more."""
    overtaken: deque[Roster] = field(default_factory=lambda: deque(maxlen=MOST_OVERTAKEN))
    """Rosters that were followed, and say something else than those that are known now of their views."""
    _relayed: set[ReducedPart] = field(default_factory=set)
    """What a reducer says beside the same bytes may change with the roster."""
    _taken_over: set[int] = field(default_factory=set)
    """Parts that came to another reducer of the own cohort."""

    def __post_init__(self) -> None:
        self._is_split = num_cohorts(len(self.facts.members)) > 1

    # -- follow -------------------------------------------------------------------------------------------

    def follow(self, roster: Roster, *, leads: bool, now: float) -> Instructions:
        """Send, aggregate and hand on what this roster wants of this peer."""
        earlier, self.roster = self.roster, roster
        if earlier is not None and earlier.facts_digest() != roster.facts_digest():
            self.parts.keep_what_fits(earlier, roster)
            self.overtaken.append(earlier)
        mine = self._own_contribution(roster)
        moved_before = earlier is not None and self._own_contribution(earlier) is not None
        new_leader = earlier is None or earlier.leader != roster.leader
        held = earlier.reducers if earlier is not None else ()
        out: Instructions = []
        has_more_to_reduce = False
        for place, reducer in enumerate(roster.reducers):
            cohort, part = divmod(place, roster.num_parts)
            stays = bool(held) and held[place] == reducer
            if held and not stays and cohort == roster.cohort_of[self.me]:
                self._taken_over.add(part)
            has_more_to_reduce |= reducer == self.me and not stays
            is_own = mine is not None and cohort == roster.cohort_of[self.me]
            if reducer != self.me:
                if is_own and not (stays and moved_before):
                    out.append(SendPart(reducer, part, roster.view))
                continue
            if is_own:
                self.parts.received.setdefault(part, set()).add(self.me)
            moved = new_leader or not stays
            if self._is_split:
                before = (earlier.view, earlier.combiner_of(part)) if earlier is not None and held else None
                moved = moved or before != (roster.view, roster.combiner_of(part))
                out += self._share_again(part, cohort, roster, moved=moved)
            if roster.combiner_of(part) == self.me:
                out += self._whole_again(part, roster, to_leader=moved and not leads)
        # Where a contribution less is awaited, and nothing more is sent for it, whoever else is late had its time.
        is_less = not new_leader and earlier is not None and roster.comes_of(earlier.facts_digest())
        if not is_less or has_more_to_reduce:
            self.arrivals.begin(now=now)
        has_given_up = any(made.peer_id in self.given_up or made.peer_id in self.gone for made in roster.contributions)
        self.due = now + (0.0 if has_given_up else self.facts.phase_s) if self.me in roster.reducers else None
        for sender, reduced in self.parts.offers():
            self._take(sender, reduced, roster)
        return out + (self._combine_all(roster) if self._is_split else [])

    def _whole_again(self, part: int, roster: Roster, *, to_leader: bool) -> Instructions:
        known = self.parts.aggregated.get((part, None)) or self.parts.reduced.get(part)
        if known is None:
            return [] if self._is_split else self._aggregate_if_complete((part, None))
        # Done before, here or by a reducer that is relieved; who leads now may not have it.
        self.parts.reduced.setdefault(part, known)
        return [SendReduced((roster.leader,), known)] if to_leader else []

    def _share_again(self, part: int, cohort: int, roster: Roster, *, moved: bool) -> Instructions:
        """`moved`: who combines the shares or leads may not have it."""
        known = self.parts.aggregated.get((part, cohort))
        if known is None:
            return self._aggregate_if_complete((part, cohort))
        return self._hand_on(known, roster) if moved else []

    def _own_contribution(self, roster: Roster) -> Contribution | None:
        """The own contribution, if it is on the roster and the bytes it commits to are here."""
        made = roster.contribution_of(self.me)
        return made if made is not None and made == self.contribution else None

    def audience(self, roster: Roster) -> tuple[PeerId, ...]:
        """Everyone else; of those who leave only whoever may be there to hear it."""
        return self._of_audience(self.facts.members, roster)

    def _of_audience(self, peers: Iterable[PeerId], roster: Roster) -> tuple[PeerId, ...]:
        left = left_by(roster)
        return tuple(peer for peer in peers if peer != self.me and not (peer in left and peer in self.gone))

    def with_reducers(
        self, roster: Roster, held: tuple[PeerId, ...], away: Container[PeerId], slow: Container[PeerId] = ()
    ) -> Roster:
        """The roster with reducers who are not `away`, nor `slow` where others are there; of `held`, the reducers so
        far, those stay who are of use."""
        stay = tuple(peer for peer in self.facts.members if peer not in left_by(roster))
        near = tuple(peer for peer in stay if peer == self.me) or stay
        there = tuple(peer for peer in stay if peer not in away) or near
        live = tuple(peer for peer in there if peer not in slow) or there
        done = {part for part, reduced in self.parts.reduced.items() if is_of(reduced, roster)}
        return with_reducers(roster, held, live, num_parts=self.facts.num_parts, done=done)

    # -- reduce -------------------------------------------------------------------------------------------

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        """Digest that `sender` committed to for `part`. Raises RemoteError if its part is not wanted."""
        contribution = self.roster.contribution_of(sender) if self.roster is not None else None
        if contribution is None or not 0 <= part < len(contribution.part_digests):
            raise RemoteError("protocol", f"part {part} of {sender} is not on the roster", sender)
        return contribution.part_digests[part]

    def on_part(self, sender: PeerId, part: int) -> Instructions:
        """A contributor's part is here and matches its committed digest."""
        self.parts.received.setdefault(part, set()).add(sender)
        return self._aggregate_if_complete(self._slot_of(sender, part))

    def on_bad_part(self, sender: PeerId, part: int) -> Instructions:
        """A contributor's part is here and matches its committed digest, but holds nonsense: it is left out."""
        self.parts.malformed.setdefault(part, set()).add(sender)
        return self._aggregate_if_complete(self._slot_of(sender, part))

    def _slot_of(self, sender: PeerId, part: int) -> Slot:
        """Where a member's part goes."""
        assert self.roster is not None
        return (part, self.roster.cohort_of[sender] if self._is_split else None)

    def _reduces(self, slot: Slot, roster: Roster) -> bool:
        part, cohort = slot
        return part < roster.num_parts and roster.reducer_of(part, cohort or 0) == self.me

    def _aggregate_if_complete(self, slot: Slot) -> Instructions:
        roster = self.roster
        if roster is None or self.is_over or not self._reduces(slot, roster):
            return []
        contributors = self.parts.begin(slot, roster)
        if contributors is None:
            return []
        return [AggregatePart(slot[0], contributors, self.parts.excluded(slot, contributors, roster), slot[1])]

    def _own_slots(self, roster: Roster) -> list[Slot]:
        """What this peer aggregates contributions to."""
        places = [place for place, reducer in enumerate(roster.reducers) if reducer == self.me]
        split = (divmod(place, roster.num_parts) for place in places)
        return [(part, cohort if self._is_split else None) for cohort, part in split]

    def _missing(self, roster: Roster) -> set[PeerId]:
        """Whose parts this peer lacks of what it reduces."""
        slots = [slot for slot in self._own_slots(roster) if not self.parts.is_begun(slot)]
        return {peer for slot in slots for peer in self.parts.missing(slot, roster)}

    def look(self, *, now: float) -> Instructions:
        """Say to the leader whose parts are not here; of those that come no more, that they are given up.

        Who is gone is given up also where all of its parts are here: others may lack some.
        """
        roster, self.due = self.roster, None
        if roster is None or self.is_over:
            return []
        missing, dead = self._missing(roster), self._dead(roster)
        if not missing and not dead:
            return []
        if 2 * len(missing) < len(roster.contributions):
            self.arrivals.most_are_here(now=now)
        awaited = self.arrivals.awaited(missing, now=now) - dead - self.given_up
        given_up = (missing - awaited) | dead
        self.given_up |= given_up
        if missing:
            next_look = [self.arrivals.until(peer) for peer in awaited]
            self.due = min([now + self.facts.phase_s, *(max(at, now + 0.05 * self.facts.phase_s) for at in next_look)])
        words = [
            (made.peer_id, self.sign(Lack.signs(made))) for made in roster.contributions if made.peer_id in given_up
        ]
        return [SayMissing(roster.leader, roster.view, tuple(sorted(missing)), tuple(words))]

    @property
    def waits_for(self) -> str:
        """In words: whose contributions' parts, of those that this peer reduces; nothing if none."""
        roster = self.roster
        if roster is None or self.is_over:
            return ""
        slots = [slot for slot in self._own_slots(roster) if not self.parts.is_begun(slot)]
        missing = Counter(peer for slot in slots for peer in self.parts.missing(slot, roster))
        return ", ".join(f"{num} parts of {peer[-6:]}" for peer, num in sorted(missing.items()))

    def _dead(self, roster: Roster) -> set[PeerId]:
        """Who is gone of those whose contributions this peer reduces."""
        cohorts = {place // roster.num_parts for place, one in enumerate(roster.reducers) if one == self.me}
        made = (peer for cohort in cohorts for peer in roster.contributors[cohort])
        return {peer for peer in made if peer in self.gone}

    def aggregated(self, reduced: ReducedPart) -> tuple[Instructions, bool]:
        """The own part or share is aggregated and encoded: what to do, and whether that made it a reduced part."""
        part, roster = reduced.part, self.roster
        if not self.parts.done(reduced, roster):
            if roster is not None and self._is_split and reduced.cohort is None:
                return self._combine_if_complete(part, roster), False
            return self._aggregate_if_complete(reduced.slot), False
        assert roster is not None
        if self.is_over or part in self.parts.reduced:
            return [], False
        if reduced.cohort is not None:
            return (self._hand_on(reduced, roster) if self._reduces(reduced.slot, roster) else []), False
        if roster.combiner_of(part) != self.me:
            return [], False
        self.parts.reduced[part] = reduced
        to = self._hearers(part, roster)
        return ([SendReduced(to, reduced)] if to else []), True

    def _hearers(self, part: int, roster: Roster) -> tuple[PeerId, ...]:
        """Whom the part's combiner sends it to: the cohorts that it reduces for, the other reducers, and the leader."""
        if not self._is_split:
            return self.audience(roster)
        reducers = [roster.reducer_of(part, cohort) for cohort in range(len(roster.cohorts))]
        return self._of_audience(dict.fromkeys((*self._near(part, roster), *reducers, roster.leader)), roster)

    def _near(self, part: int, roster: Roster) -> list[PeerId]:
        """Members of the cohorts that this peer reduces the part for."""
        numbers = [number for number in range(len(roster.cohorts)) if roster.reducer_of(part, number) == self.me]
        return [peer for number in numbers for peer in roster.cohorts[number]]

    def offer(self, sender: PeerId, reduced: ReducedPart) -> None:
        """A member brings a reduced part or a share; its bytes match its digest. Raises RemoteError if it cannot be."""
        if self.roster is None or not 0 <= reduced.part < self.facts.num_parts:
            raise RemoteError("protocol", f"reduced part {reduced.part} is not of this round, or too early", sender)
        if (reduced.cohort is None and reduced.is_empty) or not set(reduced.contributors) <= set(self.facts.members):
            raise RemoteError("protocol", f"reduced part {reduced.part} is made of no members' contributions", sender)
        self.parts.offer(sender, reduced, num_left_out=len(self.roster.left_out))

    def take(self, sender: PeerId, reduced: ReducedPart) -> tuple[Instructions, bool]:
        """What an offered part or share leads to, and whether it is a whole part that counts, for the first time."""
        roster = self.roster
        assert roster is not None
        was_here = reduced.part in self.parts.reduced
        counts = self._take(sender, reduced, roster)
        if reduced.cohort is not None:
            return (self._combine_if_complete(reduced.part, roster) if counts else []), False
        return [], counts and not was_here

    def _take(self, sender: PeerId, reduced: ReducedPart, roster: Roster) -> bool:
        """Whether it counts: not of a reducer relieved of it, or of another view's facts.

        Even then its bytes may still be chosen.
        """
        part, cohort = reduced.slot
        if part >= roster.num_parts or not is_of(reduced, roster):
            return False
        if cohort is None:
            if sender not in (roster.combiner_of(part), roster.reducer_of(part, roster.cohort_of[self.me])):
                return False
            self.parts.reduced.setdefault(part, reduced)
            return True
        if sender != roster.reducer_of(part, cohort) or roster.combiner_of(part) != self.me:
            return False
        self.parts.shares.setdefault(reduced.slot, (sender, reduced))
        return True

    # -- shares of cohorts --------------------------------------------------------------------------------

    def _hand_on(self, share: ReducedPart, roster: Roster) -> Instructions:
        """The own cohort's share goes to who combines it; the leader is told."""
        part, cohort = share.part, share.cohort
        assert cohort is not None
        combiner, leader = roster.combiner_of(part), roster.leader
        if combiner == self.me:
            self.parts.shares.setdefault(share.slot, (self.me, share))
            out = self._combine_if_complete(part, roster)
        else:
            out = [SendReduced((combiner,), share)]
        return out + ([AnnounceShare(leader, part, cohort)] if leader not in (self.me, combiner) else [])

    def announced(self, sender: PeerId, slot: Slot) -> bool:
        """Whether the reducer of a cohort's share says that it is made, for the first time."""
        roster, (part, cohort) = self.roster, slot
        if roster is None or cohort is None or not self._is_split:
            return False
        if part >= roster.num_parts or cohort >= len(roster.cohorts) or roster.reducer_of(part, cohort) != sender:
            return False
        was_known = slot in self.parts.announced
        self.parts.announced.add(slot)
        return not was_known

    def _combine_all(self, roster: Roster) -> Instructions:
        return [made for part in range(roster.num_parts) for made in self._combine_if_complete(part, roster)]

    def _combine_if_complete(self, part: int, roster: Roster) -> Instructions:
        parts = self.parts
        if self.is_over or roster.combiner_of(part) != self.me or parts.is_begun((part, None)):
            return []
        wanted = [number for number, contributors in enumerate(roster.contributors) if contributors]
        held = [parts.shares[part, number] for number in wanted if (part, number) in parts.shares]
        if len(held) < len(wanted) or all(share.is_empty for _, share in held):
            return []
        parts.aggregating.add((part, None))
        left_out = (one for _, share in held for one in share.excluded)
        return [
            CombineShares(
                part,
                tuple(sorted(peer for _, share in held for peer in share.contributors)),
                tuple(sorted(left_out, key=lambda one: one.peer_id)),
                tuple(
                    Share(number, maker, share.digest)
                    for number, (maker, share) in zip(wanted, held, strict=True)
                    if not share.is_empty
                ),
            )
        ]

    def relay(self, sender: PeerId, reduced: ReducedPart) -> Instructions:
        """A part that its combiner has sent goes on to the own cohort, once."""
        roster, part = self.roster, reduced.part
        if not self._is_split or roster is None or reduced.cohort is not None or reduced in self._relayed:
            return []
        if not is_of(reduced, roster) or sender != roster.combiner_of(part):
            return []
        to = tuple(peer for peer in self._of_audience(self._near(part, roster), roster) if peer != roster.leader)
        self._relayed.add(reduced)
        return [SendReduced(to, reduced)] if to else []

    # -- the result's bytes -------------------------------------------------------------------------------

    def fetch_missing(self, result: Result, *, asked_at: float | None = None, now: float) -> Instructions:
        """But for what several reducers are sending at once: then the own line holds it up, and what one slow reducer
        sends is fetched from others. `asked_at`: a ballot came then for the first time, which is small, and overtakes
        the parts on a slow link: but for what reducers send that need not have been heard of since. Whoever has taken a
        part over may have had it from its reducer, who sends it to nobody any more: nothing comes of that."""
        roster, own = result.roster, result.roster.cohort_of[self.me]
        followed = self.roster is not None and self.roster.rank == roster.rank
        out: Instructions = []
        wanted = self.parts.lacking(result) if self.is_over else self.parts.unproved(result)
        reducers = {roster.reducer_of(reduced.part, own) for reduced in wanted if not reduced.is_empty}
        moving = {peer for peer in reducers if self.arrivals.is_moving(peer, now=now)}
        silent: set[PeerId] = set()
        coming = moving if len(moving) > 1 else set()
        if asked_at is not None:
            silent = {peer for peer in reducers if self.arrivals.is_silent(peer, since=asked_at, now=now)}
            coming = reducers - silent
        for reduced in wanted:
            if reduced.is_empty:
                continue
            reducer, combiner = roster.reducer_of(reduced.part, own), roster.combiner_of(reduced.part)
            comes = reducer in coming and not (asked_at is not None and reduced.part in self._taken_over)
            if comes and followed and reducer not in self.gone:
                continue
            near = (reducer, combiner, *roster.cohorts[own], *self.facts.members)
            # Whoever seems gone, or is silent, is asked last.
            holders = [peer for peer in dict.fromkeys(near) if peer != self.me]
            holders.sort(key=lambda peer: peer in self.gone or peer in silent)
            if holders:
                out.append(FetchPart(reduced.part, reduced.digest, tuple(holders), reduced, roster))
        return out
