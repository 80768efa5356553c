"""This is where a member of a round follows a certified roster: parts to their reducers, reduced parts to everyone.

It knows nothing of votes: whoever reduces, sends and fetches does so because a roster or a result was certified.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from swarm.core.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round_facts import RoundFacts, is_of
from swarm.core.round_instructions import AggregatePart, FetchPart, Instructions, SendPart, SendReduced
from swarm.core.round_parts import RoundParts
from swarm.core.round_proposal import left_by, with_reducers


@dataclass
class RoundReduction:
    """What one member sends, reduces and holds of a round's parts."""

    facts: RoundFacts
    me: PeerId
    gone: Container[PeerId]
    """Peers that seem to be away now."""
    contribution: Contribution | None = None
    """The own one, once it is made."""
    roster: Roster | None = None
    """The certified roster that is followed."""
    parts: RoundParts = field(default_factory=RoundParts)
    due: float | None = None
    """When this peer stops waiting for parts to reduce."""
    is_over: bool = False
    """The outcome is certified: nothing is reduced any more."""

    # -- follow -------------------------------------------------------------------------------------------

    def follow(self, roster: Roster, *, leads: bool, now: float) -> Instructions:
        """Send, aggregate and hand on what this roster wants of this peer."""
        earlier, self.roster = self.roster, roster
        if earlier is not None and earlier.facts_digest() != roster.facts_digest():
            self.parts.keep_what_fits(earlier, roster)
        mine = self._own_contribution(roster)
        moved_before = earlier is not None and self._own_contribution(earlier) is not None
        new_leader = earlier is None or earlier.leader != roster.leader
        out: Instructions = []
        for part, reducer in enumerate(roster.reducers):
            stays = earlier is not None and bool(earlier.reducers) and earlier.reducers[part] == reducer
            if reducer != self.me:
                if mine is not None and not (stays and moved_before):
                    out.append(SendPart(reducer, part, roster.view))
                continue
            if mine is not None:
                self.parts.received.setdefault(part, set()).add(self.me)
            known = self.parts.aggregated.get(part) or self.parts.reduced.get(part)
            if known is None:
                out += self._aggregate_if_complete(part)
            else:  # done before, here or by a reducer that is relieved; who leads now may not have it
                self.parts.reduced.setdefault(part, known)
                if not leads and (new_leader or not stays):
                    out.append(SendReduced((roster.leader,), known))
        self.due = now + self.facts.phase_s if self.me in roster.reducers else None
        self.parts.accept_offers(roster)
        return out

    def _own_contribution(self, roster: Roster) -> Contribution | None:
        """The own contribution, if it is on the roster and the bytes it commits to are here."""
        made = roster.contribution_of(self.me)
        return made if made is not None and made == self.contribution else None

    def audience(self, roster: Roster) -> tuple[PeerId, ...]:
        """Everyone else; of those who leave only whoever may be there to hear it."""
        left = left_by(roster)
        return tuple(
            peer for peer in self.facts.members if peer != self.me and not (peer in left and peer in self.gone)
        )

    def with_reducers(self, roster: Roster, held: tuple[PeerId, ...], away: Container[PeerId]) -> Roster:
        """The roster with reducers who are not `away`; of `held`, the reducers so far, those stay who are of use."""
        stay = tuple(peer for peer in self.facts.members if peer not in left_by(roster))
        live = tuple(peer for peer in stay if peer == self.me or peer not in away) or stay
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
        return self._aggregate_if_complete(part)

    def on_bad_part(self, sender: PeerId, part: int, reason: str) -> Instructions:
        """A contributor's part is here and matches its committed digest, but holds nonsense: it is left out."""
        self.parts.refused.setdefault(part, {})[sender] = reason
        return self._aggregate_if_complete(part)

    def _aggregate_if_complete(self, part: int, *, late: bool = False) -> Instructions:
        roster = self.roster
        if roster is None or self.is_over or self.me not in roster.reducers[part : part + 1]:
            return []
        contributors = self.parts.begin(part, roster, self.gone, late=late)
        return (
            [AggregatePart(part, contributors, self.parts.excluded(part, contributors, roster))] if contributors else []
        )

    def someone_is_gone(self) -> Instructions:
        """Nothing more comes from it."""
        return [
            instruction for part in sorted(self.parts.received) for instruction in self._aggregate_if_complete(part)
        ]

    def is_late(self, *, now: float) -> Instructions:
        """Parts that are still missing are left out. A part that nobody has sent yet is waited for."""
        self.due = None
        out: Instructions = []
        assert self.roster is not None
        for part, reducer in enumerate(self.roster.reducers):
            if reducer == self.me:
                out += self._aggregate_if_complete(part, late=True)
                if part not in self.parts.aggregating and part not in self.parts.reduced:
                    self.due = now + self.facts.phase_s
        return out

    def aggregated(self, reduced: ReducedPart) -> tuple[Instructions, bool]:
        """The own part is aggregated and encoded: what to do, and whether that made it a reduced one."""
        part, roster = reduced.part, self.roster
        if not self.parts.done(reduced, roster):
            return self._aggregate_if_complete(part), False
        assert roster is not None
        if self.is_over or part in self.parts.reduced or roster.reducers[part] != self.me:
            return [], False
        to = self.audience(roster)
        self.parts.reduced[part] = reduced
        return ([SendReduced(to, reduced)] if to else []), True

    def offer(self, sender: PeerId, reduced: ReducedPart) -> None:
        """A member brings a reduced part; its bytes match its digest. Raises RemoteError if it cannot be."""
        if self.roster is None or not 0 <= reduced.part < self.facts.num_parts:
            raise RemoteError("protocol", f"reduced part {reduced.part} is not of this round, or too early", sender)
        if not reduced.contributors or not set(reduced.contributors) <= set(self.facts.members):
            raise RemoteError("protocol", f"reduced part {reduced.part} is made of no members' contributions", sender)
        self.parts.offer(sender, reduced)

    def take(self, sender: PeerId, reduced: ReducedPart) -> bool:
        """Whether the offered part counts: not of a reducer relieved of it, or of another view's facts.

        Even then its bytes may still be chosen.
        """
        roster = self.roster
        assert roster is not None
        if roster.reducers[reduced.part : reduced.part + 1] != (sender,) or not is_of(reduced, roster):
            return False
        self.parts.reduced.setdefault(reduced.part, reduced)
        return True

    # -- the result's bytes -------------------------------------------------------------------------------

    def fetch_missing(self, result: Result, *, but_coming: bool = False) -> Instructions:
        """`but_coming`: not what its reducer is sending: a ballot is small, and overtakes the parts on a slow link."""
        followed = self.roster is not None and self.roster.rank == result.roster.rank
        out: Instructions = []
        for reduced in self.parts.lacking(result):
            reducer = result.roster.reducers[reduced.part]
            if but_coming and followed and reducer not in self.gone:
                continue
            others = [peer for peer in self.facts.members if peer != reducer]
            # Whoever seems gone is asked last: it may be back.
            holders = sorted((peer for peer in (reducer, *others) if peer != self.me), key=self.gone.__contains__)
            if holders:
                out.append(FetchPart(reduced.part, reduced.digest, tuple(holders), reduced, result.roster))
        return out
