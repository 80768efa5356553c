"""Two statements by one peer, side by side, that no honest peer signs both of.

Signatures alone show it, but for activations: computed twice they may differ by rounding, so both bodies come along.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from swarm.core.canonical import Value, signed_bytes
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.forms import Digest, Octets, StageNumber
from swarm.core.ids import PeerId, Step, Version
from swarm.core.record import Record
from swarm.core.round.contribution import Contribution
from swarm.core.round.voting import Election, Phase, Reconfiguration, Vote
from swarm.core.round.words import Reduction
from swarm.identity.key import verify
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import Bytes, Evidence, Kind, check_head
from verification.pipeline.headers import HopHeader


@dataclass(frozen=True, kw_only=True)
class CastVote(Record):
    """A vote with all that its signature covers."""

    DOMAIN: ClassVar[str] = "ballot"
    run_id: str
    stage: StageNumber
    step: Step
    previous_name: Digest
    under: Annotated[bytes, Octets(max_length=32)]
    """Digest of the reconfiguration that it was cast under; empty if none."""
    phase: Phase
    view: int
    value: Digest
    vote: Vote

    @classmethod
    def of(
        cls, election: Election, phase: Phase, view: int, value: bytes, vote: Vote, changed: Reconfiguration | None
    ) -> "CastVote":
        """The vote in that election."""
        applies = changed is not None and view >= changed.first_view
        return cls(
            run_id=election.run_id,
            stage=election.stage,
            step=election.step,
            previous_name=election.previous_name,
            under=changed.digest() if changed is not None and applies else b"",
            phase=phase,
            view=view,
            value=value,
            vote=vote,
        )

    def signed_bytes(self) -> bytes:
        """As `Election.ballot`."""
        facts: list[Value] = [self.run_id, self.stage, self.step, self.previous_name, self.under]
        return signed_bytes(self.DOMAIN, [*facts, self.phase, self.view, self.value])


Statement: TypeAlias = Contribution | Reduction | CastVote | HopHeader
"""Rosters are not among them: a leader that is started again may honestly propose another in the same view."""

_STATEMENTS: dict[str, type[Contribution] | type[Reduction] | type[CastVote] | type[HopHeader]] = {
    made.DOMAIN: made for made in (Contribution, Reduction, CastVote, HopHeader)
}


@dataclass(frozen=True, kw_only=True)
class Equivocation:
    """Two statements of one peer about the same thing."""

    KIND: ClassVar[Kind] = "equivocation"
    one: Statement
    other: Statement
    bodies: tuple[Bytes, ...] = ()
    """Of two hop headers; none else."""

    @property
    def accused(self) -> PeerId:
        return maker_of(self.one)

    def check_signatures(self, run_id: str) -> None:
        """Raises RemoteError unless both are of this run and signed by the accused."""
        for made in (self.one, self.other):
            if made.run_id != run_id:
                raise RemoteError("evidence", f"a {made.DOMAIN} of run {made.run_id[:12]}, not {run_id[:12]}")
            signature = made.vote.signature if isinstance(made, CastVote) else made.signature
            if maker_of(made) != self.accused or not verify(self.accused, made.signed_bytes(), signature):
                raise RemoteError("signature", f"a {made.DOMAIN} is not signed by {self.accused}")

    @property
    def contradiction(self) -> str | None:
        """What the two say differently about the same thing; None if they do not."""
        one, other = self.one, self.other
        if subject_of(one) != subject_of(other) or _claim_of(one) == _claim_of(other):
            return None
        if isinstance(one, HopHeader) and one.direction == "gradient":
            return None  # a microbatch that is sent on again may come back with another gradient
        return f"two {_PLURALS[one.DOMAIN]} at version {version_of(one)} of stage {one.stage}"

    def to_evidence(self, run: SignedRun) -> Evidence:
        one = self.one
        facts: Value = {"of": one.DOMAIN, "one": one.to_value(), "other": self.other.to_value()}
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=one.stage,
            version=version_of(one),
            run=run,
            facts=facts,
            blobs=self.bodies,
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "Equivocation":
        """Raises RemoteError if it is malformed."""
        fields = Fields("equivocation", evidence.facts)
        of = fields.text("of")
        if of not in _STATEMENTS or len(evidence.blobs) != (2 if of == HopHeader.DOMAIN else 0):
            raise RemoteError("malformed", f"equivocation of {of[:20]!r} with {len(evidence.blobs)} blobs")
        read = _STATEMENTS[of].from_value
        made = cls(one=read(fields.message("one")), other=read(fields.message("other")), bodies=evidence.blobs)
        fields.done()
        named = [hop.body_digest for hop in (made.one, made.other) if isinstance(hop, HopHeader)]
        if named != list(evidence.blob_digests):
            raise RemoteError("digest", "the bodies are not those that the headers name")
        check_head(evidence, cls.KIND, accused=made.accused, stage=made.one.stage, version=version_of(made.one))
        return made


def maker_of(made: Statement) -> PeerId:
    """Who signs it."""
    if isinstance(made, Contribution):
        return made.peer_id
    if isinstance(made, HopHeader):
        return made.producer
    return made.reducer if isinstance(made, Reduction) else made.vote.voter


def version_of(made: Statement) -> Version:
    """Of the stage, that it is about."""
    return made.version if isinstance(made, HopHeader) else Version(made.step)


def subject_of(made: Statement) -> tuple[object, ...]:
    """What an honest peer makes one such statement about."""
    if isinstance(made, HopHeader):
        what = (made.microbatch_id, made.attempt, made.direction, made.parents, made.codec, made.numeric_class)
        return (made.DOMAIN, made.run_id, made.stage, made.version, *what)
    common = (made.DOMAIN, made.run_id, made.stage, made.step, made.previous_name)
    if isinstance(made, Contribution):
        return common
    if isinstance(made, Reduction):
        return (*common, made.part, made.level, made.inputs, made.malformed, made.norm_cap)
    return (*common, made.under, made.phase, made.view)


def _claim_of(made: Statement) -> object:
    if isinstance(made, Reduction):
        return made.digest, made.squares
    if isinstance(made, HopHeader):
        return made.body_digest
    return made.value if isinstance(made, CastVote) else made.signed_bytes()


_PLURALS = {
    Contribution.DOMAIN: "contributions",
    Reduction.DOMAIN: "reductions of one part from the same inputs",
    CastVote.DOMAIN: "votes in one phase of one view",
    HopHeader.DOMAIN: "activations of one microbatch from the same input",
}
