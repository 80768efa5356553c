"""A signed message beside the bytes it commits to, which no honest program writes."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.round.contribution import MAX_PARTS, Contribution
from swarm.core.round.words import Reduction
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import Bytes, Evidence, Kind, check_head
from verification.pipeline.headers import HopHeader


@dataclass(frozen=True, kw_only=True)
class ProtocolViolation:
    """A contribution with one of its encoded parts, a reduction or a hop header with its body.

    The bytes do not decode, or are of another sum of squares than a reduction says; or they do decode, and the
    reduction leaves them out as malformed.
    """

    KIND: ClassVar[Kind] = "protocol_violation"
    message: Contribution | Reduction | HopHeader
    part: int
    """Of the contribution. Of a reduction 0 for its own bytes, and from 1 on for those of whom it leaves out, in its
    order. Else 0."""
    body: Bytes

    @property
    def accused(self) -> PeerId:
        if isinstance(self.message, Reduction):
            return self.message.reducer
        return self.message.producer if isinstance(self.message, HopHeader) else self.message.peer_id

    @property
    def signed_bytes(self) -> bytes:
        return self.message.signed_bytes()

    @property
    def stage(self) -> StageIndex:
        return self.message.stage

    @property
    def version(self) -> Version:
        return self.message.version if isinstance(self.message, HopHeader) else Version(self.message.step)

    @property
    def committed_digest(self) -> bytes:
        """BLAKE3 that the message gives for the body. Raises RemoteError if it gives none."""
        if isinstance(self.message, HopHeader):
            return self.message.body_digest
        if isinstance(self.message, Reduction):
            return self._digest_in(self.message)
        if self.part >= len(self.message.part_digests):
            raise RemoteError("malformed", f"contribution of {len(self.message.part_digests)} parts has no {self.part}")
        return self.message.part_digests[self.part]

    def _digest_in(self, made: Reduction) -> bytes:
        if self.part == 0:
            return made.digest
        if made.level == "shares" or self.part > len(made.malformed):  # who combines shares has seen no contribution
            raise RemoteError("malformed", f"a reduction that leaves out {len(made.malformed)} has no {self.part}")
        return made.malformed[self.part - 1].digest

    def to_evidence(self, run: SignedRun) -> Evidence:
        facts: Value = {"of": self.message.DOMAIN, "message": self.message.to_value(), "part": self.part}
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=self.stage,
            version=self.version,
            run=run,
            facts=facts,
            blobs=(self.body,),
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "ProtocolViolation":
        """Raises RemoteError if it is malformed, or if the bytes are not those committed to."""
        fields = Fields("protocol violation", evidence.facts)
        of = fields.text("of")
        if of not in _MESSAGES or len(evidence.blobs) != 1:
            raise RemoteError("malformed", f"violation by a {of[:20]!r} with {len(evidence.blobs)} blobs")
        message = _MESSAGES[of].from_value(fields.message("message"))
        part = fields.integer("part", high=_MOST_PARTS.get(of, 0))
        fields.done()
        made = cls(message=message, part=part, body=evidence.blobs[0])
        if evidence.blob_digests[0] != made.committed_digest:
            raise RemoteError("digest", "the bytes are not those that the message commits to")
        check_head(evidence, cls.KIND, accused=made.accused, stage=made.stage, version=made.version)
        return made


class ViolationError(RemoteError):
    """A message that proves its maker's misbehaviour by itself."""

    def __init__(self, case: ProtocolViolation, error: RemoteError) -> None:
        super().__init__(error.kind, str(error), case.accused)
        self.case = case


_MESSAGES: dict[str, type[Contribution] | type[Reduction] | type[HopHeader]] = {
    made.DOMAIN: made for made in (Contribution, Reduction, HopHeader)
}
_MOST_PARTS = {Contribution.DOMAIN: MAX_PARTS, Reduction.DOMAIN: MAX_MEMBERS}
