"""How voters certify a round's outcome, so that it has only one: votes, certificates, promises.

Practical Byzantine fault tolerance (Castro and Liskov, 1999), for one value a round. A view's leader asks for votes in
three phases: "roster" (who contributes what), "result" (what came of it), "commit" (that a quorum knows the result).
Each voter votes once in a (view, phase). A leader of a later view first needs promises of a quorum: each says which
certificates its voter holds and refuses all lower views. What the highest certificate says must be proposed again (of a
roster: it, or it with contributions left out whose parts do not come), and voters check that it is. A vote weighs what
its voter did lately (`swarm.core.seats`). Voters of less than a third of the weight may lie; any number may be silent,
which only stops the round.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from swarm.core.audit.ticket import Verify
from swarm.core.canonical import Value, digest, signed_bytes
from swarm.core.cohorts import committee
from swarm.core.errors import RemoteError
from swarm.core.forms import SIGNATURE, Digest, Integer
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.kept import once
from swarm.core.layout import AtMost, Named
from swarm.core.record import Record, Row, Signed
from swarm.core.seats import hangs_on_few, weight_of

Sign: TypeAlias = Callable[[bytes], bytes]
Phase = Literal["roster", "result", "commit"]

PHASES: tuple[Phase, ...] = get_args(Phase)
FEW_MEMBERS = 4
"""A stage with fewer members has its neighbours' votes too: two voters certify nothing when one is gone."""
MOST_NEIGHBOURS = 3
"""Of a stage's neighbours, who are drawn by no work of theirs, all together weigh no more than so many of its members:
they decide nothing by themselves."""
MAX_VOTERS = 256
MOST_VIEWS = 1 << 48
"""Of a round: no member's word brings others as far."""


def quorum(weight: int) -> int:
    """What votes must weigh to certify, of all voters' weight: any two quorums share more weight than liars have, if
    they have less than a third of all.

    With f = (n - 1) // 3 of n the liars', the smallest q with 2q - n > f.
    """
    of_liars = (weight - 1) // 3
    return (weight + of_liars) // 2 + 1


def electorate(
    work: Mapping[PeerId, int], neighbours: Collection[PeerId], host: PeerId | None, said: bytes
) -> dict[PeerId, int]:
    """Who votes on a round before which this is the host's last word, in the order of ids, and what each vote weighs:
    the stage's members by their `work`, and the host as the lightest of them: who is left without it decides as well
    as may be.

    Where the work hangs on few, the host votes as the heaviest, and so do neighbours, but all no more than three; where
    members are many, those who are drawn. A member all alone needs nobody's vote: it cannot disagree with itself.
    """
    weights = committee(work, said)
    of_host, heaviest = min(weights.values()), max(weights.values())
    if hangs_on_few(work, FEW_MEMBERS):
        of_host = heaviest
        others = set(neighbours) - weights.keys()
        weights |= dict.fromkeys(others, min(heaviest, MOST_NEIGHBOURS * heaviest // max(1, len(others))))
    if len({*weights, *work}) > 1 and host is not None:
        weights[host] = of_host
    return {peer: weight for peer, weight in sorted(weights.items()) if weight}


@dataclass(frozen=True)
class Vote(Row):
    """One voter's signature on a ballot."""

    voter: PeerId
    signature: Annotated[bytes, SIGNATURE]


@dataclass(frozen=True)
class Reconfiguration(Signed):
    """The run key's word that other voters decide a round that has lost its quorum, from a view on.

    They are some of those who voted before; whoever follows it signs nothing for the others any more.
    """

    DOMAIN: ClassVar[str] = "reconfiguration"
    stage: StageIndex
    step: Step
    previous_name: Digest
    first_view: Annotated[int, Integer(high=MOST_VIEWS)]
    voters: Annotated[tuple[PeerId, ...], AtMost(MAX_VOTERS)]
    """Sorted."""

    def signed_value(self) -> Value:
        return [self.stage, self.step, self.previous_name, self.first_view, list(self.voters)]

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.signed_bytes())


@dataclass(frozen=True)
class Certificate(Record):
    """A quorum's votes for one value in one phase of one view."""

    phase: Phase
    view: int
    value: Digest
    """Phase "roster": digest of the roster's facts; else the root of the result."""
    votes: Annotated[tuple[Vote, ...], AtMost(MAX_VOTERS)]
    reconfiguration: Annotated[Reconfiguration | None, Named("changed")] = None
    """What made its voters the voters, if they are not those the round began with."""

    @property
    def rank(self) -> tuple[int, int]:
        """Of two certificates the one of the higher view, then of the later phase, binds."""
        return (self.view, PHASES.index(self.phase))


@dataclass(frozen=True)
class Promise(Record):
    """A voter's word to sign nothing of a view below `view`, and the highest certificates it holds."""

    DOMAIN: ClassVar[str] = "promise"
    voter: PeerId
    view: int
    roster: tuple[int, Digest] | None
    """View and value of its highest "roster" certificate."""
    result: tuple[int, Digest] | None
    """View and value of its highest "result" certificate."""
    signature: Annotated[bytes, SIGNATURE] = b""
    """Over it and what its election is about."""

    @property
    def binds(self) -> tuple[tuple[int, int], bytes] | None:
        """Rank and value of the higher of the two."""
        held = [((view, 0), value) for view, value in [self.roster or (-1, b"")] if view >= 0]
        held += [((view, 1), value) for view, value in [self.result or (-1, b"")] if view >= 0]
        return max(held, default=None)


@dataclass(frozen=True)
class Election:
    """What is voted on, and by whom: the same at every voter of the round."""

    run_id: str
    stage: StageIndex
    step: Step
    previous_name: bytes
    """Name of the version that the round starts from; votes of another chain never count here."""
    first_view: int
    """The first view, which needs no promises."""
    weights: Mapping[PeerId, int]
    """Of each voter's vote, in the order of ids: nobody has a vote without one."""
    run_key: PeerId

    @once
    def voters(self) -> tuple[PeerId, ...]:
        """Sorted."""
        return tuple(self.weights)

    def is_quorum(self, voters: Iterable[PeerId], among: Iterable[PeerId]) -> bool:
        """Whether these certify where those `among` whom they are vote."""
        return weight_of(self.weights, voters) >= quorum(weight_of(self.weights, among))

    def is_more_than_liars(self, voters: Iterable[PeerId], among: Iterable[PeerId]) -> bool:
        """Whether these, of those `among` whom they are, weigh more than a third, so that one of them does not lie; or
        nobody among them weighs anything."""
        there = {*among}
        of_all = weight_of(self.weights, there)
        return 3 * weight_of(self.weights, there.intersection(voters)) > of_all or not of_all

    def _needed(self, voters: Iterable[PeerId], among: Iterable[PeerId]) -> str:
        """In words, what is missing."""
        of_all = weight_of(self.weights, among)
        return f"{weight_of(self.weights, voters)} of {of_all} by weight; {quorum(of_all)} are a quorum"

    def voters_in(self, view: int, changed: Reconfiguration | None) -> tuple[PeerId, ...]:
        """Who votes in a view under a reconfiguration that was checked."""
        return self.voters if changed is None or view < changed.first_view else changed.voters

    def check_reconfiguration(self, changed: Reconfiguration, verify: Verify) -> None:
        """Raises RemoteError unless the run key signed it for this round."""
        if (changed.stage, changed.step, changed.previous_name) != (self.stage, self.step, self.previous_name):
            raise RemoteError("protocol", "a reconfiguration of another round")
        if not set(changed.voters) <= set(self.voters) or not changed.voters or changed.first_view <= self.first_view:
            raise RemoteError("protocol", "a reconfiguration names voters or a view that it cannot")
        if not verify(self.run_key, changed.signed_bytes(), changed.signature):
            raise RemoteError("signature", "a reconfiguration is not signed by the run key")

    def ballot(self, phase: Phase, view: int, value: bytes, changed: Reconfiguration | None = None) -> bytes:
        """What a vote signs."""
        return signed_bytes("ballot", [*self._signs(view, changed), phase, view, value])

    def promised(self, promise: Promise, changed: Reconfiguration | None = None) -> bytes:
        """What a promise signs."""
        unsigned = promise.to_value()
        del unsigned["signature"]
        return signed_bytes(Promise.DOMAIN, [*self._signs(promise.view, changed), unsigned])

    def _signs(self, view: int, changed: Reconfiguration | None) -> list[Value]:
        applies = changed is not None and view >= changed.first_view
        under = changed.digest() if applies and changed is not None else b""
        return [self.run_id, self.stage, self.step, self.previous_name, under]

    def check_certificate(self, certificate: Certificate, phase: Phase, value: bytes, verify: Verify) -> None:
        """Raises RemoteError unless a quorum of the voters signed this value in this phase."""
        if certificate.phase != phase or certificate.value != value:
            raise RemoteError("certificate", f"certificate is for another {phase} or phase ({certificate.phase})")
        changed = certificate.reconfiguration
        if changed is not None:
            self.check_reconfiguration(changed, verify)
        voters = self.voters_in(certificate.view, changed)
        names = [vote.voter for vote in certificate.votes]
        if names != sorted(set(names)) or not set(names) <= set(voters):
            raise RemoteError("certificate", "a certificate's votes are not of voters, each once, in order")
        if not self.is_quorum(names, voters):
            raise RemoteError("certificate", f"votes of {self._needed(names, voters)}")
        ballot = self.ballot(phase, certificate.view, value, changed)
        for vote in certificate.votes:
            if not verify(vote.voter, ballot, vote.signature):
                raise RemoteError("certificate", f"a vote is not signed by {vote.voter}", vote.voter)

    def check_promise(
        self, promise: Promise, view: int, verify: Verify, changed: Reconfiguration | None = None
    ) -> None:
        """Raises RemoteError unless it is a voter's promise for this view."""
        if promise.voter not in self.voters_in(view, changed) or promise.view != view:
            raise RemoteError("certificate", f"a promise for view {promise.view} by {promise.voter}, not {view}")
        if any(held is not None and held[0] >= view for held in (promise.roster, promise.result)):
            raise RemoteError("certificate", "a promise names a certificate of a view that has not begun")
        if not verify(promise.voter, self.promised(promise, changed), promise.signature):
            raise RemoteError("signature", f"a promise is not signed by {promise.voter}", promise.voter)

    def bound(self, view: int, proof: "Proof", verify: Verify) -> Certificate | None:
        """The certificate whose value must be proposed in `view`; None if a leader may propose what it likes.

        Raises RemoteError unless the proof holds promises of a quorum and the highest certificate they name.
        """
        if view == self.first_view:
            return None
        changed = proof.reconfiguration
        if changed is not None:
            self.check_reconfiguration(changed, verify)
        names = [promise.voter for promise in proof.promises]
        voters = self.voters_in(view, changed)
        if names != sorted(set(names)) or not self.is_quorum(names, voters):
            raise RemoteError("certificate", f"promises, each once in order, of {self._needed(names, voters)}")
        for promise in proof.promises:
            self.check_promise(promise, view, verify, changed)
        highest = max((p.binds for p in proof.promises if p.binds is not None), default=None)
        if highest is None:
            return None
        if proof.certificate is None or proof.certificate.rank != highest[0]:
            raise RemoteError("certificate", "the highest certificate that was promised is not shown")
        self.check_certificate(proof.certificate, PHASES[highest[0][1]], highest[1], verify)
        return proof.certificate


@dataclass(frozen=True)
class Proof(Record):
    """Why a leader may propose what it proposes."""

    promises: Annotated[tuple[Promise, ...], AtMost(MAX_VOTERS)] = ()
    certificate: Certificate | None = None
    """The highest one named in the promises."""
    reconfiguration: Annotated[Reconfiguration | None, Named("changed")] = None
    """What made those who promise the voters."""

    @property
    def shown_reconfiguration(self) -> Reconfiguration | None:
        """The one under which whoever votes on it is asked to vote."""
        if self.reconfiguration is None and self.certificate is not None:
            return self.certificate.reconfiguration
        return self.reconfiguration


@dataclass
class Voter:
    """What one voter has promised and signed in one round, and what it knows to be certified.

    It forgets nothing while its process lives; a process that is started again votes in no round in which an earlier
    one of its may have.
    """

    election: Election
    me: PeerId
    sign: Sign
    verify: Verify
    promised: int = -1
    """Nothing of a lower view is signed."""
    roster: Certificate | None = None
    """The highest of its phase that this voter knows."""
    result: Certificate | None = None
    changed: Reconfiguration | None = None
    _promise: Promise | None = None
    _cast: dict[tuple[int, Phase], bytes] = field(default_factory=dict)

    def reconfigure(self, changed: Reconfiguration) -> None:
        """Vote under it from its view on, and in no lower one. Raises RemoteError if it is not genuine."""
        if self.changed is None or changed.first_view > self.changed.first_view:
            self.election.check_reconfiguration(changed, self.verify)
            self.changed = changed
            self.promised = max(self.promised, changed.first_view - 1)

    def promise(self, view: int) -> Promise | None:
        """For the leader of `view`; the same again if it is asked again. None once that or a higher view has begun."""
        if self._promise is not None and self._promise.view == view:
            return self._promise
        if view <= self.promised:
            return None
        self.promised = view
        held = [(made.view, made.value) if made is not None else None for made in (self.roster, self.result)]
        unsigned = Promise(self.me, view, held[0], held[1])
        self._promise = replace(unsigned, signature=self.sign(self.election.promised(unsigned, self.changed)))
        return self._promise

    def vote_roster(
        self, view: int, facts: bytes, proof: Proof, *, comes_of: Callable[[bytes], bool] = lambda earlier: False
    ) -> Vote | None:
        """`comes_of`: whether these facts are certified ones with contributions left out.

        Raises RemoteError if the proof does not allow these facts.
        """
        bound = self.election.bound(view, proof, self.verify)
        if bound is not None and (bound.phase != "roster" or not (bound.value == facts or comes_of(bound.value))):
            raise RemoteError("equivocation", f"view {view} proposes other facts than view {bound.view} certified")
        return self._vote("roster", view, facts)

    def vote_result(self, view: int, root: bytes, proof: Proof, *, comes_of: Callable[[bytes], bool]) -> Vote | None:
        """`root` is of a result made of facts that are certified in this view, or of those with contributions left out
        (`comes_of` says whether it is); or the result was certified in an earlier view.

        Raises RemoteError if the proof does not show either.
        """
        certificate = proof.certificate
        if certificate is not None and (certificate.phase, certificate.view) == ("roster", view):
            if not comes_of(certificate.value):
                raise RemoteError("certificate", f"view {view} certified other facts than those of this result")
            self.learn(certificate, certificate.value)
        else:
            bound = self.election.bound(view, proof, self.verify)
            if bound is None or (bound.phase, bound.value) != ("result", root):
                raise RemoteError("equivocation", f"view {view} proposes a result whose roster is not certified")
            self.learn(bound, root)
        return self._vote("result", view, root)

    def vote_commit(self, certificate: Certificate, root: bytes) -> Vote | None:
        """Raises RemoteError unless the certificate is for the result `root`."""
        if certificate.phase != "result":
            raise RemoteError("certificate", "a commit needs the certificate of the result")
        self.learn(certificate, root)
        return self._vote("commit", certificate.view, root)

    def learn(self, certificate: Certificate, value: bytes) -> None:
        """Remember the certificate if it is the highest of its phase. Raises RemoteError if it is not genuine."""
        if certificate.value == value and certificate in (self.roster, self.result):
            return
        self.election.check_certificate(certificate, certificate.phase, value, self.verify)
        self.promised = max(self.promised, certificate.view)
        if certificate.phase == "roster" and (self.roster is None or certificate.view > self.roster.view):
            self.roster = certificate
        if certificate.phase == "result" and (self.result is None or certificate.view > self.result.view):
            self.result = certificate

    def _vote(self, phase: Phase, view: int, value: bytes) -> Vote | None:
        if view < self.promised or self._cast.setdefault((view, phase), value) != value:
            return None
        self.promised = view
        return Vote(self.me, self.sign(self.election.ballot(phase, view, value, self.changed)))


def certificate_of(
    election: Election,
    phase: Phase,
    view: int,
    value: bytes,
    votes: Sequence[Vote],
    changed: Reconfiguration | None = None,
) -> Certificate | None:
    """The certificate these votes make; None while they are too few."""
    if not election.is_quorum([vote.voter for vote in votes], election.voters_in(view, changed)):
        return None
    return Certificate(phase, view, value, tuple(sorted(votes, key=lambda vote: vote.voter)), changed)


def phase_of(text: str) -> Phase:
    """The phase of that name. Raises RemoteError("malformed")."""
    for phase in PHASES:
        if phase == text:
            return phase
    raise RemoteError("malformed", f"phase is {text[:20]!r}, not one of {', '.join(PHASES)}")
