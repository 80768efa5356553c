"""One voter of an averaging round, member or not: what is certified, and its vote.

Beside the voter's own rules (`swarm.core.round.voting`) it holds the rosters and results themselves: whoever commits to
a result must be able to show it to the leader of a later view.
"""

import math
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarm.core.audit.ticket import Verify
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Result, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voting import Certificate, Promise, Proof, Reconfiguration, Sign, Vote, Voter
from swarm.core.round.words import Words

Shown = TypeVar("Shown")

NOT_RECONFIGURED = -1
"""Below the first view of any reconfiguration."""
MOST_ALONE = 2
"""So often in a round one member turns others at once, where those that are there are so few that it is more than a
third, and none of these follows it; then a view lasts `ALONE_S`, and twice as long each time."""
ALONE_S, LONGEST_ALONE = 10.0, 128.0
"""An honest leader takes less, on fast lines; and so many times as long on any."""


@dataclass
class RoundVoter:
    """What one voter knows and has signed in the round `facts.step`.

    `votes` is False for one that may have voted in this round before its process was started again, and `signed_under`
    the first view of the last reconfiguration under which it may have.
    """

    facts: RoundFacts
    me: PeerId
    sign: Sign
    verify: Verify
    votes: bool = True
    known: Callable[[Contribution], bool] = lambda made: False
    """Whether a contribution was checked before."""
    signed_under: int = NOT_RECONFIGURED
    rosters: dict[int, Roster] = field(default_factory=dict)
    """Certified ones, by view."""
    likely: dict[int, Result] = field(default_factory=dict)
    """Results with the certificate of their phase, by view."""
    outcome: Result | None = None
    _voter: Voter = field(init=False)
    _voted_for: Result | None = None

    def __post_init__(self) -> None:
        self._voter = Voter(self.facts.election, self.me, self.sign, self.verify)

    @property
    def roster(self) -> Roster | None:
        """The highest certified one: its facts are proposed again."""
        return _highest(self.rosters)

    @property
    def result(self) -> Result | None:
        """The outcome, or the highest that may be it."""
        return self.outcome or _highest(self.likely)

    @property
    def changed(self) -> Reconfiguration | None:
        return self._voter.changed

    def reconfigure(self, changed: Reconfiguration) -> None:
        """Vote under it from now on. Raises RemoteError if it is not genuine.

        Whom it names may vote again, if whatever an earlier process signed was signed under other voters.
        """
        self._voter.reconfigure(changed)
        if changed.first_view > self.signed_under:
            self.votes = self.votes or self.me in changed.voters

    @property
    def highest_view(self) -> int:
        """Of those it has signed anything in; -1 before."""
        return self._voter.promised

    def promise(self, view: int) -> Promise | None:
        """For the view's leader; none for the first view, which needs none, or if a higher one has begun."""
        return self._voter.promise(view) if self.votes and view != self.facts.first_view else None

    def certificates(self) -> tuple[Certificate, ...]:
        """Those that can be shown with what they certify."""
        held: list[Roster | Result] = [*self.rosters.values(), *self.likely.values()]
        return tuple(shown.certificate for shown in held if shown.certificate is not None)

    def learn(self, roster: Roster | None, result: Result | None) -> None:
        """Take what is certified from whoever shows it. Raises RemoteError if it is not genuine."""
        if roster is not None and self.rosters.get(roster.view) != roster:
            self.facts.check_roster(roster, self.verify, certified=True, known=self.known)
            self.remember(roster)
        if result is None or self.outcome is not None:
            return
        certificate = result.certificate
        if certificate is not None and certificate.phase == "commit":
            self.facts.check_result(result, self.verify, certified=True, known=self.known)
            self.outcome = result
        elif certificate is None or certificate.phase != "result":
            raise RemoteError("certificate", "a result is shown without its certificate", result.leader)
        elif certificate.view not in self.likely:
            self.facts.check_result(result, self.verify, certified=False, known=self.known)
            self.facts.election.check_certificate(certificate, "result", result.root(), self.verify)
            self.remember_result(result)

    def remember(self, roster: Roster) -> None:
        """The roster is certified and checked."""
        certificate = roster.certificate
        assert certificate is not None
        held = self.rosters.get(certificate.view)
        if held is None or roster.rank > held.rank:
            self.rosters[certificate.view] = roster
        if self.votes:
            self._voter.learn(certificate, certificate.value)

    def remember_result(self, result: Result) -> None:
        """The result has the certificate of its phase and is checked."""
        certificate = result.certificate
        assert certificate is not None
        self.likely.setdefault(certificate.view, result)
        self.remember(result.roster)
        if self.votes:
            self._voter.learn(certificate, certificate.value)

    def keep_highest(self) -> None:
        """Of what is certified, all that a promise names: of who leads nothing, and so need not show the rest."""
        for held in (self.rosters, self.likely):
            for view in sorted(held)[:-1]:
                del held[view]

    def check(self, proposal: Proposal) -> None:
        """Raises RemoteError unless what is proposed fits the round and its proof allows it."""
        if proposal.roster is not None:
            self.facts.check_roster(proposal.roster, self.verify, certified=False, known=self.known)
        if proposal.result is not None:
            self.facts.check_result(proposal.result, self.verify, certified=False, known=self.known)
        proposal.check_proof(self.facts.election, self.verify)
        shown = proposal.proof.shown_reconfiguration
        if shown is not None:
            self.reconfigure(shown)

    def cast(self, proposal: Proposal) -> Vote | None:
        """The vote for a proposal that was checked; None if this peer has none in its view, or something else was
        promised or voted for."""
        certificate = proposal.proof.certificate
        if proposal.result is not None:
            self.remember(proposal.result.roster)
        if certificate is not None and certificate.phase == "result":
            known = proposal.result or self._voted_for
            if known is None or known.root() != certificate.value:
                return None
            self.remember_result(replace(known, certificate=certificate))
        has_vote = self.votes and self.me in self.facts.election.voters_in(proposal.view, self.changed)
        vote = proposal.vote_of(self._voter) if has_vote else None
        if proposal.result is not None and vote is not None:
            self._voted_for = proposal.result
        return vote


@dataclass
class Witness:
    """A voter that is no member: it votes on what leaders ask, and never on anything of its own accord."""

    voter: RoundVoter
    _num_alone: int = 0
    """Times that one member alone had it promise a view, while another was there."""
    _alone_view: int = -1
    """The last of those."""
    _promised_at: float = -math.inf
    """When it promised the highest view."""

    def on_ask(
        self, sender: PeerId, view: int, shown: Proof, *, gone: Collection[PeerId] = (), now: float
    ) -> Promise | None:
        """The leader of a view wants a promise, and shows its members' own; `gone`: members that do not answer here.

        Raises RemoteError if it does not lead the view, TransientError while too few of the members have turned to it,
        or it is too soon for one alone.
        """
        facts = self.voter.facts
        facts.check_view(sender, view)
        if shown.reconfiguration is not None:
            self.voter.reconfigure(shown.reconfiguration)
        if not facts.is_turned_to(view, shown, self.voter.verify, self.voter.changed, gone=gone):
            raise TransientError(f"too few members have turned to view {view}")
        changed, before = self.voter.changed, self.voter.highest_view
        since = max(before, changed.first_view if changed is not None else NOT_RECONFIGURED)
        if not facts.is_near(view, since):
            raise TransientError(f"view {view} is further from view {since} than members ever are")
        there = facts.members_in(view, changed, gone=gone)
        is_alone = len(there) > 1 and len(there.intersection(promise.voter for promise in shown.promises)) == 1
        if view > before and is_alone and now < self._alone_from(sender):
            raise TransientError(f"one member alone has turned to view {view}, and not for the first time")
        promise = self.voter.promise(view)
        if promise is not None and view > before:
            self._promised_at = now
            if is_alone:
                self._num_alone, self._alone_view = self._num_alone + 1, view
        elif view == self._alone_view and not is_alone:  # another has turned to it since
            self._num_alone, self._alone_view = self._num_alone - 1, -1
        return promise

    def _alone_from(self, sender: PeerId) -> float:
        """From when on one member's word alone turns this voter to a view that it leads; to one after its own later
        still, for the others come first."""
        if self._num_alone < MOST_ALONE:
            return -math.inf
        facts, before = self.voter.facts, max(self.voter.highest_view, self.voter.facts.first_view)
        lasts_s = ALONE_S * min(LONGEST_ALONE, 2.0 ** (self._num_alone - MOST_ALONE))
        return self._promised_at + lasts_s * (2 if facts.leader_of(before) == sender else 1)

    def on_ballot(
        self, sender: PeerId, proposal: Proposal, words: Words | None = None, *, gone: Container[PeerId] = ()
    ) -> Vote | None:
        """The leader of a view wants a vote; `words`: what the parts of a result were signed for; `gone`: members that
        do not answer here, and need not have voted for parts that are left empty.

        Raises TransientError if too few of the others have, RemoteError if it does not lead the view, may not propose
        this, or shows too little: who has no part of a round votes for nothing in a result that its reducers have not
        signed.
        """
        self.voter.facts.check_view(sender, proposal.view)
        self.voter.check(proposal)
        if proposal.is_new_result and proposal.result is not None:
            if words is None:
                raise RemoteError("signature", "a result without its reducers' words", sender)
            facts, result = self.voter.facts, proposal.result
            words.check(result, self.voter.verify)
            ballot = facts.election.ballot("result", proposal.view, proposal.value, self.voter.changed)
            seats = {peer: facts.weights.get(peer, 0) for peer in facts.members if peer not in gone}
            words.check_agreed(result, ballot, seats, self.voter.verify)
        return self.voter.cast(proposal)


def _highest(by_view: dict[int, Shown]) -> Shown | None:
    return by_view[max(by_view)] if by_view else None
