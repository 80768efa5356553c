"""This is where one member decides its part in one averaging round; `peer.round_driver` carries the decisions out.

Led by the leader of the view: close and commit, votes on the roster, reduce, votes on the result, votes to commit to
it. A stimulus (a message, a death, a deadline) returns the instructions it leads to. Nothing here waits, encodes or
sends. What may be proposed, and what is certain, is decided by `swarm.core.voting`: a round has one outcome whoever is
suspected, cut off or late. Without a quorum it pauses, and goes on where it was when there is one again.

Deadlines are multiples of `phase_s`: a reducer waits 1 for parts; a leader 2 before it asks once more, 3 before it
goes on without a member, 2 before it relieves a reducer; others wait 4 before they turn to the next leader, and longer
each time, so that views do not run away from a stage that is cut in two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from swarm.core.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round_ballots import Ballots, Proposal
from swarm.core.round_facts import MAX_VIEWS_AHEAD, EquivocationError, RoundFacts, is_of
from swarm.core.round_instructions import (
    Accuse,
    AggregatePart,
    AskPromise,
    FetchPart,
    Finish,
    Instruction,
    Instructions,
    MakeContribution,
    SendBallot,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
    SendVote,
)
from swarm.core.round_parts import RoundParts
from swarm.core.round_proposal import fresh_roster, left_by, with_reducers
from swarm.core.round_voter import RoundVoter
from swarm.core.voting import Promise, Proof, Reconfiguration, Sign, Verify, Vote

__all__ = [
    "Accuse",
    "AggregatePart",
    "AskPromise",
    "AveragingRound",
    "FetchPart",
    "Finish",
    "Instruction",
    "Instructions",
    "MakeContribution",
    "RoundFacts",
    "SendBallot",
    "SendClose",
    "SendCommit",
    "SendPart",
    "SendReduced",
    "SendResult",
    "SendRoster",
    "SendVote",
]

MAX_RELIEFS = 3
"""Times parts are given to other reducers before those that nobody can bring are left empty."""
LONGEST_PATIENCE = 8
"""A leader that follows so many that were given up is waited for so many times as long as the first."""


@dataclass
class AveragingRound:
    """One member's side of round `facts.step`.

    `sign` makes the own signature, `verify(peer, data, signature)` checks another's; both are pure. A member that may
    have voted in this round before its process was started again does not vote (`votes` is False).
    """

    facts: RoundFacts
    me: PeerId
    sign: Sign
    verify: Verify
    view: int = 0
    """Whose leader this peer reports to. It may be given up for a lower one until something is promised."""
    votes: bool = True
    roster: Roster | None = None
    """The certified roster that is followed."""
    result: Result | None = None
    """The outcome."""
    finished: bool = False
    _promised: int = -1  # highest view entered: nothing of a lower one is followed
    _closing: bool = False  # a leader has closed the step
    _started: bool = False  # this peer leads `view` and has asked for commitments
    _asked_again: bool = False
    _reason: str = ""
    _joins: tuple[PeerId, ...] = ()
    _neighbours: tuple[PeerId, ...] = ()
    _contribution: Contribution | None = None
    _contribution_asked: bool = False
    _commit_owed: bool = False
    _committed: dict[PeerId, Contribution] = field(default_factory=dict)  # to `view`, which this peer leads
    _seen: dict[PeerId, Contribution] = field(default_factory=dict)  # checked; in any view
    _voter: RoundVoter = field(init=False)
    _ballots: Ballots = field(init=False)  # of `view`, if this peer leads it
    _owed: tuple[PeerId, Proposal] | None = None  # a result to vote for once its bytes are here
    _gone: dict[PeerId, str] = field(default_factory=dict)  # unreachable and not heard of since
    _late: dict[PeerId, str] = field(default_factory=dict)  # silent in this view
    _parts: RoundParts = field(default_factory=RoundParts)
    _num_reliefs: int = 0
    _num_turns: int = 0  # leaders given up since anything was heard
    _due: float | None = None  # when this peer acts as leader, or gives up on its leader
    _parts_due: float | None = None  # when this peer stops waiting for parts to reduce

    def __post_init__(self) -> None:
        assert self.me in self.facts.members
        assert set(self.facts.members) <= set(self.facts.leaders)
        assert set(self.facts.members) <= set(self.facts.voters)
        self._voter = RoundVoter(self.facts, self.me, self.sign, self.verify, self.votes, self._knows)
        self._ballots = Ballots(self.facts.election, self.verify, self.view)
        while self.leader not in self.facts.members:
            self.view += 1

    @property
    def leader(self) -> PeerId:
        return self.facts.leader_of(self.view)

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def is_closing(self) -> bool:
        """A leader has closed the step: the round has begun."""
        return self._closing

    @property
    def left(self) -> bool:
        """The roster that is followed puts this peer off: it is no member of the next version."""
        roster = self.result.roster if self.result is not None else self.roster
        return roster is not None and self.me in left_by(roster)

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.finished:
            return None
        return min((time for time in (self._due, self._parts_due) if time is not None), default=None)

    # -- close and commit ---------------------------------------------------------------------------------

    def close(
        self, *, reason: str, joins: Iterable[PeerId], neighbours: Iterable[PeerId] = (), view: int, now: float
    ) -> Instructions:
        """The leader of `view` (this peer) closes the step."""
        assert self.facts.leader_of(view) == self.me
        assert view >= self.view
        if self.result is not None or (self._started and view == self.view):
            return []
        self._joins, self._neighbours = tuple(sorted(set(joins))), tuple(sorted(set(neighbours)))
        return self._begin(view, reason, now)

    def _begin(self, view: int, reason: str, now: float) -> Instructions:
        self._enter(view)
        self._reason, self._started, self._asked_again = reason, True, False
        self._ballots = Ballots(self.facts.election, self.verify, view, self._voter.changed)
        self._due = now + 2 * self.facts.phase_s
        # Whoever was thought gone is asked too: a broken stream must not make a member leave.
        self._gone.clear()
        promise = self._voter.promise(self.view)
        if promise is not None and self.me in self._ballots.voters:
            self._ballots.promised(promise)
        others = tuple(peer for peer in self.facts.members if peer != self.me)
        out: Instructions = [SendClose(others, view, reason)] if others else []
        return out + self._ask_promises() + self._commit(now)

    def _ask_promises(self) -> Instructions:
        if self.view == self.facts.first_view:
            return []
        silent = tuple(peer for peer in self._outsiders() if peer not in self._ballots.promises)
        return [AskPromise(silent, self.view, self._voter.changed)] if silent else []

    def _outsiders(self) -> tuple[PeerId, ...]:
        """Voters that are no members."""
        return tuple(peer for peer in self._ballots.voters if peer not in self.facts.members)

    def on_close(self, sender: PeerId, view: int, *, now: float) -> Instructions:
        """The view's leader wants this member's contribution."""
        self.facts.check_view(sender, view)
        self._check_not_far(sender, view)
        self._gone.pop(sender, None)
        if self.result is not None:
            return [SendResult((sender,), self.result)]
        if view < self._promised:
            return self._news_for(sender, view)
        waited_for = self._due if view == self._promised else None
        self._enter(view)
        self._commit_owed = True
        if waited_for is None:
            self._num_turns = 0
            return self._commit(now)
        out = self._commit(now)
        self._due = waited_for  # a leader that asks once more, for what it cannot use, buys no time
        return out

    def contributed(self, contribution: Contribution, *, now: float) -> Instructions:
        """The own commitment is made. It is made once, whatever view asks for it."""
        assert self._contribution is None
        self._contribution = contribution
        self._seen[self.me] = contribution
        return self._commit(now)

    def on_commit(
        self,
        sender: PeerId,
        view: int,
        contribution: Contribution,
        promise: Promise | None,
        roster: Roster | None,
        result: Result | None,
        *,
        now: float,
    ) -> Instructions:
        """A member's commitment reaches the leader, with its promise and what it knows to be certified.

        Sent unasked, it tells this peer that the sender found all leaders before it gone.
        """
        facts = self.facts
        facts.check_member(sender)
        self._check_not_far(sender, view)
        if facts.leader_of(view) != self.me:
            raise RemoteError("protocol", f"commitment to view {view}, which is not led here", sender)
        if contribution.peer_id != sender or (promise is not None and promise.voter != sender):
            raise RemoteError("protocol", f"contribution of {contribution.peer_id} sent by {sender}", sender)
        if not self._knows(contribution):
            facts.check_contribution(contribution, self.verify)
        if self._seen.get(sender, contribution) != contribution:
            raise EquivocationError(self._seen[sender], contribution)
        if sender not in facts.election.voters_in(view, self._voter.changed):
            promise = None  # the run key has left it out, of which it may not know: it contributes all the same
        if promise is not None:
            facts.election.check_promise(promise, view, self.verify, self._voter.changed)
        out = self._learn(roster, result, now)
        self._seen[sender] = contribution
        self._gone.pop(sender, None)
        if self.result is not None:
            return [*out, SendResult((sender,), self.result)]
        if view < self._promised:
            return out + self._news_for(sender, view)
        if view > self.view or not self._started:
            out = out + self._begin(view, self._reason or "the leader is gone", now)
        if promise is not None:
            self._ballots.promised(promise)
        self._committed[sender] = contribution
        self._late.pop(sender, None)
        proposal = self._ballots.proposal
        if proposal is not None:  # it came after the proposal: it votes all the same
            return [*out, SendBallot((sender,), proposal)]
        if self._leads_roster():
            return out + self._news_for(sender, view)
        return out + self._propose(now)

    def on_promise(
        self, voter: PeerId, promise: Promise, roster: Roster | None, result: Result | None, *, now: float
    ) -> Instructions:
        """A voter outside the stage promises, and shows what it knows to be certified."""
        if promise.voter != voter:
            raise RemoteError("protocol", f"promise of {promise.voter} sent by {voter}", voter)
        out = self._learn(roster, result, now)
        if self.result is not None or not self._started or promise.view != self.view:
            return out
        self._ballots.promised(promise)
        return out + self._propose(now)

    def _learn(self, roster: Roster | None, result: Result | None, now: float) -> Instructions:
        """Take what is certified from whoever shows it. Raises RemoteError if it is not genuine."""
        self._voter.learn(roster, result)
        shown = self._voter.roster
        out = self._see(shown.contributions if shown is not None else ())
        outcome = self._voter.outcome
        return out + (self._accept(outcome, now) if outcome is not None and self.result is None else [])

    def _see(self, contributions: Iterable[Contribution]) -> Instructions:
        """They were checked: they need not be again. Whoever is known to have signed another is accused."""
        out: Instructions = []
        for made in contributions:
            known = self._seen.setdefault(made.peer_id, made)
            if known != made and known.signed_bytes() != made.signed_bytes():
                out.append(Accuse(known, made))
        return out

    def _commit(self, now: float) -> Instructions:
        if self._contribution is None:
            if self._contribution_asked:
                return []
            self._contribution_asked = True
            return [MakeContribution()]
        if self.result is not None:
            return []
        if self.leads and self._started:
            self._committed[self.me] = self._contribution
            return self._propose(now)
        if self._commit_owed:
            self._commit_owed = False
            self._wait_for_leader(now)
            promise = self._voter.promise(self.view)
            shown = (self._voter.roster, self._voter.result)
            return [SendCommit(self.leader, self.view, self._contribution, promise, *shown)]
        return []

    def _news_for(self, sender: PeerId, view: int) -> Instructions:
        """What the sender of a message of `view` has missed, if it matters."""
        if sender == self.me:
            return []
        if self.result is not None:
            return [SendResult((sender,), self.result)]
        if self.roster is not None and self.roster.view >= view:
            return [SendRoster((sender,), self.roster)]
        return []

    def reconfigure(self, changed: Reconfiguration, *, now: float) -> Instructions:
        """The run key has named other voters for this round. Raises RemoteError if it is not genuine."""
        if self.result is not None or self._voter.changed == changed:
            return []
        self._voter.reconfigure(changed)
        if changed.first_view <= self._promised:
            return self._begin_own_view(now) if self.me in changed.voters else []
        if self.facts.leader_of(changed.first_view) == self.me:
            return self._begin(changed.first_view, self._reason or "the round was reconfigured", now)
        self._enter(changed.first_view)
        self._commit_owed = True
        return self._commit(now)

    def _begin_own_view(self, now: float) -> Instructions:
        view = self.view + 1
        while self.facts.leader_of(view) != self.me:
            view += 1
        return self._begin(view, self._reason, now)

    # -- votes --------------------------------------------------------------------------------------------

    def _missing(self) -> tuple[PeerId, ...]:
        heard = {self.me, *self._committed, *self._gone}
        return tuple(peer for peer in self.facts.members if peer not in heard)

    def _asks(self, phase: str) -> bool:
        """Whether this peer, as leader of its view, is asking for votes of this phase."""
        asked = self._ballots.proposal
        return self._started and asked is not None and asked.phase == phase

    def _propose(self, now: float, *, late: bool = False) -> Instructions:
        if not self._started or self._contribution is None or self._ballots.proposal is not None:
            return []
        missing = self._missing()
        if missing and not late:
            return []
        led = self._voter.rosters.get(self.view)
        if led is not None:  # certified before this process was started again: the view has no other
            to = self._audience(led)
            sent: Instructions = [SendRoster(to, led)] if to else []
            return sent + self._follow(led, now)
        proof = self._ballots.proof(self._voter.certificates()) if self.view != self.facts.first_view else None
        if proof is None and self.view != self.facts.first_view:
            return []  # promises of a quorum are awaited
        bound = proof.certificate if proof is not None else None
        for peer in missing:
            self._late[peer] = f"no commitment within {3 * self.facts.phase_s:.1f} s"
        if bound is not None and bound.phase == "result":
            assert proof is not None
            likely = self._voter.likely[bound.view]
            unsigned = replace(likely, leader=self.me, certificate=None)
            taken = replace(unsigned, signature=self.sign(unsigned.signed_bytes()))
            return self._ask(Proposal.of_result(taken, self.view, proof), now)
        earlier = self._voter.roster
        if bound is not None:
            # It may already have been acted on: parts that moved need not move again.
            earlier = self._voter.rosters[bound.view]
            proposal = replace(earlier, view=self.view, revision=0, leader=self.me, certificate=None)
        else:
            proposal = fresh_roster(
                self.facts,
                view=self.view,
                leader=self.me,
                committed=self._committed,
                silent={**self._late, **self._gone},
                joins=self._joins,
                neighbours=self._neighbours,
                reason=self._reason,
            )
        signed = self._signed(self._with_reducers(proposal, earlier.reducers if earlier is not None else ()))
        return self._ask(Proposal.of_roster(signed, proof or Proof()), now)

    def _with_reducers(self, roster: Roster, held: tuple[PeerId, ...]) -> Roster:
        stay = tuple(peer for peer in self.facts.members if peer not in left_by(roster))
        away = {*self._gone, *self._late} - {self.me}
        live = tuple(peer for peer in stay if peer not in away) or stay
        done = {part for part, reduced in self._parts.reduced.items() if is_of(reduced, roster)}
        return with_reducers(roster, held, live, num_parts=self.facts.num_parts, done=done)

    def _signed(self, roster: Roster) -> Roster:
        return replace(roster, signature=self.sign(roster.signed_bytes()))

    def _ask(self, proposal: Proposal, now: float) -> Instructions:
        """Ask everyone for their votes, oneself first."""
        self._ballots.ask(proposal)
        self._due = now + 2 * self.facts.phase_s
        others = tuple(peer for peer in self._ballots.voters if peer != self.me)
        out: Instructions = [SendBallot(others, proposal)] if others else []
        if proposal.result is not None:
            out += self._fetch_missing(proposal.result)
        vote = self._voter.cast(proposal)
        if vote is not None and self.me in self._ballots.voters:
            self._ballots.votes[self.me] = vote
        return out + self._count(now)

    def on_ballot(self, sender: PeerId, proposal: Proposal, *, now: float) -> Instructions:
        """A leader asks for this member's vote."""
        self.facts.check_view(sender, proposal.view)
        self._check_not_far(sender, proposal.view)
        self._voter.check(proposal)
        roster = proposal.roster or (proposal.result.roster if proposal.result is not None else None)
        accused = self._see(roster.contributions if roster is not None else ())
        self._gone.pop(sender, None)
        if self.result is not None or proposal.view < self._promised:
            return accused + self._news_for(sender, proposal.view)
        self._enter(proposal.view)
        out: Instructions = []
        owes = False
        if proposal.result is not None:
            self._voter.remember(proposal.result.roster)
            owes = bool(self._parts.lacking(proposal.result))
            out = self._fetch_missing(proposal.result, but_coming=self._owed is None)
        if owes:  # whoever votes for a result has its bytes, so that they outlive the leader
            self._owed = (sender, proposal)
        else:
            out = self._cast(sender, proposal)
        # A leader that asks and asks for what it cannot have must not hold up the round.
        if out or owes or not self._voter.votes or self._due is None:
            self._num_turns = 0
            self._wait_for_leader(now)
        return accused + out

    def _cast(self, leader: PeerId, proposal: Proposal) -> Instructions:
        self._owed = None
        vote = self._voter.cast(proposal)
        return [SendVote(leader, proposal, vote)] if vote is not None else []

    def on_vote(self, voter: PeerId, view: int, phase: str, value: bytes, vote: Vote, *, now: float) -> Instructions:
        """A vote reaches the leader."""
        asked = self._ballots.proposal
        if vote.voter != voter:
            raise RemoteError("protocol", f"vote of {vote.voter} sent by {voter}", voter)
        if not self._started or view != self.view or asked is None or asked.phase != phase:
            return []
        if not self._ballots.count(vote, asked.phase, view, value):
            return []
        self._gone.pop(voter, None)
        return self._count(now)

    def _count(self, now: float, *, late: bool = False) -> Instructions:
        """Go on to the next phase if enough have voted."""
        asked, certificate = self._ballots.proposal, self._ballots.certificate()
        if asked is None or certificate is None or self.result is not None:
            return []
        if asked.roster is not None:
            roster = replace(asked.roster, certificate=certificate)
            self._ballots.ask_nothing()
            to = self._audience(roster)
            out: Instructions = [SendRoster(to, roster)] if to else []
            return out + self._follow(roster, now)
        if asked.result is not None:
            silent = {*self.facts.members} - {
                self.me,
                *self._ballots.votes,
                *self._gone,
                *self._late,
                *left_by(asked.result.roster),
            }
            if (silent and not late) or self._parts.lacking(asked.result):
                return []  # the bytes should be with everyone who lives before they are needed
            self._voter.remember_result(replace(asked.result, certificate=certificate))
            return self._ask(Proposal.of_commit(certificate), now)
        return self._accept(replace(self._voter.likely[asked.view], certificate=certificate), now)

    def wants(self, asked: AskPromise | SendBallot) -> bool:
        """Whether an answer would still be counted."""
        if self.result is not None or not self._started:
            return False
        if isinstance(asked, AskPromise):
            return asked.view == self.view and self._ballots.proposal is None
        return self._ballots.proposal is not None and asked.proposal.view == self.view

    # -- roster -------------------------------------------------------------------------------------------

    def on_roster(self, sender: PeerId, roster: Roster, *, now: float) -> Instructions:
        """A certified roster, from its leader or from whoever has it: the highest (view, revision) is followed."""
        self.facts.check_roster(roster, self.verify, certified=True, known=self._knows)
        self._check_not_far(roster.leader, roster.view)
        self._gone.pop(sender, None)
        if self.result is not None or roster.view < self._promised:
            self._voter.remember(roster)
            return self._news_for(sender, roster.view) if sender == roster.leader else []
        held = self.roster
        if held is not None and roster.rank <= held.rank:
            if roster.rank == held.rank and roster.signed_value() != held.signed_value():
                raise RemoteError(
                    "equivocation", f"two rosters of view {roster.view} of {roster.leader}", roster.leader
                )
            return []
        self._enter(roster.view)
        self._num_turns = 0
        return self._follow(roster, now)

    def _follow(self, roster: Roster, now: float) -> Instructions:
        earlier = self.roster
        self.roster = roster
        self._closing = True
        self._voter.remember(roster)
        accused = self._see(roster.contributions)
        if earlier is not None and earlier.facts_digest() != roster.facts_digest():
            self._parts.keep_what_fits(earlier, roster)
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
                self._parts.received.setdefault(part, set()).add(self.me)
            known = self._parts.aggregated.get(part) or self._parts.reduced.get(part)
            if known is None:
                out += self._aggregate_if_complete(part)
            else:  # done before, here or by a reducer that is relieved; who leads now may not have it
                self._parts.reduced.setdefault(part, known)
                if not self.leads and (new_leader or not stays):
                    out.append(SendReduced((roster.leader,), known))
        self._parts_due = now + self.facts.phase_s if self.me in roster.reducers else None
        self._wait_for_leader(now)
        self._parts.accept_offers(roster)
        return accused + out + self._conclude(now)

    def _own_contribution(self, roster: Roster) -> Contribution | None:
        """The own contribution, if it is on the roster and the bytes it commits to are here."""
        made = roster.contribution_of(self.me)
        return made if made is not None and made == self._contribution else None

    # -- reduce -------------------------------------------------------------------------------------------

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        """Digest that `sender` committed to for `part`. Raises RemoteError if its part is not wanted."""
        contribution = self.roster.contribution_of(sender) if self.roster is not None else None
        if contribution is None or not 0 <= part < len(contribution.part_digests):
            raise RemoteError("protocol", f"part {part} of {sender} is not on the roster", sender)
        return contribution.part_digests[part]

    def roster_of(self, reduced: ReducedPart) -> Roster | None:
        """The certified roster that a part was made under; None if none that is known here fits."""
        if reduced.is_empty or not 0 <= reduced.part < self.facts.num_parts:
            return None
        outcome = self.result.roster if self.result is not None else None
        known = (self.roster, outcome, *self._voter.rosters.values())
        return next((roster for roster in known if roster is not None and is_of(reduced, roster)), None)

    def on_part(self, sender: PeerId, part: int, *, now: float) -> Instructions:
        """A contributor's part is here and matches its committed digest."""
        self.expected_digest(part, sender)
        self._gone.pop(sender, None)
        self._parts.received.setdefault(part, set()).add(sender)
        return self._aggregate_if_complete(part)

    def on_bad_part(self, sender: PeerId, part: int, reason: str, *, now: float) -> Instructions:
        """A contributor's part is here and matches its committed digest, but holds nonsense: it is left out."""
        self.expected_digest(part, sender)
        self._parts.refused.setdefault(part, {})[sender] = reason
        return self._aggregate_if_complete(part)

    def _aggregate_if_complete(self, part: int, *, late: bool = False) -> Instructions:
        roster = self.roster
        if roster is None or self.result is not None or self.me not in roster.reducers[part : part + 1]:
            return []
        contributors = self._parts.begin(part, roster, self._gone, late=late)
        return (
            [AggregatePart(part, contributors, self._parts.excluded(part, contributors, roster))]
            if contributors
            else []
        )

    def aggregated(self, reduced: ReducedPart, *, now: float) -> Instructions:
        """The own part is aggregated and encoded."""
        part, roster = reduced.part, self.roster
        if not self._parts.done(reduced, roster):
            return self._aggregate_if_complete(part)
        assert roster is not None
        if self.result is not None or part in self._parts.reduced or roster.reducers[part] != self.me:
            return []
        to = self._audience(roster)
        out: Instructions = [SendReduced(to, reduced)] if to else []
        return out + self._take_reduced(reduced, now)

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> Instructions:
        """A reducer's part is here; its bytes match its digest."""
        self.facts.check_member(sender)
        roster = self.roster
        if roster is None or not 0 <= reduced.part < self.facts.num_parts:
            raise RemoteError("protocol", f"reduced part {reduced.part} is not of this round, or too early", sender)
        if not reduced.contributors or not set(reduced.contributors) <= set(self.facts.members):
            raise RemoteError("protocol", f"reduced part {reduced.part} is made of no members' contributions", sender)
        self._parts.offer(sender, reduced)
        self._gone.pop(sender, None)
        if self.result is not None:
            return self._finish_if_complete()
        if self._owed is not None or self._asks("result"):
            return self._bytes_came(now)
        # Of a reducer relieved of the part, or of another view's facts: the bytes may still be chosen.
        if (
            reduced.part >= len(roster.reducers)
            or roster.reducers[reduced.part] != sender
            or not is_of(reduced, roster)
        ):
            return []
        return self._take_reduced(reduced, now)

    def _take_reduced(self, reduced: ReducedPart, now: float) -> Instructions:
        self._parts.reduced.setdefault(reduced.part, reduced)
        self._wait_for_leader(now)
        return self._conclude(now)

    # -- result -------------------------------------------------------------------------------------------

    def _conclude(self, now: float) -> Instructions:
        roster = self.roster
        if roster is None or not self._leads_roster() or self.result is not None:
            return []
        if self._ballots.proposal is not None or self._parts.unreduced(roster):
            return []
        parts = tuple(self._parts.reduced[part] for part in range(len(roster.reducers)))
        unsigned = Result(roster, parts, self.me)
        result = replace(unsigned, signature=self.sign(unsigned.signed_bytes()))
        return self._ask(Proposal.of_result(result, self.view, Proof((), roster.certificate)), now)

    def _leads_roster(self) -> bool:
        """Whether this peer leads its view and the roster that is followed is of it."""
        return self._started and self.roster is not None and self.roster.view == self.view

    def check_result(self, result: Result) -> None:
        """Raises RemoteError unless the result is this round's outcome."""
        self.facts.check_result(result, self.verify, certified=True, known=self._knows)

    def on_result(self, result: Result, *, now: float) -> Instructions:
        """The round's outcome, from whoever has it."""
        if self.result is not None and self.result.root() == result.root():
            return []
        self.check_result(result)
        if self.result is not None:
            raise RemoteError("fork", f"step {self.facts.step} has two certified outcomes: a third of its voters lie")
        return self._accept(result, now)

    def _accept(self, result: Result, now: float) -> Instructions:
        leads = self._started
        self.result = self._voter.outcome = result
        self._closing = True
        self._owed = None
        self._parts_due = None
        self._due = now + self.facts.phase_s
        away = left_by(result.roster) & set(self._gone)
        to = tuple(peer for peer in self.facts.voters if peer != self.me and peer not in away) if leads else ()
        out: Instructions = [SendResult(to, result)] if to else []
        return out + self._fetch_missing(result) + self._finish_if_complete()

    def _fetch_missing(self, result: Result, *, but_coming: bool = False) -> Instructions:
        """`but_coming`: not what its reducer is sending: a ballot is small, and overtakes the parts on a slow link."""
        followed = self.roster is not None and self.roster.rank == result.roster.rank
        out: Instructions = []
        for reduced in self._parts.lacking(result):
            reducer = result.roster.reducers[reduced.part]
            if but_coming and followed and reducer not in self._gone:
                continue
            others = [peer for peer in self.facts.members if peer != reducer]
            # Whoever seems gone is asked last: it may be back.
            holders = sorted((peer for peer in (reducer, *others) if peer != self.me), key=self._gone.__contains__)
            if holders:
                out.append(FetchPart(reduced.part, reduced.digest, tuple(holders), reduced, result.roster))
        return out

    def part_fetched(self, part: int, digest: bytes, *, now: float) -> Instructions:
        """Bytes of a part of the result were fetched and match."""
        self._parts.held.add((part, digest))
        return self._finish_if_complete() if self.result is not None else self._bytes_came(now)

    def _bytes_came(self, now: float) -> Instructions:
        """A result that is voted on may now have all its bytes here."""
        owed = self._owed
        if owed is not None and owed[1].result is not None and not self._parts.lacking(owed[1].result):
            return self._cast(*owed)
        return self._count(now) if self._asks("result") else []

    def _finish_if_complete(self) -> Instructions:
        if self.result is None or self.finished or self._parts.lacking(self.result):
            return []
        self.finished = True
        return [Finish(self.result)]

    # -- deaths and deadlines -----------------------------------------------------------------------------

    def unreachable(self, peer: PeerId, *, now: float) -> Instructions:
        """A peer is gone: its stream broke or its lease ran out."""
        if self.finished or peer == self.me or peer not in self.facts.members:
            return []
        self._gone.setdefault(peer, "unreachable")
        if self.result is not None:
            return self._fetch_missing(self.result)
        if peer == self.leader:
            return self._next_view(now)
        if self._asks("result"):
            return self._count(now)
        if not self._leads_roster() and (self.roster is None or self.roster.view < self.view):
            return self._propose(now)
        out: Instructions = []
        for part in sorted(self._parts.received):
            out += self._aggregate_if_complete(part)
        return out + self._reassign(now)

    def tick(self, *, now: float) -> Instructions:
        """The deadline passed."""
        if self.deadline is None or now < self.deadline:
            return []
        out: Instructions = []
        if self._parts_due is not None and now >= self._parts_due:
            out += self._aggregate_late(now)
        if self._due is None or now < self._due:
            return out
        if now > self._due + self.facts.phase_s:  # this process stood still: first hear what has come meanwhile
            self._due = now + self.facts.phase_s
            return out
        if self.result is not None:
            self._due = now + self.facts.phase_s
            return out + self._fetch_missing(self.result)
        if not (self.leads and self._started):
            return out + self._next_view(now)
        if self._ballots.proposal is not None:
            return out + self._ask_again(now)
        if self._leads_roster():
            return out + self._relieve_late_reducers(now)
        self._due = now + self.facts.phase_s
        missing = self._missing()
        out += self._ask_promises()
        if missing and not self._asked_again:
            self._asked_again = True
            return [*out, SendClose(missing, self.view, self._reason)]
        proposed = self._propose(now, late=True)
        if not proposed:  # too few promises: whoever comes back is needed
            silent = tuple(peer for peer in self.facts.members if peer != self.me and peer not in self._committed)
            out += [SendClose(silent, self.view, self._reason)] if silent else []
        return out + proposed

    def _ask_again(self, now: float) -> Instructions:
        """Votes are late: go on with a quorum, or ask again whoever has not voted, for ever."""
        proposal = self._ballots.proposal
        assert proposal is not None
        self._due = now + 2 * self.facts.phase_s
        out = self._count(now, late=True)
        if out or self._ballots.proposal is not proposal:
            return out
        if proposal.result is not None:
            out = self._fetch_missing(proposal.result)
        silent = tuple(peer for peer in self._ballots.voters if peer != self.me and peer not in self._ballots.votes)
        before = self._ballots.before if proposal.phase == "commit" else None
        again = [SendBallot(silent, asked) for asked in (before, proposal) if asked is not None and silent]
        return [*out, *again]

    def _aggregate_late(self, now: float) -> Instructions:
        """Parts that are still missing are left out. A part that nobody has sent yet is waited for."""
        self._parts_due = None
        out: Instructions = []
        assert self.roster is not None
        for part, reducer in enumerate(self.roster.reducers):
            if reducer == self.me:
                out += self._aggregate_if_complete(part, late=True)
                if part not in self._parts.aggregating and part not in self._parts.reduced:
                    self._parts_due = now + self.facts.phase_s
        return out

    def _relieve_late_reducers(self, now: float) -> Instructions:
        roster = self.roster
        assert roster is not None
        self._due = now + 2 * self.facts.phase_s
        self._num_reliefs += 1
        missing = self._parts.unreduced(roster)
        for part in missing:
            if roster.reducers[part] != self.me:
                self._late[roster.reducers[part]] = f"part {part} not reduced within {2 * self.facts.phase_s:.1f} s"
        out = self._reassign(now)
        if out or any(part in self._parts.aggregating for part in missing) or self._num_reliefs < MAX_RELIEFS:
            return out
        for part in missing:  # nobody can bring them: the facts are certified and stay
            self._parts.reduced.setdefault(part, ReducedPart.empty(part))
        return self._conclude(now)

    def _reassign(self, now: float) -> Instructions:
        roster = self.roster
        if roster is None or not self._leads_roster() or self._ballots.proposal is not None:
            return []
        away = {*self._gone, *self._late}
        if not any(roster.reducers[part] in away for part in self._parts.unreduced(roster)):
            return []
        changed = self._signed(self._with_reducers(replace(roster, revision=roster.revision + 1), roster.reducers))
        to = self._audience(changed)
        out: Instructions = [SendRoster(to, changed)] if to else []
        return out + self._follow(changed, now)

    def _next_view(self, now: float) -> Instructions:
        facts, left = self.facts, left_by(self.roster) if self.roster is not None else set()
        others = [peer for peer in facts.members if peer not in left and peer not in self._gone and peer != self.me]
        view = self.view + 1
        # Whoever was put off leads only if nobody else is there.
        while facts.leader_of(view) not in others and (facts.leader_of(view) != self.me or (self.left and others)):
            view += 1
        if not self._closing:  # nothing has been asked yet: only whom to report to changes
            self.view = view
            return []
        self._num_turns += 1
        if facts.leader_of(view) == self.me:
            return self._begin(view, self._reason or "the leader is gone", now)
        self._enter(view)
        self._commit_owed = True  # sent unasked, it tells the new leader that its view has begun
        return self._commit(now)

    def _enter(self, view: int) -> None:
        """Follow nothing of a lower view any more."""
        if view > self._promised:
            self._started = False
            self._committed.clear()
            self._late.clear()
            self._owed = None
            self._num_reliefs = 0
            self._parts.forget_empty()
            self._due = self._parts_due = None
        self.view = self._promised = view
        self._closing = True

    def _wait_for_leader(self, now: float) -> None:
        if self.result is None:
            patience = min(1 + self._num_turns // 2, LONGEST_PATIENCE)
            self._due = now + (2 if self.leads and self._started else 4 * patience) * self.facts.phase_s

    # -- who and what -------------------------------------------------------------------------------------

    def _audience(self, roster: Roster) -> tuple[PeerId, ...]:
        """Everyone else; of those who leave only whoever may be there to hear it."""
        away = left_by(roster) & set(self._gone)
        return tuple(peer for peer in self.facts.members if peer != self.me and peer not in away)

    def _knows(self, made: Contribution) -> bool:
        return self._seen.get(made.peer_id) == made

    def _check_not_far(self, sender: PeerId, view: int) -> None:
        if view > self.view + MAX_VIEWS_AHEAD:
            raise RemoteError("protocol", f"view {view} is far ahead of view {self.view}", sender)
