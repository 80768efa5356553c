"""The forms of a round's proposals, and their leader's count of promises and votes.

A proposal goes to every voter, in three phases (see `swarm.core.round.voting`); each carries all that a voter needs to
check it, so that it can be sent again and come in any order.
"""

from dataclasses import dataclass, field
from typing import Annotated

from swarm.core.audit.ticket import Verify
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer
from swarm.core.ids import PeerId
from swarm.core.record import PackedOnce
from swarm.core.round.contribution import Result, Roster
from swarm.core.round.proposal import left_by
from swarm.core.round.voting import (
    MOST_VIEWS,
    Certificate,
    Election,
    Phase,
    Promise,
    Proof,
    Reconfiguration,
    Vote,
    Voter,
    certificate_of,
)


@dataclass(frozen=True)
class Proposal(PackedOnce):
    """What a leader asks votes for: a roster, a result, or that a certified result is the outcome."""

    phase: Phase
    view: Annotated[int, Integer(high=MOST_VIEWS)]
    roster: Roster | None
    """In phase "roster"."""
    result: Result | None
    """In phase "result"."""
    value: Digest
    """What is voted on: digest of the roster's facts, or root of the result."""
    proof: Proof
    """Promises, where the view has just begun; else the certificate of the phase before."""

    @classmethod
    def of_roster(cls, roster: Roster, proof: Proof) -> "Proposal":
        return cls("roster", roster.view, roster, None, roster.facts_digest(), proof)

    @classmethod
    def of_result(cls, result: Result, view: int, proof: Proof) -> "Proposal":
        return cls("result", view, None, result, result.root(), proof)

    @classmethod
    def of_commit(cls, certificate: Certificate) -> "Proposal":
        return cls("commit", certificate.view, None, None, certificate.value, Proof((), certificate))

    @property
    def new_roster(self) -> Roster | None:
        """The roster, if it is of what was committed to its view: no earlier view's quorum has voted for its facts."""
        return self.roster if self.proof.certificate is None else None

    @property
    def put_off(self) -> set[PeerId]:
        """Members that a new roster puts off, for its leader says that they have not committed to its view."""
        return left_by(self.new_roster) if self.new_roster is not None else set()

    @property
    def left_without(self) -> set[PeerId]:
        """Members but its leader of whom a new roster has no contribution: it puts them off, or says that they bring
        nothing."""
        roster = self.new_roster
        if roster is None:
            return set()
        return {*roster.members} - {made.peer_id for made in roster.contributions} - {roster.leader}

    @property
    def is_new_result(self) -> bool:
        """Whether nobody has voted for the result yet: it is not one that an earlier view's quorum has."""
        certificate = self.proof.certificate
        is_bound = certificate is not None and certificate.phase == "result"
        return self.result is not None and not is_bound

    def check_proof(self, election: Election, verify: Verify) -> None:
        """Raises RemoteError unless what is proposed has this value, and the proof allows it.

        Nothing is hashed here but what was held against the round before: a stranger's may be as long as a message.
        """
        certificate = self.proof.certificate
        if self.roster is not None:
            fits = self.roster.facts_digest() == self.value
        else:
            fits = self.result is None or self.result.root() == self.value
        if not fits:
            raise RemoteError("malformed", f"proposal of phase {self.phase} in view {self.view} has another value")
        if self.phase == "commit":
            assert certificate is not None
            election.check_certificate(certificate, "result", self.value, verify)
        elif self.result is not None and certificate is not None and certificate.view == self.view:
            # Its voters will name the certificate in their promises: they must hold a roster that carries it.
            if self.result.roster.certificate != certificate:
                raise RemoteError("certificate", f"the result's roster does not carry what certifies view {self.view}")
            if not self.result.roster.comes_of(certificate.value):
                raise RemoteError("certificate", f"the result is of other facts than view {self.view} certified")
            election.check_certificate(certificate, "roster", certificate.value, verify)
        else:
            bound = election.bound(self.view, self.proof, verify)
            held = (bound.phase, bound.value) if bound is not None else None
            roster = self.roster
            if roster is None:
                follows = False
            elif bound is None:  # nobody waited for parts of what was never certified; and what shows none is new
                follows = not roster.left_out and certificate is None
            else:
                follows = bound.phase == "roster" and roster.comes_of(bound.value)
            if held != (self.phase, self.value) and not follows:
                raise RemoteError("equivocation", f"view {self.view} proposes what the promises do not allow")

    def vote_of(self, voter: Voter) -> Vote | None:
        """The voter's vote; None if it has promised or voted otherwise. Raises RemoteError if the proof is not good."""
        if self.roster is not None:
            return voter.vote_roster(self.view, self.value, self.proof, comes_of=self.roster.comes_of)
        if self.result is not None:
            return voter.vote_result(self.view, self.value, self.proof, comes_of=self.result.roster.comes_of)
        assert self.proof.certificate is not None
        return voter.vote_commit(self.proof.certificate, self.value)

    def _check_fields(self) -> None:
        if (self.roster is not None, self.result is not None) != (self.phase == "roster", self.phase == "result"):
            raise RemoteError("malformed", f"proposal of phase {self.phase} holds the wrong thing")
        certificate = self.proof.certificate
        if self.roster is not None:
            fits = self.roster.view == self.view
        else:
            fits = self.result is not None or (certificate is not None and certificate.view == self.view)
        if not fits:
            raise RemoteError("malformed", f"proposal of phase {self.phase} in view {self.view} contradicts itself")


@dataclass
class Ballots:
    """One view's promises and votes, as its leader counts them."""

    election: Election
    verify: Verify
    view: int
    changed: Reconfiguration | None = None
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    proposal: Proposal | None = None
    """What votes are being asked for now."""
    before: Proposal | None = None
    """What was asked for before: whoever missed it needs it to vote now."""
    votes: dict[PeerId, Vote] = field(default_factory=dict)

    def proof(self, certificates: tuple[Certificate, ...]) -> Proof | None:
        """Why the leader may propose; `certificates` are those it knows. None while promises are too few.

        A promise that names a certificate nobody has shown does not count: its voter lies, or has yet to show it.
        """
        known = {(made.rank, made.value): made for made in certificates}
        usable = [p for p in self.promises.values() if p.binds is None or p.binds in known]
        if not self.election.is_quorum([promise.voter for promise in usable], self.voters):
            return None
        usable.sort(key=lambda promise: promise.voter)
        highest = max((p.binds for p in usable if p.binds is not None), default=None)
        return Proof(tuple(usable), known[highest] if highest is not None else None, self.changed)

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Who votes in this view."""
        return self.election.voters_in(self.view, self.changed)

    def promised(self, promise: Promise) -> None:
        """Count a promise for this view. Raises RemoteError if it is none."""
        self.election.check_promise(promise, self.view, self.verify, self.changed)
        self.promises[promise.voter] = promise

    def ask(self, proposal: Proposal) -> None:
        self.before, self.proposal = self.proposal, proposal
        self.votes.clear()

    def ask_nothing(self) -> None:
        self.proposal = None

    def count(self, vote: Vote, phase: Phase, view: int, value: bytes) -> bool:
        """Whether the vote is new and for what is proposed now. Raises RemoteError if it is not a voter's, signed."""
        asked = self.proposal
        if asked is None or (asked.phase, asked.view, asked.value) != (phase, view, value) or vote.voter in self.votes:
            return False
        if vote.voter not in self.voters:
            raise RemoteError("standing", f"{vote.voter} has no vote", vote.voter)
        if not self.verify(vote.voter, self.election.ballot(phase, view, value, self.changed), vote.signature):
            raise RemoteError("signature", f"vote of {vote.voter} is not signed by it", vote.voter)
        self.votes[vote.voter] = vote
        return True

    def certificate(self) -> Certificate | None:
        """Of what is proposed, once enough have voted for it."""
        asked = self.proposal
        if asked is None:
            return None
        votes = tuple(self.votes.values())
        return certificate_of(self.election, asked.phase, asked.view, asked.value, votes, self.changed)
