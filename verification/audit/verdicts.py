"""The form of verdicts: who is said to have done what, and whose signature makes it count.

A ban is for ever and signed by the run key. A quarantine lasts until the run key pardons it; a jury, drawn after the
evidence was committed, can impose one too. Jurors weigh what they did lately, and less than a third of a stage's weight
convicts nobody: in a stage of 17 members or fewer never, in a larger one three times in 10,000 charges at most.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from swarm.core.audit.beacon import Beacon
from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Octets, StageNumber, Text
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.layout import AtMost, Beside
from swarm.core.record import Record
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import MAX_PARTS, Charge, Result, Roster
from swarm.core.seats import drawn, seats, weight_of
from swarm.identity.signed_record import SignedRecord
from verification.audit.tolerance import Grade

FEWEST_REPLICAS = 5
"""A stage with fewer that did any work has no jury: without accuser and accused fewer than three are left."""
MOST_JURORS = 15
"""Where no more are left all of them judge, and more than half of their weight convicts; else so many are drawn."""
OF_THE_MOST = 12
"""Of those drawn convict: 15 draws hit so many of a third with a chance of 0.0003."""


@dataclass(frozen=True)
class _Signed(SignedRecord):
    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.shallow_value())

    def _check_signature(self, run_id: str, expected_run_id: str, signer: PeerId) -> None:
        if run_id != expected_run_id:
            raise RemoteError("protocol", f"{self.DOMAIN} of run {run_id[:12]}, not {expected_run_id[:12]}")
        if not self.is_signed_by(signer):
            raise RemoteError("signature", f"{self.DOMAIN} is not signed by {signer}")


@dataclass(frozen=True)
class _Charge(Record):
    """Who is said to have done what, and which evidence says so."""

    run_id: str
    peer_id: PeerId
    """The accused."""
    stage: StageNumber
    version: Version
    """Of the stage, at the deed."""
    kind: Annotated[str, Text(64)]
    """The evidence's."""
    evidence_digest: Digest

    @property
    def facts(self) -> tuple[str, PeerId, StageIndex, Version, str, bytes]:
        """The charge, for another form of it."""
        return self.run_id, self.peer_id, self.stage, self.version, self.kind, self.evidence_digest


@dataclass(frozen=True)
class Accusation(_Charge, kind="charge"):
    """A charge before a jury: its digest in a certified contribution is the commitment to it."""

    DOMAIN: ClassVar[str] = "charge"

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.to_value())


@dataclass(frozen=True)
class Ban(_Charge, _Signed):
    """The run key's last word on a peer: nobody takes anything from it any more."""

    DOMAIN: ClassVar[str] = "ban"

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)


@dataclass(frozen=True)
class JurorVote(_Charge, _Signed, kind="juror-vote"):
    """What a juror found when it replayed the evidence. It covers the whole charge, so that it counts for no other."""

    DOMAIN: ClassVar[str] = "juror-vote"
    accuser: PeerId
    committed_at: Step
    """The step whose roster has the charge in the accuser's contribution."""
    juror: PeerId
    verdict: Grade

    def check(self, run_id: str) -> None:
        """Raises RemoteError unless the juror signed it in this run."""
        self._check_signature(self.run_id, run_id, self.juror)


@dataclass(frozen=True)
class Quarantine(_Charge, _Signed):
    """A peer is kept out until it is pardoned: by the run key's signature, or by jurors' votes and no signature."""

    DOMAIN: ClassVar[str] = "quarantine"
    votes: Annotated[tuple[JurorVote, ...], AtMost(MOST_JURORS), Beside()] = ()
    signature: Annotated[bytes, Octets(max_length=64), Beside()] = field(default=b"", kw_only=True)

    @property
    def is_by_jurors(self) -> bool:
        return not self.signature

    @property
    def accusation(self) -> Accusation:
        return Accusation(*self.facts)

    @property
    def summons(self) -> tuple[PeerId, Step]:
        """Who brought the charge, and in which step's roster. Raises RemoteError unless all votes say the same."""
        found = {(vote.accuser, vote.committed_at) for vote in self.votes}
        if len(found) != 1:
            raise RemoteError("verdict", f"the votes on {self.peer_id} are of {len(found)} charges, not of one")
        return found.pop()

    def check(self, run_id: str, run_key: PeerId, *, jury: "DrawnJury | None" = None) -> None:
        """Raises RemoteError unless the run key signed it or enough of the jury found fraud."""
        if self.signature:
            self._check_signature(self.run_id, run_id, run_key)
            return
        _ = self.summons
        if jury is None:
            raise RemoteError("verdict", f"no jury was drawn on {self.peer_id}")
        for vote in self.votes:
            vote.check(run_id)
            if vote.juror not in jury.weights:
                raise RemoteError("verdict", f"{vote.juror} was not drawn as a juror of {self.peer_id}", vote.juror)
            if vote.facts != self.facts:
                raise RemoteError("verdict", f"{vote.juror} voted on another charge than {self.peer_id}'s quarantine")
        found = {vote.juror for vote in self.votes if vote.verdict is Grade.FRAUD}
        if not jury.convicts(found):
            weight = weight_of(jury.weights, found)
            raise RemoteError("verdict", f"jurors of weight {weight} found {self.peer_id} guilty, not {jury.needed}")

    def _check_fields(self) -> None:
        if len(self.signature) not in (0, 64):
            raise RemoteError("malformed", f"quarantine.signature is of {len(self.signature)} bytes, not 0 or 64")


@dataclass(frozen=True)
class Pardon(_Signed):
    """The run key lifts quarantines, debts and suspicions of up to `version`, and no ban."""

    DOMAIN: ClassVar[str] = "pardon"
    run_id: str
    peer_id: PeerId
    version: Version
    acquitted: bool
    """True: it did no wrong, and is what it was. False: it was a fault, and begins again on probation."""

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)


@dataclass(frozen=True)
class Plea(_Signed):
    """The accused's word on what its work comes to when it does it again, before it is told what others found."""

    DOMAIN: ClassVar[str] = "plea"
    run_id: str
    peer_id: PeerId
    stage: StageNumber
    version: Version
    evidence_digest: Digest
    """Of the evidence, without a past, that it was asked about."""
    body_digests: Annotated[tuple[Digest, ...], AtMost(MAX_PARTS)]

    def check(self, run_id: str) -> None:
        """Raises RemoteError unless the accused signed it in this run."""
        self._check_signature(self.run_id, run_id, self.peer_id)


@dataclass(frozen=True)
class DrawnJury:
    """Who judges a charge, and what it takes to convict."""

    weights: Mapping[PeerId, int]
    """Of each juror's vote."""
    needed: int
    """Weight of those who must find fraud."""

    def convicts(self, found: Iterable[PeerId]) -> bool:
        """Whether these, who found fraud, are enough."""
        return weight_of(self.weights, found) >= self.needed


def jury_of(
    result: Result, after: RoundBasis, accusation: Accusation, accuser: PeerId, beacon: Callable[[Roster], Beacon]
) -> DrawnJury | None:
    """The jury on what the accuser committed to in this certified result, `after` being the basis of the version that
    it made, and `beacon` its round's; none below five replicas.

    Raises RemoteError if it did not.
    """
    made = result.roster.commitment_of(accuser)
    charge = Charge(accusation.peer_id, accusation.digest())
    if made is None or charge not in made.charges or accusation.stage != made.stage:
        raise RemoteError("verdict", f"{accuser} accused nobody of that in step {result.roster.step}", accuser)
    if after.root != result.root():
        raise RemoteError("fork", f"step {result.roster.step} of stage {made.stage} did not make this version")
    return jurors(after, accuser=accuser, accused=accusation.peer_id, beacon=lambda: beacon(result.roster))


@dataclass(frozen=True)
class Promotion(_Signed):
    """The run key ends a probation: from `version` on the peer may train."""

    DOMAIN: ClassVar[str] = "promotion"
    run_id: str
    peer_id: PeerId
    stage: StageNumber
    version: Version
    """Of the stage."""

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)


@dataclass(frozen=True)
class Debt(_Signed):
    """The run key's word that a peer did not serve an audit of its work at `version`: it is on probation again."""

    DOMAIN: ClassVar[str] = "debt"
    run_id: str
    peer_id: PeerId
    version: Version

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)


def jurors(after: RoundBasis, *, accuser: PeerId, accused: PeerId, beacon: Callable[[], Beacon]) -> DrawnJury | None:
    """The stage's members without both parties, or those of them who are drawn, by their work; none below five
    replicas, where the run key judges alone.

    `after` is of the first version made after the evidence was committed, and `beacon`, which is asked for only where
    jurors are drawn, of the round that made it: until then nobody could choose by its jurors. Whatever is brought
    against one peer in one round has the same jurors: several charges are no several draws. Raises as `beacon` does.
    """
    weights = seats(after.work_of)
    if len(weights) < FEWEST_REPLICAS:
        return None
    others = {peer: weight for peer, weight in weights.items() if peer not in (accuser, accused)}
    if len(others) <= MOST_JURORS:
        return DrawnJury(others, sum(others.values()) // 2 + 1)
    chosen = drawn(others, "juror", beacon().value, accused)[:MOST_JURORS]
    return DrawnJury(dict.fromkeys(chosen, 1), OF_THE_MOST)
