"""A reducer's signed word for a part, beside the inputs it names."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.core.round.words import Reduction
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import Bytes, Evidence, Kind, check_head


@dataclass(frozen=True, kw_only=True)
class ReducerFraud:
    """A reduction to recompute: exact, so that one differing bit is a lie."""

    KIND: ClassVar[Kind] = "reducer_fraud"
    reduction: Reduction
    bodies: tuple[Bytes, ...]
    """The encoded part of each input, in order."""

    @property
    def accused(self) -> PeerId:
        return self.reduction.reducer

    def to_evidence(self, run: SignedRun) -> Evidence:
        facts: Value = {"reduction": self.reduction.to_value()}
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=self.reduction.stage,
            version=Version(self.reduction.step),
            run=run,
            facts=facts,
            blobs=self.bodies,
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "ReducerFraud":
        """Raises RemoteError if it is malformed, or if the bytes are not the inputs'."""
        fields = Fields("reducer fraud", evidence.facts)
        reduction = Reduction.from_value(fields.message("reduction"))
        fields.done()
        if [one.digest for one in reduction.inputs] != list(evidence.blob_digests):
            raise RemoteError("digest", f"{len(evidence.blobs)} blobs are not the {len(reduction.inputs)} inputs")
        made = cls(reduction=reduction, bodies=evidence.blobs)
        version = Version(reduction.step)
        check_head(evidence, cls.KIND, accused=made.accused, stage=reduction.stage, version=version)
        return made
