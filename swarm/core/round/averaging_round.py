"""One member's part in one averaging round, decided; `peer.round.driver` carries the decisions out.

Led by the leader of the view: close and commit, votes on the roster, reduce, votes on the result, votes to commit to
it. A stimulus (a message, a death, a deadline) returns the instructions it leads to. Nothing here waits, encodes or
sends. What may be proposed, and what is certain, is decided by `swarm.core.round.voting`: a round has one outcome
whoever is suspected, cut off or late. Without a quorum it pauses, and goes on where it was when there is one again.

What this member sends and reduces under a certified roster is `swarm.core.round.reduction`; what it does as the leader
of a view, `swarm.core.round.lead`; how long it waits, `swarm.core.round.patience`.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.core.audit.ticket import Verify
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Lack, ReducedPart, Result, Roster
from swarm.core.round.facts import MOST_OWN_TURNS, MOST_VIEWS_AHEAD, EquivocationError, RoundFacts, is_of
from swarm.core.round.instructions import (
    Accuse,
    AggregatePart,
    AnnounceShare,
    AskPromise,
    CombineShares,
    FetchPart,
    Finish,
    Instruction,
    Instructions,
    MakeContribution,
    SayMissing,
    SayThere,
    SendBallot,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
    SendTurned,
    SendVote,
)
from swarm.core.round.lead import RoundLead
from swarm.core.round.parts import RoundParts
from swarm.core.round.patience import Arrivals, Patience, Waits
from swarm.core.round.proposal import left_by
from swarm.core.round.reduction import RoundReduction
from swarm.core.round.voter import MOST_ALONE, NOT_RECONFIGURED, RoundVoter
from swarm.core.round.voting import PHASES, Promise, Proof, Reconfiguration, Sign, Vote

__all__ = [
    "Accuse",
    "AggregatePart",
    "AnnounceShare",
    "AskPromise",
    "AveragingRound",
    "CombineShares",
    "FetchPart",
    "Finish",
    "Instruction",
    "Instructions",
    "MakeContribution",
    "RoundFacts",
    "SayMissing",
    "SayThere",
    "SendBallot",
    "SendClose",
    "SendCommit",
    "SendPart",
    "SendReduced",
    "SendResult",
    "SendRoster",
    "SendTurned",
    "SendVote",
]


AGAIN_PHASES = 0.5
"""So long after its commitment a member makes none to the same view, and tells nobody the same news again: a leader
asks once more after two phases, and what it is answered with may be a thousand times as long as the question."""
MOST_TOLD = 3
"""So many leaders in a round are told that a member is there at most, and voted for only with it: one that shows itself
to some and not to others must not undo all views."""
MOST_REVISIONS = 8
"""So often a leader may give parts of its roster to others, leaving out nobody, and be waited for anew each time."""


@dataclass
class AveragingRound:
    """One member's side of round `facts.step`.

    `sign` makes the own signature, `verify(peer, data, signature)` checks another's; both are pure. A member that may
    have voted in this round before its process was started again does not vote (`votes` is False), but under a
    reconfiguration that begins past the view `signed_under`.
    """

    facts: RoundFacts
    me: PeerId
    sign: Sign
    verify: Verify
    waits: Waits = field(default_factory=Waits)
    view: int = 0
    """Whose leader this peer reports to. It may be given up for a lower one until something is promised."""
    votes: bool = True
    signed_under: int = NOT_RECONFIGURED
    result: Result | None = None
    """The outcome."""
    finished: bool = False
    _promised: int = -1  # highest view entered: nothing of a lower one is followed
    _turn: int = -1  # the view in which the present leader's turn began
    _called: dict[PeerId, int] = field(default_factory=dict)  # later views that their leaders have called to
    _turned: dict[PeerId, int] = field(default_factory=dict)  # the views that others have turned to, as they say
    _views_of: dict[PeerId, int] = field(default_factory=dict)  # and the highest that they are in, as far as is known
    _ahead: dict[PeerId, tuple[int, Contribution | None, Promise | None]] = field(default_factory=dict)
    # What members have committed to later views that this peer leads
    _own_time_view: int = -1  # the last view to which it turned in its own time, or by the run key's word
    _closing: bool = False  # a leader has closed the step
    _contribution_asked: bool = False
    _contributed: bool = False
    _commit_owed: bool = False
    _last_commit: tuple[int, float] = (-1, -math.inf)  # the view of the latest one that was sent, and when
    _seen: dict[PeerId, Contribution] = field(default_factory=dict)  # checked; in any view
    _news: dict[PeerId, tuple[SendResult | SendRoster, float]] = field(default_factory=dict)  # last told to each, when
    _last_asked: tuple[int, int] = (-1, 0)  # view and phase of the latest vote that a leader asked for
    _there: dict[PeerId, Contribution] = field(default_factory=dict)  # of members that others have heard, as leader
    _said_here_in: int = -1  # the last view to whose leader it has said that it is there, asked to vote without itself
    told: dict[PeerId, dict[PeerId, tuple[int, float]]] = field(default_factory=dict)
    """Which leaders were told of which members that they are there: in which view first, and when."""
    _named_by: dict[PeerId, set[PeerId]] = field(default_factory=dict)  # who tells this peer, as leader, of whom
    _owed: tuple[PeerId, Proposal] | None = None  # a result to vote for once its bytes are here
    _owed_since: float = -math.inf
    _bytes_due: float = math.inf  # when it looks whose parts of that come no more
    _gone: dict[PeerId, str] = field(default_factory=dict)  # unreachable and not heard of since
    _blocked_below: int = -1  # the highest view that voters of more than a third of all weight have promised
    _num_led_away: int = 0  # times that one member alone would have turned it from a view that it led
    _num_revisions: int = 0  # of the roster that is followed, those that left out nobody
    _unproved: set[PeerId] = field(default_factory=set)  # who shows no papers for its contribution, as leader
    _named_in_vain: set[PeerId] = field(default_factory=set)  # of those, who showed none though others had heard it
    _voter: RoundVoter = field(init=False)
    _reduction: RoundReduction = field(init=False)
    _patience: Patience = field(init=False)
    _lead: RoundLead = field(init=False)

    def __post_init__(self) -> None:
        facts, me = self.facts, self.me
        assert me in facts.members
        assert set(facts.members) <= set(facts.leaders)
        may_vote = self.votes and me in facts.voters
        self._voter = RoundVoter(facts, me, self.sign, self.verify, may_vote, self._knows, self.signed_under)
        self._reduction = RoundReduction(facts, me, self.sign, self._gone, arrivals=Arrivals(self.waits, facts.phase_s))
        self._patience = Patience(facts.phase_s)
        self._lead = RoundLead(
            facts,
            me,
            self.sign,
            self._voter,
            self._reduction,
            self._patience,
            self._gone,
            self._views_of,
            self._follow,
            self._accept,
        )
        while self.leader not in facts.members:
            self.view += 1

    @property
    def leader(self) -> PeerId:
        return self.facts.leader_of(self.view)

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def changed(self) -> Reconfiguration | None:
        """The reconfiguration under which it signs."""
        return self._voter.changed

    @property
    def given_up(self) -> frozenset[PeerId]:
        """Whose parts this peer itself waited for in vain."""
        return frozenset(self._reduction.given_up)

    @property
    def contribution(self) -> Contribution | None:
        """The own one, once it is made."""
        return self._reduction.contribution

    @property
    def is_closing(self) -> bool:
        """A leader has closed the step: the round has begun."""
        return self._closing

    @property
    def parts(self) -> RoundParts:
        """What is known here of each part."""
        return self._reduction.parts

    @property
    def roster(self) -> Roster | None:
        """The certified roster that is followed."""
        return self._reduction.roster

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
        bytes_due = self._bytes_due if self._owed is not None else None
        times = (self._patience.due, self._reduction.due, self._lead.relief_due, self._votes_from, bytes_due)
        return min((due for due in times if due is not None), default=None)

    @property
    def waits_for(self) -> str:
        """In words, for whoever wonders why it takes so long."""
        if self.result is not None:
            return f"bytes of {len(self.parts.lacking(self.result))} parts of the outcome"
        owed = self._owed[1].result if self._owed is not None else None
        if owed is not None:
            return f"bytes or words of {len(self.parts.unproved(owed))} parts of the result, to vote for it"
        leads = self._lead.waits_for if self._lead.is_on else f"the word of its leader {self.leader[-6:]}"
        return "; ".join(filter(None, (self._reduction.waits_for, leads)))

    # -- close and commit ---------------------------------------------------------------------------------

    def close(
        self,
        *,
        reason: str,
        joins: Iterable[PeerId],
        neighbours: Iterable[PeerId] = (),
        unheard: Iterable[PeerId] = (),
        view: int,
        now: float,
    ) -> Instructions:
        """The leader of `view` (this peer) closes the step; of these it has not heard that they are there."""
        assert self.facts.leader_of(view) == self.me
        assert view >= self.view
        if self.result is not None or (self._lead.is_on and view == self.view):
            return []
        self._lead.joins, self._lead.neighbours = tuple(sorted(set(joins))), tuple(sorted(set(neighbours)))
        self._lead.absent = frozenset(unheard).intersection(self.facts.late)
        return self._begin(view, reason, now)

    def _begin(self, view: int, reason: str, now: float, *, silent: Collection[PeerId] = ()) -> Instructions:
        """`silent`: who was waited for in vain in an earlier view of this turn, and is not once more."""
        self._enter(view)
        # Whoever was thought gone is asked too: a broken stream must not make a member leave.
        self._gone.clear()
        here = {peer: said for peer, said in self._ahead.items() if said[0] == view}
        self._ahead = {peer: said for peer, said in self._ahead.items() if said[0] > view}
        promises = [promise for _, _, promise in here.values() if promise is not None]
        out = self._lead.begin(view, reason, promises, now, silent=silent) + self._commit(now)
        for peer, (_, made, promise) in here.items():
            out += self._committed(peer, made, promise, now)
        for peer, made in self._there.items():
            out += self._committed(peer, made, None, now) if peer not in here else []
        return out

    def _begin_instead(self, view: int, now: float) -> Instructions:
        """`view` is this peer's to lead, after another's."""
        # Whoever was misled to a later one of this peer's own cannot come back.
        latest = view + MOST_OWN_TURNS * len(self.facts.leaders)
        view = max([view, *(ahead for ahead, _, _ in self._ahead.values() if ahead <= latest)])
        return self._begin(view, self._lead.reason or "the leader is gone", now)

    def on_close(self, sender: PeerId, view: int, shown: Proof, *, now: float) -> Instructions:
        """The view's leader wants this member's contribution, and shows who has promised it theirs.

        It is followed to a later view if a third of the members have turned to it, so that its word alone turns nobody:
        but to later ones of its own, while it leads, and those buy no time.
        """
        self.facts.check_view(sender, view)
        self._gone.pop(sender, None)
        if self.result is not None:
            return self._news_for(sender, view, now)
        out = self.reconfigure(shown.reconfiguration, now=now) if shown.reconfiguration is not None else []
        self.facts.check_promises(view, shown, self.verify, self._voter.changed)
        voters = self.facts.election.voters_in(view, self._voter.changed)
        if self.facts.election.is_more_than_liars((promise.voter for promise in shown.promises), voters):
            self._blocked_below = max(self._blocked_below, view)
        is_own = view > self.view and sender == self.leader
        is_own = is_own and view <= self._last_own_view
        # Who begins its own turn anew has not found its leader gone: it takes nobody to views in between.
        turned = {sender, *(promise.voter for promise in shown.promises)}
        self._is_in((sender,), view)
        out += self._follow_others(turned - {sender} if is_own else turned, view, now)
        if view < self._promised:
            return out + self._news_for(sender, view, now)
        if out or (view > self.view and not is_own):
            self._called[sender] = view
            return out
        committed_to, committed_at = self._last_commit
        if view == committed_to and now < committed_at + AGAIN_PHASES * self.facts.phase_s:
            return out
        waited_for = self._patience.due if view == self._promised or is_own else None
        self._enter(view)
        self._commit_owed = True
        if waited_for is None:
            self._patience.heard()
            return self._commit(now)
        out = self._commit(now)
        self._patience.due = waited_for  # a leader that asks once more, for what it cannot use, buys no time
        return out

    @property
    def _last_own_view(self) -> int:
        """Of the present leader's turn: so far it is followed to views of its own."""
        return max(self._turn, self.facts.first_view) + MOST_OWN_TURNS * len(self.facts.leaders)

    def on_turned(self, sender: PeerId, view: int, *, now: float) -> Instructions:
        """A member has turned to a later view in its own time."""
        self.facts.check_member(sender)
        self._gone.pop(sender, None)
        return self._follow_others((sender,), view, now)

    def _follow_others(self, peers: Iterable[PeerId], view: int, now: float) -> Instructions:
        """They have turned to the view: go to the highest that so many have that one of them is honest, so that nobody
        stays behind.

        Where a few are more than a third one of them may lie: its word alone takes this peer no further than once round
        the leaders, for members that are silent for now would not follow for as many views, and turns it from those
        that it leads itself twice in a round.
        """
        if self.result is not None:
            return []
        others = {*peers} - {self.me}
        self._is_in(others, view)
        for peer in others:
            self._turned[peer] = max(view, self._turned.get(peer, view))
        ahead = {view for view in self._turned.values() if view > self._promised}
        views = sorted((view for view in ahead if self._is_near(view)), reverse=True)
        for highest in filter(self._has_company, views):
            if self._is_alone(highest) and highest > self._blocked_below:
                is_far = highest > max(self._promised, self._own_time_view) + len(self.facts.leaders)
                if is_far or (self._lead.is_on and self._num_led_away >= MOST_ALONE):
                    continue  # a lower one may have the company of others
                self._num_led_away += self._lead.is_on
            return self._turn_to(highest, now)
        return self._lead.count(now) if self._lead.asks("result") else []

    def _is_in(self, peers: Iterable[PeerId], view: int) -> None:
        """They vote in no view below this one any more."""
        for peer in peers:
            self._views_of[peer] = max(view, self._views_of.get(peer, view))

    def _has_company(self, view: int) -> bool:
        """Whether one of those in the view, or in a later one, does not lie, of the members that are there; or no lower
        view can end any more."""
        if view <= self._blocked_below:
            return True
        turned = {peer for peer, to in self._turned.items() if to >= view} | ({self.me} if self.view >= view else set())
        there = self.facts.members_in(view, self._voter.changed, gone={*self._gone, *self._lead.unheard()})
        return self.facts.election.is_more_than_liars(turned, there)

    def _is_alone(self, view: int) -> bool:
        """Whether one other member is all its company."""
        return sum(to >= view for to in self._turned.values()) == 1

    def _is_near(self, view: int) -> bool:
        return self.facts.is_near(view, self._own_time_view, most=MOST_VIEWS_AHEAD // 2)

    def _turn_to(self, view: int, now: float) -> Instructions:
        if self.facts.leader_of(view) == self.me:
            return self._begin_instead(view, now)
        self._enter(view)
        self._commit_owed = True  # sent unasked, it tells the new leader that its view has begun
        return self._commit(now)

    @property
    def turned(self) -> Proof:
        """What this peer shows, as leader, of who has turned to its view."""
        return self._lead.turned

    def contributed(self, contribution: Contribution | None, *, now: float) -> Instructions:
        """The own commitment is made. It is made once, whatever view asks for it.

        None: a process of this peer before this one may have made another.
        """
        assert not self._contributed
        self._contributed = True
        if contribution is not None:
            self._reduction.contribution = contribution
            self._seen[self.me] = contribution
        return self._commit(now)

    def on_commit(
        self,
        sender: PeerId,
        view: int,
        contribution: Contribution | None,
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
        if facts.leader_of(view) != self.me:
            raise RemoteError("protocol", f"commitment to view {view}, which is not led here", sender)
        if contribution is not None:
            self._check_own(sender, contribution)
            if self._seen.get(sender, contribution) != contribution:
                raise EquivocationError(self._seen[sender], contribution)
        if promise is not None and promise.voter != sender:
            raise RemoteError("protocol", f"promise of {promise.voter} sent by {sender}", sender)
        if sender not in facts.election.voters_in(view, self._voter.changed):
            promise = None  # the run key has left it out, of which it may not know: it contributes all the same
        if promise is not None:
            facts.election.check_promise(promise, view, self.verify, self._voter.changed)
        out = self._learn(roster, result, now)
        if contribution is not None:
            self._seen[sender] = contribution
        self._gone.pop(sender, None)
        if self.result is not None:
            return out + self._news_for(sender, view, now)
        if view < self._promised:
            return out + self._news_for(sender, view, now)
        if view == self.view and self._lead.is_on:
            return out + self._committed(sender, contribution, promise, now)
        self._ahead[sender] = view, contribution, promise
        if self.view == view > self.facts.first_view and not self._closing:
            return out + self._begin_instead(view, now)  # this peer itself has found all gone who lead before
        return out + self._follow_others((sender,), view, now)

    def _committed(
        self, sender: PeerId, made: Contribution | None, promise: Promise | None, now: float
    ) -> Instructions:
        """To the view that this peer leads."""
        lead = self._lead
        if promise is not None:
            lead.ballots.promised(promise)
        lead.committed[sender] = None if sender in self._unproved else made
        lead.late.pop(sender, None)
        proposal = lead.ballots.proposal
        if proposal is not None:
            if lead.needs(sender):
                return self._begin_again(f"{sender} has come", now)
            return [SendBallot((sender,), proposal)]  # what comes next names what is in it
        if lead.has_roster:
            return self._news_for(sender, lead.view, now)
        return lead.call() + lead.propose(now)

    def on_contribution(self, sender: PeerId, contribution: Contribution) -> Instructions:
        """A member shows everybody what it commits to, so that a leader need only name it. Raises RemoteError if it is
        none of its own."""
        self.facts.check_member(sender)
        self._check_own(sender, contribution)
        self._gone.pop(sender, None)
        return self._see((contribution,))

    def _check_own(self, sender: PeerId, contribution: Contribution) -> None:
        if contribution.peer_id != sender:
            raise RemoteError("protocol", f"contribution of {contribution.peer_id} sent by {sender}", sender)
        if not self._knows(contribution):
            self.facts.check_contribution(contribution, self.verify)

    def on_promise(
        self, voter: PeerId, promise: Promise, roster: Roster | None, result: Result | None, *, now: float
    ) -> Instructions:
        """A voter outside the stage promises, and shows what it knows to be certified."""
        if promise.voter != voter:
            raise RemoteError("protocol", f"promise of {promise.voter} sent by {voter}", voter)
        out = self._learn(roster, result, now)
        if self.result is not None or not self._lead.is_on or promise.view != self.view:
            return out
        self._lead.ballots.promised(promise)
        return out + self._lead.propose(now)

    def _learn(self, roster: Roster | None, result: Result | None, now: float) -> Instructions:
        """Take what is certified from whoever shows it. Raises RemoteError if it is not genuine."""
        self._voter.learn(roster, result)
        shown = self._voter.roster
        out = self._see(shown.committed if shown is not None else ())
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
        made = self._reduction.contribution
        if not self._contributed:
            if self._contribution_asked:
                return []
            self._contribution_asked = True
            return [MakeContribution()]
        if self.result is not None:
            return []
        if self._lead.is_on:
            self._lead.committed[self.me] = made
            return self._lead.propose(now)
        if self._commit_owed:
            self._commit_owed = False
            self._last_commit = self.view, now
            self._wait_for_leader(now)
            promise = self._voter.promise(self.view)
            return [SendCommit(self.leader, self.view, made, promise, self._voter.roster, self._voter.result)]
        return []

    def _news_for(self, sender: PeerId, view: int, now: float) -> Instructions:
        """What the sender of a message of `view` has missed, if it matters, and it was not told just now: that may be a
        thousand times as long as what it is the answer to."""
        if sender == self.me:
            return []
        news: SendResult | SendRoster | None = None
        if self.result is not None:
            news = SendResult((sender,), self.result)
        elif self.roster is not None and self.roster.view >= view:
            news = SendRoster((sender,), self.roster)
        told, told_at = self._news.get(sender, (None, -math.inf))
        if news is None or (news == told and now < told_at + AGAIN_PHASES * self.facts.phase_s):
            return []
        self._news[sender] = news, now
        return [news]

    def is_back(self, peer: PeerId, *, now: float) -> Instructions:
        """Something comes from a member. If it seemed gone, what it was to be told meanwhile was given up: who leads
        tells it how the round stands."""
        if self._gone.pop(peer, None) is None:
            return []
        self._news.pop(peer, None)
        if not self.leads:
            return []
        return self._news_for(peer, self.facts.first_view, now) + self._lead.ask_who_is_back(peer)

    def leave_out(self, peer: PeerId, *, now: float) -> Instructions:
        """A member does not show what its contribution was given for: where this peer leads, it is not proposed.

        It stays a member. If votes are being asked for already, a view of this peer's own begins.
        """
        if peer == self.me or peer in self._unproved or self.result is not None:
            return []
        self._unproved.add(peer)
        if peer in self._there:
            self._named_in_vain.add(peer)
        if not self._lead.is_on:
            return []
        if self.asks_votes_for(peer) is not None:
            return self._begin_again(f"{peer} shows no papers", now)
        if self._lead.committed.get(peer) is not None and not self._lead.has_roster:
            self._lead.committed[peer] = None
        return self._lead.propose(now)

    def pass_over(self, leader: PeerId, view: int, *, now: float) -> Instructions:
        """Who leads the view says itself that it has nothing to show for its contribution, or for its result: the next
        leader is turned to at once, for nobody who looks can vote for what this one proposes."""
        if self.result is not None or self.leads or (leader, view) != (self.leader, self._promised):
            return []
        return self._next_view(now)

    def votes_for(self, proposal: Proposal) -> tuple[Vote, ...]:
        """Those that this peer, who asks for them, has."""
        return tuple(self._lead.ballots.votes.values()) if self._lead.ballots.proposal == proposal else ()

    def asks_votes_for(self, peer: PeerId) -> Contribution | None:
        """Its contribution, if it is on a new roster that this peer asks votes for."""
        proposal = self._lead.ballots.proposal
        roster = proposal.new_roster if proposal is not None and self._lead.is_on else None
        return roster.contribution_of(peer) if roster is not None else None

    def is_past(self, view: int) -> bool:
        """Whether nothing that is proposed in a view is voted for here any more."""
        return self.result is not None or view < self._promised

    # -- votes --------------------------------------------------------------------------------------------

    def unheard(self, proposal: Proposal) -> set[PeerId]:
        """Members that are to be asked whether they are there before this peer votes for a new roster without them.

        Not those that cannot be reached from here, nor who has said itself that it brings nothing; nor who is known to
        be late, for it is proposed as soon as it has committed, and not waited for.
        """
        facts, leader = self.facts, self.facts.leader_of(proposal.view)
        is_over = self.result is not None or proposal.view < self._promised
        if is_over or self.me not in facts.voters or self._is_without_me(proposal):
            return set()
        idle = {peer for peer, made in self._seen.items() if not made.work} - proposal.put_off
        unheard = proposal.left_without - {self.me, *idle, *self._gone, *facts.late}
        return {peer for peer in unheard if not self._were_told(peer, but=leader)}

    def _were_told(self, peer: PeerId, *, but: PeerId) -> bool:
        """Whether enough other leaders have heard that the member is there: one of them does not lie."""
        told = [leader for leader, of in self.told.items() if peer in of and leader != but]
        is_honest = bool(told) and self.facts.election.is_more_than_liars(told, self._there_now)
        return is_honest or len(told) >= MOST_TOLD

    @property
    def _there_now(self) -> set[PeerId]:
        """Members that vote in the view, as far as they can be reached."""
        return self.facts.members_in(self.view, self._voter.changed, gone=self._gone)

    def seen(self, peer: PeerId) -> Contribution | None:
        """A member's contribution, if it is known here."""
        return self._seen.get(peer)

    def looks_at(self, proposal: Proposal, *, now: float) -> None:
        """Members are asked about what a leader proposes, before this peer votes: its view has begun, and it is waited
        for. Raises RemoteError unless what is proposed fits the round and its proof allows it."""
        self._voter.check(proposal)
        if self.result is None and proposal.view >= self._promised:
            self._enter(proposal.view)
            self._is_asked(proposal, now)

    def on_ballot(
        self, sender: PeerId, proposal: Proposal, *, there: Collection[Contribution] = (), now: float
    ) -> Instructions:
        """A leader asks for this member's vote. `there`: contributions, had of the `unheard` members themselves."""
        self.facts.check_view(sender, proposal.view)
        self._voter.check(proposal)
        roster = proposal.roster or (proposal.result.roster if proposal.result is not None else None)
        accused = self._see(roster.committed if roster is not None else ())
        self._gone.pop(sender, None)
        if self.result is not None or proposal.view < self._promised:
            return accused + self._news_for(sender, proposal.view, now)
        self._enter(proposal.view)
        out: Instructions = []
        owes = False
        if proposal.result is not None:
            self._voter.remember(proposal.result.roster)
            owes = self._is_unproved(proposal, now)
            asked_at = now if self._owed is None else None
            out = self._reduction.fetch_missing(proposal.result, asked_at=asked_at, now=now)
        if owes:  # whoever votes for a result has its bytes, so that they outlive the leader
            if self._owed is None:
                self._owed_since, self._bytes_due = now, now + self._reduction.arrivals.window_s
            self._owed = (sender, proposal)
        elif self._is_without_me(proposal):
            out = self._say_here(now)
        elif self._knows_of(there, proposal.view, sender, now):
            return accused + self._next_view(now)
        elif there:
            out = [SayThere(sender, made, proposal) for made in there]
        else:
            out = self._cast(sender, proposal)
        self._is_asked(proposal, now)
        return accused + out

    def _is_asked(self, proposal: Proposal, now: float) -> None:
        """A leader that asks and asks, for what it cannot have or has got, must not hold up the round."""
        asked = (proposal.view, PHASES.index(proposal.phase))
        if asked > self._last_asked or self._patience.due is None:
            self._last_asked = max(self._last_asked, asked)
            self._patience.heard()
            if proposal.is_new_result:
                self._patience.vote_on_result(self._reduction.arrivals.allowed_s(now=now), now=now)
            self._wait_for_leader(now)

    def _knows_of(self, there: Iterable[Contribution], view: int, leader: PeerId, now: float) -> bool:
        """Whether the leader was told of one of these in an earlier view, and goes on without it all the same."""
        told, again_s = self.told.setdefault(leader, {}), AGAIN_PHASES * self.facts.phase_s
        first = [told.setdefault(made.peer_id, (view, now)) for made in there]
        return any(first_in < view and now >= at + again_s for first_in, at in first)

    def on_named(self, sender: PeerId, made: Contribution, *, now: float) -> Instructions:
        """A member does not vote for a roster without another, whose contribution it has had of itself. Raises
        RemoteError if it is none of a member's.

        That counts as if it had committed here, once those who say so weigh more than a third with it: for then there
        may be no quorum without it, and one of them is honest.
        """
        self.facts.check_member(sender)
        self._check_own(made.peer_id, made)
        if self.result is not None or not self._lead.is_on:
            return []
        named_by = self._named_by.setdefault(made.peer_id, {made.peer_id})
        named_by.add(sender)
        there = self._there_now | {made.peer_id}
        is_enough = self.facts.election.is_more_than_liars(named_by, there)
        return self.on_there((made,), now=now) if is_enough else []

    def _is_unproved(self, proposal: Proposal, now: float) -> bool:
        """Whether more is said of a result's parts than their reducers have signed for; or that nobody brings them,
        sooner than a leader could have seen that: it is asked for votes again."""
        result = proposal.result
        if result is None or self.parts.unproved(result):
            return result is not None
        leaves_empty = bool(result.roster.contributions) and any(part.is_empty for part in result.parts)
        return leaves_empty and proposal.is_new_result and not self._patience.may_be_empty(now=now)

    @property
    def _votes_from(self) -> float | None:
        """When it votes for the result that it owes a vote for, if it lacks nothing but that time."""
        owed = self._owed
        if owed is None or owed[1].result is None or self.parts.unproved(owed[1].result):
            return None
        return self._patience.empty_from

    def _is_without_me(self, proposal: Proposal) -> bool:
        """Whether a new roster puts this peer off, or does without what it has to bring.

        Nobody votes for that, so that no leader gets a quorum for a roster without those whose votes it needs; what an
        earlier view has certified is another thing: it may be the outcome already.
        """
        return self.me in proposal.put_off or (not self.brings_nothing and self.me in proposal.left_without)

    def on_left_without(self, proposal: Proposal, *, now: float) -> Instructions:
        """A voter outside the stage shows a roster without this peer's contribution, which its leader has signed and
        may not have shown here. Raises RemoteError if it is none."""
        if self.result is not None or proposal.view < self._promised or not self._is_without_me(proposal):
            return []
        self._voter.check(proposal)
        out = self._see(proposal.roster.committed if proposal.roster is not None else ())
        self._enter(proposal.view)
        return out + self._say_here(now)

    @property
    def brings_nothing(self) -> bool:
        """Whether it has committed, and not to work."""
        made = self.contribution
        return self._contributed and (made is None or not made.work)

    def on_there(self, shown: Iterable[Contribution], *, now: float) -> Instructions:
        """A voter does not vote for a roster without these: it has had them of their makers.

        They count as committed to what this peer leads from now on. What is none of a member's is passed over.
        """
        out: Instructions = []
        found: dict[PeerId, Contribution] = {}
        for made in shown:
            try:
                self.facts.check_member(made.peer_id)
                self._check_own(made.peer_id, made)
            except RemoteError:
                continue
            out += self._see((made,))
            if self._seen[made.peer_id] == made:
                found[made.peer_id] = made
        self._there |= found
        # Who names them has seen their papers. Once: or it and one that shows them to nobody else undo each view.
        self._unproved -= found.keys() - self._named_in_vain
        found = {peer: made for peer, made in found.items() if peer not in self._unproved}
        if self.result is not None or not self._lead.is_on:
            return out
        if self._lead.is_without(found.values()):
            return out + self._begin_again("members are there that had not been heard", now)
        if self._lead.ballots.proposal is None and not self._lead.has_roster:
            for peer in found.keys() - self._lead.committed.keys():
                out += self._committed(peer, found[peer], None, now)
        return out

    def _begin_again(self, why: str, now: float) -> Instructions:
        """In a later view of this peer's own, while others follow it there; else the next leader's turn comes."""
        view = self._own_view_after(self.view)
        if view > self._last_own_view:
            return self._next_view(now)
        silent = {*self._lead.late, *self._gone} - self._lead.committed.keys()
        return self._begin(view, why, now, silent=silent)

    def _say_here(self, now: float) -> Instructions:
        """Commit, once more in each view if it was done: it may not have come. That buys the leader no time."""
        if self._said_here_in == self.view:
            return []
        self._said_here_in = self.view
        waited_for = self._patience.due
        self._commit_owed = True
        out = self._commit(now)
        if waited_for is not None:
            self._patience.due = waited_for
        elif self._patience.due is None:
            self._wait_for_leader(now)
        return out

    def _cast(self, leader: PeerId, proposal: Proposal) -> Instructions:
        self._owed = None
        vote = self._voter.cast(proposal)
        return [SendVote(leader, proposal, vote)] if vote is not None else []

    def on_vote(self, voter: PeerId, view: int, phase: str, value: bytes, vote: Vote, *, now: float) -> Instructions:
        """A vote reaches the leader."""
        if vote.voter != voter:
            raise RemoteError("protocol", f"vote of {vote.voter} sent by {voter}", voter)
        asked = self._lead.ballots.proposal
        if asked is None or view != self.view or not self._lead.asks(phase):
            return []
        if not self._lead.ballots.count(vote, asked.phase, view, value):
            return []
        self._lead.voted.add(voter)
        self._gone.pop(voter, None)
        return self._lead.count(now)

    def wants(self, asked: AskPromise | SendBallot) -> bool:
        """Whether an answer would still be counted."""
        if self.result is not None or not self._lead.is_on:
            return False
        proposal = self._lead.ballots.proposal
        if isinstance(asked, AskPromise):
            return asked.view == self.view and proposal is None
        return proposal is not None and asked.proposal.view == self.view

    def reconfigure(self, changed: Reconfiguration, *, now: float) -> Instructions:
        """The run key has named other voters for this round. Raises RemoteError if it is not genuine."""
        if self.result is not None or self._voter.changed == changed:
            return []
        self._voter.reconfigure(changed)
        view = changed.first_view
        if view <= self._promised:
            return self._next_view(now)
        self._own_time_view = view
        if self.facts.leader_of(view) == self.me:
            return self._begin(view, self._lead.reason or "the round was reconfigured", now)
        self._enter(view)
        self._commit_owed = True
        return self._commit(now)

    def _own_view_after(self, view: int) -> int:
        view += 1
        while self.facts.leader_of(view) != self.me:
            view += 1
        return view

    # -- roster and parts ---------------------------------------------------------------------------------

    def on_roster(self, sender: PeerId, roster: Roster, *, now: float) -> Instructions:
        """A certified roster, from its leader or from whoever has it: the highest (view, revision) is followed."""
        self.facts.check_roster(roster, self.verify, certified=True, known=self._knows)
        self._gone.pop(sender, None)
        held = self.roster
        is_news = held is None or roster.rank > held.rank
        if self.result is not None or (roster.view < self._promised and not is_news):
            self._voter.remember(roster)
            return self._news_for(sender, roster.view, now) if sender == roster.leader else []
        if held is not None and not is_news:
            if roster.rank == held.rank and roster.signed_value() != held.signed_value():
                raise RemoteError(
                    "equivocation", f"two rosters of view {roster.view} of {roster.leader}", roster.leader
                )
            return []
        if roster.view < self._promised:
            # Voters who have not turned may end that view: they have the parts that it wants of this peer, and no vote.
            return self._serve(roster, now)
        self._enter(roster.view)
        self._patience.heard()
        return self._follow(roster, now)

    def _follow(self, roster: Roster, now: float) -> Instructions:
        self._closing = True
        held = self.roster
        if held is None or held.view != roster.view:
            self._num_revisions = 0
            self._patience.follow(self.waits.silence_s, now=now)
        elif len(roster.left_out) <= len(held.left_out):
            self._num_revisions += 1
        out = self._serve(roster, now)
        if self._num_revisions <= MOST_REVISIONS:
            self._wait_for_leader(now)
        return out + self._lead.conclude(now)

    def _serve(self, roster: Roster, now: float) -> Instructions:
        """Bring what this certified roster wants of this peer."""
        self._voter.remember(roster)
        return self._see(roster.committed) + self._reduction.follow(roster, leads=roster.leader == self.me, now=now)

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        """Digest that `sender` committed to for `part`. Raises RemoteError if its part is not wanted."""
        return self._reduction.expected_digest(part, sender)

    def roster_of(self, reduced: ReducedPart) -> Roster | None:
        """The certified roster that a part was made under; None if none that is known here fits."""
        if (reduced.cohort is None and reduced.is_empty) or not 0 <= reduced.part < self.facts.num_parts:
            return None
        outcome = self.result.roster if self.result is not None else None
        known = (self.roster, outcome, *self._voter.rosters.values())
        return next((roster for roster in known if roster is not None and is_of(reduced, roster)), None)

    def is_overtaken(self, reduced: ReducedPart) -> bool:
        """Whether a part was made under a roster that this peer has left for another: nobody has a use for it."""
        return self.roster_of(reduced) is None and any(is_of(reduced, roster) for roster in self._reduction.overtaken)

    def on_part(self, sender: PeerId, part: int) -> Instructions:
        """A contributor's part is here and matches its committed digest."""
        self.expected_digest(part, sender)
        self._gone.pop(sender, None)
        return self._reduction.on_part(sender, part)

    def on_bad_part(self, sender: PeerId, part: int) -> Instructions:
        """A contributor's part is here and matches its committed digest, but holds nonsense: it is left out."""
        self.expected_digest(part, sender)
        return self._reduction.on_bad_part(sender, part)

    def aggregated(self, reduced: ReducedPart, *, now: float) -> Instructions:
        """The own part is aggregated and encoded."""
        out, is_new = self._reduction.aggregated(reduced)
        return out + (self._part_is_reduced(now) if is_new else [])

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> Instructions:
        """A reducer's part, or a cohort's share of one, is here; its bytes match its digest."""
        self.facts.check_member(sender)
        was_here = reduced in self.parts.stated
        self._reduction.offer(sender, reduced)
        self._gone.pop(sender, None)
        relayed = self._reduction.relay(sender, reduced)
        if self.result is not None:
            return relayed + self._finish_if_complete()
        if self._owed is not None or self._lead.asks("result"):
            return relayed + self._bytes_came(now, is_new=not was_here)
        out, is_new = self._reduction.take(sender, reduced)
        return relayed + out + (self._part_is_reduced(now) if is_new else [])

    def moved(self, peer: PeerId, *, now: float) -> None:
        """Bytes of the round's parts have come from a member, or gone to one: the round goes on, whoever leads it."""
        self.facts.check_member(peer)
        self._reduction.arrivals.moved(peer, now=now)
        is_waiting = self.roster is not None and self.result is None and self._patience.due is not None
        is_waiting = is_waiting and self._lead.ballots.proposal is None and now < self._reduction.arrivals.ends_at
        if is_waiting and not self._waits_for_leader_alone():
            self._wait_for_leader(now)

    def _waits_for_leader_alone(self) -> bool:
        """Whether nothing is to come but what the leader itself reduces: a leader relieves others, and not itself."""
        roster = self.roster
        if roster is None or self.leads:
            return False
        unreduced = self.parts.unreduced(roster)
        return bool(unreduced) and all(roster.combiner_of(part) == roster.leader for part in unreduced)

    def on_missing(
        self,
        sender: PeerId,
        view: int,
        missing: Collection[PeerId],
        given_up: Collection[tuple[PeerId, bytes]],
        *,
        now: float,
    ) -> Instructions:
        """A reducer lacks these members' parts, and waits no longer for those that it signs a `Lack` for."""
        self.facts.check_member(sender)
        if self.result is not None:
            return self._news_for(sender, view, now)
        roster = self.roster
        if roster is None or not self._lead.has_roster or view != self.view or sender not in roster.reducers:
            return []
        lacks: dict[PeerId, Lack] = {}
        for peer, signature in given_up:
            made = roster.contribution_of(peer)
            if made is not None:
                lacks[peer] = Lack(sender, signature)
                self.facts.check_lack(lacks[peer], made, self.verify)
        is_waiting = bool(set(missing) - lacks.keys()) and self._lead.ballots.proposal is None
        if is_waiting and now < self._reduction.arrivals.ends_at:
            self._wait_for_leader(now)
        return self._lead.missing(sender, missing, lacks, now=now)

    def _look(self, now: float) -> Instructions:
        """Say whose parts are missing; a leader says it to itself. Whose parts do not come should not lead: its roster
        and its ballots would come later still."""
        out: Instructions = []
        before, leader = self.given_up, self.leader
        for said in self._reduction.look(now=now):
            if isinstance(said, SayMissing) and said.to == self.me:
                out += self.on_missing(self.me, said.view, said.missing, said.given_up, now=now)
            else:
                out.append(said)
        if leader in self.given_up - before and leader == self.leader and not self.leads:
            out += self._next_view(now)
        return out

    def on_announced(self, sender: PeerId, part: int, cohort: int, *, now: float) -> Instructions:
        """The reducer of a cohort's share says that it is made, and has gone to who combines the shares."""
        self.facts.check_member(sender)
        self._gone.pop(sender, None)
        if self._reduction.announced(sender, (part, cohort)):
            self._wait_for_leader(now)
        return []

    def _part_is_reduced(self, now: float) -> Instructions:
        self._wait_for_leader(now)
        return self._lead.conclude(now)

    # -- result -------------------------------------------------------------------------------------------

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
        self.result = self._voter.outcome = result
        self._closing = True
        self._owed = None
        self._reduction.is_over, self._reduction.due = True, None
        self._patience.wait(1, now=now)
        away = left_by(result.roster) & set(self._gone)
        everyone = sorted({*self.facts.voters, *self.facts.members})
        others = [peer for peer in everyone if peer != self.me and peer not in away]
        out: Instructions = [SendResult(tuple(others), result)] if others and self._lead.is_on else []
        return out + self._reduction.fetch_missing(result, now=now) + self._finish_if_complete()

    def part_fetched(self, reduced: ReducedPart, *, now: float) -> Instructions:
        """Bytes of a part of the result were fetched and match; its reducer's word too, if it is not certified yet."""
        self.parts.fetched(reduced)
        return self._finish_if_complete() if self.result is not None else self._bytes_came(now)

    def _bytes_came(self, now: float, *, is_new: bool = True) -> Instructions:
        """A result that is voted on may now have all its bytes here; its leader has more time where these are new."""
        owed = self._owed
        if owed is not None and not self._is_unproved(owed[1], now):
            return self._cast(*owed)
        if owed is not None and is_new:
            self._wait_for_leader(now)
        return self._lead.count(now) if self._lead.asks("result") else []

    def _finish_if_complete(self) -> Instructions:
        if self.result is None or self.finished or self.parts.lacking(self.result):
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
            return self._reduction.fetch_missing(self.result, now=now)
        if peer == self.leader:
            return self._next_view(now)
        if self._lead.asks("result"):
            return self._lead.count(now)
        if not self._lead.has_roster and (self.roster is None or self.roster.view < self.view):
            return self._lead.propose(now)
        relieved = self._lead.reassign(now)
        return relieved + self._look(now)

    def tick(self, *, now: float) -> Instructions:
        """The deadline passed."""
        if self.deadline is None or now < self.deadline:
            return []
        out: Instructions = []
        owed, votes_from = self._owed, self._votes_from
        if owed is not None and votes_from is not None and now >= votes_from:
            out += self._cast(*owed)
        elif owed is not None and owed[1].result is not None and now >= self._bytes_due:
            self._bytes_due = now + self._reduction.arrivals.window_s
            out += self._reduction.fetch_missing(owed[1].result, asked_at=self._owed_since, now=now)
        if self._reduction.due is not None and now >= self._reduction.due:
            out += self._look(now)
        relief_due = self._lead.relief_due
        if relief_due is not None and now >= relief_due:
            out += self._lead.relieve_slow_reducers(now)
        due = self._patience.due
        if due is None or now < due:
            return out
        if now > due + self.facts.phase_s:  # this process stood still: first hear what has come meanwhile
            self._patience.wait(1, now=now)
            return out
        if self.result is not None:
            self._patience.wait(1, now=now)
            return out + self._reduction.fetch_missing(self.result, now=now)
        is_on = self._lead.is_on
        if is_on and self._lead.puts_off(self._lead.committed):
            return out + self._begin_again("members came late, and votes are too few", now)
        if is_on:
            out += self._lead.is_due(now)
            # A leader that no quorum promises its view gives itself up, after others would: they may be at a later one.
            if self._lead.num_waits < 2 * self._patience.num_phases:
                return out + self._follow_others((), 0, now)  # fewer are there than when they turned
        if self._turn == self.facts.first_view or self._has_company(self._turn):
            return out + self._next_view(now)
        if not is_on:  # views must not run away from those who are to come, too
            self._wait_for_leader(now)
        return out

    def _next_view(self, now: float) -> Instructions:
        facts, left = self.facts, left_by(self.roster) if self.roster is not None else set()
        away = {*left, *self._gone, *self.given_up, self.me}
        others = [peer for peer in facts.members if peer not in away]
        view = self.view + 1
        # Whoever was put off, or is too slow, leads only if nobody else is there.
        while facts.leader_of(view) not in others and (facts.leader_of(view) != self.me or (self.left and others)):
            view += 1
        if not self._closing and self._called.get(facts.leader_of(view)) != view:
            self.view = view  # nothing has been asked yet: only whom to report to changes
            return []
        self._own_time_view = view
        self._patience.given_up()
        told = tuple(peer for peer in facts.members if peer not in (self.me, facts.leader_of(view)))
        is_told = facts.leader_of(view) == self.me or not told  # by being called to it
        return self._turn_to(view, now) + ([] if is_told else [SendTurned(told, view)])

    def _enter(self, view: int) -> None:
        """Follow nothing of a lower view any more."""
        if view > self._promised:
            self._lead.end()
            self._owed = None
            self.parts.forget_empty()
            self._patience.turned()
            self._reduction.due = None
        if self._turn < 0 or self.facts.leader_of(view) != self.facts.leader_of(self._promised):
            self._turn = view
        self.view = self._promised = view
        self._closing = True

    def _wait_for_leader(self, now: float) -> None:
        if self.result is None:
            roster = self.roster
            awaited = roster is not None and roster.view == self._promised and bool(self.parts.unreduced(roster))
            # Who has no vote is asked for none, and nobody needs it to turn to another leader; who neither sends parts
            # nor reduces any sees nothing of those that move. Both hear less.
            calm = 2 if self.me not in self.facts.voters or (awaited and self._looks_on(roster)) else 1
            self._patience.wait_for_leader(leads=self._lead.is_on, calm=calm, parts_are_awaited=awaited, now=now)

    def _looks_on(self, roster: Roster | None) -> bool:
        """Whether it is others' parts alone that the round waits for, at others."""
        return roster is not None and roster.contribution_of(self.me) is None and self.me not in roster.reducers

    # -- who ----------------------------------------------------------------------------------------------

    def _knows(self, made: Contribution) -> bool:
        return self._seen.get(made.peer_id) == made
