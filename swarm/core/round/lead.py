"""A member as leader of a view of a round: what it has heard, what it proposes, whom it relieves.

What a quorum makes certain is handed back to the member's own side of the round, `swarm.core.round.averaging_round`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm.core.ids import PeerId
from swarm.core.round.ballots import Ballots, Proposal
from swarm.core.round.contribution import Contribution, Lack, ReducedPart, Result, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.instructions import AskPromise, Instructions, SendBallot, SendClose, SendRoster
from swarm.core.round.patience import Patience
from swarm.core.round.proposal import fresh_roster, left_by
from swarm.core.round.reduction import RoundReduction
from swarm.core.round.voter import RoundVoter
from swarm.core.round.voting import Promise, Proof, Sign

ABSENT_SHARE = 0.25
"""Of a phase: so long a leader waits for a late member of whom it has heard nothing in this step."""
MAX_RELIEFS = 3
"""Times parts are given to other reducers before those that nobody can bring are left empty."""


def names_of(peers: Iterable[PeerId]) -> str:
    """The ends of their ids."""
    return ", ".join(peer[-6:] for peer in peers)


@dataclass
class RoundLead:
    """The leader's side of the view that one member leads, if it leads one.

    `follow(roster, now)` and `accept(result, now)` take what was certified.
    """

    facts: RoundFacts
    me: PeerId
    sign: Sign
    voter: RoundVoter
    reduction: RoundReduction
    patience: Patience
    gone: Mapping[PeerId, str]
    """Unreachable and not heard of since, and why."""
    views_of: Mapping[PeerId, int]
    """The highest view that others are in, as far as is known."""
    follow: Callable[[Roster, float], Instructions]
    accept: Callable[[Result, float], Instructions]
    is_on: bool = False
    """This peer leads the member's view and has asked for commitments."""
    view: int = 0
    ballots: Ballots = field(init=False)
    committed: dict[PeerId, Contribution | None] = field(default_factory=dict)
    """To this view; None of members that may not contribute."""
    late: dict[PeerId, str] = field(default_factory=dict)
    """Silent in this view, and why."""
    reason: str = ""
    joins: tuple[PeerId, ...] = ()
    neighbours: tuple[PeerId, ...] = ()
    absent: frozenset[PeerId] = frozenset()
    """Late members that have not said yet that they are at this step."""
    silent: frozenset[PeerId] = frozenset()
    """Members that were waited for in an earlier view of this turn."""
    leave_out: dict[PeerId, tuple[Lack, ...]] = field(default_factory=dict)
    """Whose contributions the next roster is to do without, by whose words."""
    num_waits: int = 0
    """Times that promises of a quorum were awaited in vain, in this view."""
    _asked_again: bool = False
    _votes_are_late: bool = False
    """On what is proposed now."""
    voted: set[PeerId] = field(default_factory=set)
    """For anything in this view."""
    _shows_enough: bool = False
    _shows_one: bool = False
    """The promise of one member alone, so far."""
    _num_reliefs: int = 0
    _missed: set[PeerId] = field(default_factory=set)
    """Contributors of whom some reducer lacks parts."""
    _lacks: dict[PeerId, dict[PeerId, Lack]] = field(default_factory=dict)
    """By contributor, what reducers say who wait for its parts no longer."""
    _awaits: dict[PeerId, tuple[float, int]] = field(default_factory=dict)
    """Of each reducer, when it last said that it lacks parts, and of how many contributors."""
    _spared: dict[PeerId, float] = field(default_factory=dict)
    """Reducers that were not relieved when others were, and when: once in a view."""
    _most_reduced_at: float | None = None
    """Since when all parts of more than half of the roster's reducers are here."""

    def __post_init__(self) -> None:
        self.ballots = Ballots(self.facts.election, self.voter.verify, self.view)

    # -- commitments --------------------------------------------------------------------------------------

    def begin(
        self, view: int, reason: str, promises: Iterable[Promise], now: float, *, silent: Collection[PeerId] = ()
    ) -> Instructions:
        """Ask everyone for commitments to `view`, which this peer has entered; of some it has `promises`, and for the
        `silent` it waits no more."""
        self.view, self.reason, self.is_on, self.num_waits = view, reason, True, 0
        self.silent = frozenset(silent)
        self._asked_again = self._votes_are_late = self._shows_enough = self._shows_one = False
        self.voted.clear()
        self.ballots = Ballots(self.facts.election, self.voter.verify, view, self.voter.changed)
        self.patience.wait(2, now=now)
        promise = self.voter.promise(view)
        if promise is not None and self.me in self.ballots.voters:
            self.ballots.promised(promise)
        for made in promises:
            self.ballots.promised(made)
        out = self.call()
        return out or self._send_close(tuple(peer for peer in self.facts.members if peer != self.me))

    def _send_close(self, to: tuple[PeerId, ...]) -> Instructions:
        return [SendClose(to, self.view, self.reason)] if to else []

    def call(self) -> Instructions:
        """Once there are promises of so many members that others follow: those who are silent are called to the view,
        if they were before in vain, and voters outside the stage are asked for theirs."""
        members = self.facts.members_in(self.view, self.ballots.changed, gone=self.gone)
        if self.view == self.facts.first_view or not self.facts.election.is_more_than_liars(
            self.ballots.promises, members
        ):
            return []
        is_one = len(members.intersection(self.ballots.promises)) == 1
        if not self._shows_enough:
            self._shows_enough, self._shows_one = True, is_one
            return self._send_close(self._missing()) + self._ask_promises()
        if self._shows_one and not is_one:  # voters outside are to know that it was not alone
            self._shows_one = False
            return [AskPromise(outside, self.view)] if (outside := self._outsiders()) else []
        return []

    @property
    def turned(self) -> Proof:
        """Who has promised the view, so that others follow to it: most of its members, or so many voters that no lower
        view can end."""
        return Proof(tuple(promise for _, promise in sorted(self.ballots.promises.items())), None, self.ballots.changed)

    def end(self) -> None:
        """A higher view begins."""
        self.is_on = self._votes_are_late = False
        self.voted.clear()
        self.committed.clear()
        self.late.clear()
        self._missed.clear()
        self._lacks.clear()
        self._awaits.clear()
        self._spared.clear()
        self._num_reliefs = 0
        self._most_reduced_at = None

    def _ask_promises(self) -> Instructions:
        if self.view == self.facts.first_view:
            return []
        silent = tuple(peer for peer in self._outsiders() if peer not in self.ballots.promises)
        return [AskPromise(silent, self.view)] if silent else []

    def _outsiders(self) -> tuple[PeerId, ...]:
        """Voters that are no members."""
        return tuple(peer for peer in self.ballots.voters if peer not in self.facts.members)

    def _missing(self) -> tuple[PeerId, ...]:
        heard = {self.me, *self.committed, *self.gone}
        return tuple(peer for peer in self.facts.members if peer not in heard)

    @property
    def has_roster(self) -> bool:
        """Whether the roster that is followed is of the view that is led."""
        roster = self.reduction.roster
        return self.is_on and roster is not None and roster.view == self.view

    def unheard(self) -> set[PeerId]:
        """Once the view that is led has a roster, or votes on one are late: members that have said nothing in it, nor
        before. They may be at another step, and turn to no view of this one."""
        roster, heard = self.reduction.roster, self.committed.keys() | self.views_of.keys() | self.voted
        if self.has_roster and roster is not None:
            heard |= {made.peer_id for made in roster.committed}
            heard |= {vote.voter for vote in roster.certificate.votes} if roster.certificate is not None else set()
        elif not self._votes_are_late:
            return set()
        return {*self.facts.members} - heard

    @property
    def waits_for(self) -> str:
        """In words: whose commitments or votes, or parts reduced by whom."""
        proposal, roster = self.ballots.proposal, self.reduction.roster
        if proposal is not None:
            silent = [peer for peer in self.ballots.voters if peer not in self.ballots.votes]
            return f"votes on the {proposal.phase} of {names_of(silent)}"
        if not self.has_roster or roster is None:
            missing = self._missing()
            return f"commitments of {names_of(missing)}" if missing else "promises of its view"
        behind = Counter(roster.combiner_of(part) for part in self.reduction.parts.unreduced(roster))
        return ", ".join(f"{num} parts reduced by {peer[-6:]}" for peer, num in sorted(behind.items()))

    # -- the roster ---------------------------------------------------------------------------------------

    def propose(self, now: float, *, late: bool = False) -> Instructions:
        """Ask for votes on the view's roster, or on the result that must be proposed again, once that is possible."""
        if not self.is_on or self.me not in self.committed or self.ballots.proposal is not None:
            return []
        missing = self._missing()
        if not late and self.silent.issuperset(missing):
            late = True
        if missing and not late:
            if set(missing) <= {*self.facts.late} and self.patience.due is not None:
                share = ABSENT_SHARE if self.absent.issuperset(missing) else 1.0
                self.patience.due = min(self.patience.due, now + share * self.facts.phase_s)
            return []
        led = self.voter.rosters.get(self.view)
        if led is not None:  # certified before this process was started again: the view has no other
            return self._send(led) + self.follow(led, now)
        proof = self.ballots.proof(self.voter.certificates()) if self.view != self.facts.first_view else None
        if proof is None and self.view != self.facts.first_view:
            return []  # promises of a quorum are awaited
        bound = proof.certificate if proof is not None else None
        for peer in missing:
            share = ABSENT_SHARE if peer in self.absent else 1 if peer in self.facts.late else 3
            waited_s = share * self.facts.phase_s
            self.late[peer] = f"no commitment within {waited_s:.1f} s"
        if bound is not None and bound.phase == "result":
            assert proof is not None
            likely = self.voter.likely[bound.view]
            unsigned = replace(likely, leader=self.me, certificate=None)
            return self._ask(Proposal.of_result(self._signed_result(unsigned), self.view, proof), now)
        earlier = self.voter.roster
        if bound is not None:
            # It may already have been acted on: parts that moved need not move again.
            earlier = self.voter.rosters[bound.view]
            proposal = replace(earlier, view=self.view, revision=0, leader=self.me, certificate=None)
            proposal = proposal.without(self.leave_out)
        else:
            proposal = fresh_roster(
                self.facts,
                view=self.view,
                leader=self.me,
                committed=self.committed,
                silent={**self.late, **self.gone},
                joins=self.joins,
                neighbours=self.neighbours,
                reason=self.reason,
            )
        roster = self._signed(proposal, earlier.reducers if earlier is not None else ())
        return self._ask(Proposal.of_roster(roster, proof or Proof()), now)

    def _signed(self, roster: Roster, held: tuple[PeerId, ...]) -> Roster:
        """The roster with a reducer for each part, of those `held` so far whoever is still of use."""
        made = self.reduction.with_reducers(roster, held, {*self.gone, *self.late}, self._slow(roster))
        return replace(made, signature=self.sign(made.signed_bytes()))

    def _slow(self, roster: Roster) -> set[PeerId]:
        """Whose own parts a reducer has given up would bring what it reduces later still. Those that come stay where
        they are: on a slow line all are missing for a while. Who gives up most of the others, or was given up itself,
        has a slow line: its word says nothing of theirs."""
        left_out = {*self.leave_out, *(one.peer_id for one in roster.left_out)}
        said = Counter(reducer for lacks in self._lacks.values() for reducer in lacks)
        unheard = left_out | {reducer for reducer, count in said.items() if not self._are_few(count, reducer, roster)}
        members, is_more_than_liars = self.facts.members, self.facts.election.is_more_than_liars
        lacked = {peer for peer, lacks in self._lacks.items() if is_more_than_liars(lacks.keys() - unheard, members)}
        return {*left_out, *lacked, *self.facts.late}

    def _are_few(self, count: int, reducer: PeerId, roster: Roster) -> bool:
        """Of those whose contributions the reducer gets."""
        return 2 * count < len(roster.contributors[roster.cohort_of[reducer]])

    def _signed_result(self, result: Result) -> Result:
        return replace(result, signature=self.sign(result.signed_bytes()))

    def _send(self, roster: Roster) -> Instructions:
        to = self.reduction.audience(roster)
        return [SendRoster(to, roster)] if to else []

    # -- votes --------------------------------------------------------------------------------------------

    def asks(self, phase: str) -> bool:
        """Whether votes of this phase are being asked for."""
        asked = self.ballots.proposal
        return self.is_on and asked is not None and asked.phase == phase

    @property
    def _put_off(self) -> set[PeerId]:
        """By the new roster that votes are being asked for: they give it none."""
        return self.ballots.proposal.put_off if self.is_on and self.ballots.proposal is not None else set()

    def puts_off(self, peers: Collection[PeerId]) -> bool:
        """Whether the roster that is proposed puts off one of these."""
        return not self._put_off.isdisjoint(peers)

    def is_without(self, shown: Iterable[Contribution]) -> bool:
        """Whether the roster that is proposed puts off one who has these, or does without its work."""
        asked = self.ballots.proposal
        without = asked.left_without if asked is not None else set()
        return any(one.peer_id in self._put_off or (one.work and one.peer_id in without) for one in shown)

    def needs(self, peer: PeerId) -> bool:
        """Whether the roster that is proposed puts off a member without whose vote it cannot be certified."""
        put_off, voters = self._put_off, self.ballots.voters
        return peer in put_off and not self.facts.election.is_quorum({*voters} - put_off, voters)

    def _ask(self, proposal: Proposal, now: float) -> Instructions:
        """Ask everyone for their votes, oneself first. Members that have none get it too: what comes next names what is
        in it."""
        self.ballots.ask(proposal)
        self.patience.wait(2, now=now)
        self._votes_are_late = False
        # Whoever still fetches the bytes has as long as whoever still sends its parts, but once: in later views it
        # fetches on. The longer a step has failed, the longer would a member hold it up that never votes.
        if proposal.is_new_result:
            self.patience.due = now + max(2 * self.facts.phase_s, self.reduction.arrivals.allowed_s(now=now))
        others = tuple(sorted({*self.ballots.voters, *self.facts.members} - {self.me}))
        out: Instructions = [SendBallot(others, proposal)] if others else []
        if proposal.result is not None:
            out += self.reduction.fetch_missing(proposal.result, now=now)
        vote = self.voter.cast(proposal)
        if vote is not None and self.me in self.ballots.voters:
            self.ballots.votes[self.me] = vote
        return out + self.count(now)

    def count(self, now: float, *, late: bool = False) -> Instructions:
        """Go on to the next phase if enough have voted."""
        asked, certificate = self.ballots.proposal, self.ballots.certificate()
        if asked is None or certificate is None or self.reduction.is_over:
            return []
        if asked.roster is not None:
            roster = replace(asked.roster, certificate=certificate)
            self.ballots.ask_nothing()
            return self._send(roster) + self.follow(roster, now)
        if asked.result is not None:
            # Nor is there a vote to come of who has turned to a later view.
            ahead = {peer for peer, view in self.views_of.items() if view > self.view}
            away = {*self.ballots.votes, *self.gone, *self.late, *left_by(asked.result.roster), *ahead, self.me}
            # Who is known to be late fetches the bytes when it can: others need not stand still for that; nor, once
            # most members have them, for who was left out of this round.
            slow = {*self.facts.late}
            if 2 * len({*self.facts.members} & self.ballots.votes.keys()) > len(self.facts.members):
                slow |= {one.peer_id for one in asked.result.roster.left_out}
            living = {*self.facts.members} & {*self.ballots.voters} - away - slow
            if (living and not late) or self.reduction.parts.lacking(asked.result):
                return []  # the bytes should be with everyone who lives before they are needed
            self.voter.remember_result(replace(asked.result, certificate=certificate))
            return self._ask(Proposal.of_commit(certificate), now)
        return self.accept(replace(self.voter.likely[asked.view], certificate=certificate), now)

    def _ask_again(self, now: float) -> Instructions:
        """Votes are late: go on with a quorum, or ask again whoever has not voted, for ever."""
        proposal = self.ballots.proposal
        assert proposal is not None
        self.patience.wait(2, now=now)
        out = self.count(now, late=True)
        if out or self.ballots.proposal is not proposal:
            return out
        self._votes_are_late = True
        if proposal.result is not None:
            out = self.reduction.fetch_missing(proposal.result, now=now)
        return out + self._ask_once_more(self.ballots.voters)

    def _ask_once_more(self, voters: Iterable[PeerId]) -> Instructions:
        """Those of them who have not voted."""
        proposal = self.ballots.proposal
        silent = tuple(peer for peer in voters if peer != self.me and peer not in self.ballots.votes)
        before = self.ballots.before if proposal is not None and proposal.phase == "commit" else None
        return [SendBallot(silent, asked) for asked in (before, proposal) if asked is not None and silent]

    def ask_who_is_back(self, peer: PeerId) -> Instructions:
        """A member seemed gone: what it was asked meanwhile was given up."""
        if not self.is_on or self.reduction.is_over:
            return []
        if self.ballots.proposal is not None:
            return self._ask_once_more({peer}.intersection(self.ballots.voters))
        return [] if self.has_roster or peer in self.committed else self._send_close((peer,))

    # -- who is left out ----------------------------------------------------------------------------------

    def missing(
        self, reducer: PeerId, missing: Collection[PeerId], lacks: Mapping[PeerId, Lack], *, now: float
    ) -> Instructions:
        """A reducer says whose parts it lacks, and whose it waits for no longer.

        A contribution is left out if some reducer lacks its parts and enough say that they wait no longer: their words
        allow it, and nothing else of what is certified changes, so the view goes on. Otherwise the reducer is relieved,
        once this leader has waited for it.
        """
        roster = self.reduction.roster
        if roster is None or not self.has_roster or self.ballots.proposal is not None:
            return []
        self._missed.update(missing)
        self._awaits[reducer] = now, len(missing)
        for peer, lack in lacks.items():
            self._lacks.setdefault(peer, {})[lack.reducer] = lack
        found = {}
        for peer in self._missed & self._lacks.keys():
            said = self._lacks[peer]
            if peer == self.me and peer not in said and roster.num_lacks(peer) < 2:
                continue  # of two, the other's word alone would undo each step: here it is relieved
            if roster.contribution_of(peer) is not None and (peer in said or len(said) >= roster.num_lacks(peer)):
                found[peer] = (said[peer],) if peer in said else tuple(said.values())
        self.leave_out |= found
        smaller = roster.without(found)
        if smaller is roster:
            return []
        changed = self._signed(replace(smaller, revision=roster.revision + 1), roster.reducers)
        return self._send(changed) + self.follow(changed, now)

    # -- the result ---------------------------------------------------------------------------------------

    def conclude(self, now: float) -> Instructions:
        """Ask for votes on the result once every part of the own roster is reduced."""
        roster, parts = self.reduction.roster, self.reduction.parts
        if roster is None or not self.has_roster or self.reduction.is_over:
            return []
        if self.ballots.proposal is not None:
            return []
        if unreduced := parts.unreduced(roster):
            behind = {roster.combiner_of(part) for part in unreduced}
            combiners = {roster.combiner_of(part) for part in range(roster.num_parts)}
            if self._most_reduced_at is None and 2 * len(behind) < len(combiners):
                self._most_reduced_at = now
            return []
        unsigned = Result(roster, tuple(parts.reduced[part] for part in range(roster.num_parts)), self.me)
        proof = Proof((), roster.certificate)
        return self._ask(Proposal.of_result(self._signed_result(unsigned), self.view, proof), now)

    @property
    def relief_due(self) -> float | None:
        """When the last reducers are waited for no longer, however their parts come: as the last contributors are."""
        at = self._most_reduced_at
        is_waiting = self.has_roster and self.ballots.proposal is None and not self.reduction.is_over
        return at + self.reduction.arrivals.allowed_s(now=at) if at is not None and is_waiting else None

    def relieve_slow_reducers(self, now: float) -> Instructions:
        """Those who wait themselves for the parts of a few have as long once more, by when they have those or do
        without; if not, it is their own line that is slow."""
        roster, at = self.reduction.roster, self._most_reduced_at
        assert roster is not None
        assert at is not None
        self._most_reduced_at = None
        for part in self.reduction.parts.unreduced(roster):
            reducer = roster.combiner_of(part)
            said_at, num_lacked = self._awaits.get(reducer, (-math.inf, 0))
            waits = now <= said_at + 2 * self.facts.phase_s
            waits = waits and num_lacked > 0 and self._are_few(num_lacked, reducer, roster)
            if waits and self._spared.setdefault(reducer, now) == now:
                self._most_reduced_at = now
            elif reducer != self.me:
                self.late[reducer] = f"part {part} not reduced {now - at:.1f} s after most others' parts"
        return self.reassign(now)

    def reassign(self, now: float) -> Instructions:
        """Give parts whose reducer is away to others."""
        roster = self.reduction.roster
        if roster is None or not self.has_roster or self.ballots.proposal is not None:
            return []
        away = {*self.gone, *self.late}
        if not any(away.intersection(roster.reducers_of(part)) for part in self.reduction.parts.unreduced(roster)):
            return []
        changed = self._signed(replace(roster, revision=roster.revision + 1), roster.reducers)
        if changed.reducers == roster.reducers:  # nobody else is there
            return []
        return self._send(changed) + self.follow(changed, now)

    def _relieve_late_reducers(self, now: float) -> Instructions:
        roster, parts = self.reduction.roster, self.reduction.parts
        assert roster is not None
        self.patience.wait(2, now=now)
        self._num_reliefs += 1
        missing = parts.unreduced(roster)
        for part in missing:
            for reducer in self._holding_up(part, roster):
                self.late[reducer] = f"part {part} not reduced within {2 * self.facts.phase_s:.1f} s"
        out = self.reassign(now)
        if out or any(part in missing for part, _ in parts.aggregating) or self._num_reliefs < MAX_RELIEFS:
            return out
        for part in missing:  # nobody can bring them: the facts are certified and stay
            parts.reduced.setdefault(part, ReducedPart.empty(part))
        return self.conclude(now)

    def _holding_up(self, part: int, roster: Roster) -> set[PeerId]:
        """Which reducers the part waits for, as far as is known here.

        Who has not said that its cohort's share is made; if all have, who combines them; the next time all of them,
        for one may say so and send nothing.
        """
        found = {roster.combiner_of(part)}
        if len(roster.cohorts) > 1 and self._num_reliefs > 1:
            found = {*roster.reducers_of(part)}
        elif len(roster.cohorts) > 1:
            wanted = [number for number, contributors in enumerate(roster.contributors) if contributors]
            unmade = [number for number in wanted if not self.reduction.parts.is_made((part, number))]
            found = {roster.reducer_of(part, number) for number in unmade} or found
        return found - {self.me}

    # -- the deadline -------------------------------------------------------------------------------------

    def is_due(self, now: float) -> Instructions:
        """What is awaited took too long."""
        if self.ballots.proposal is not None:
            return self._ask_again(now)
        if self.has_roster:
            return self._relieve_late_reducers(now)
        self.patience.wait(1, now=now)
        missing = self._missing()
        out = self._ask_promises()
        if not self._asked_again and set(missing) - {*self.facts.late}:
            self._asked_again = True
            return out + self._send_close(missing)
        proposed = self.propose(now, late=True)
        if not proposed:  # too few promises: whoever comes back is needed
            self.num_waits += 1
            silent = tuple(peer for peer in self.facts.members if peer != self.me and peer not in self.committed)
            out += self._send_close(silent)
        return out + proposed
