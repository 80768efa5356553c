"""A source's birth record, held against the run's data order; the data itself is too large to carry."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import Evidence, Kind, check_head
from verification.pipeline.headers import BirthRecord


def differences(birth: BirthRecord, tokens_BL: NDArray[np.int64], targets_BL: NDArray[np.int64]) -> list[str]:
    """What the record says otherwise than these, which the data order has for its microbatch."""
    wanted = BirthRecord.of_batch(
        birth.run_id,
        birth.source,
        birth.kind,
        birth.microbatch_id,
        attempt=birth.attempt,
        step=birth.step,
        tokens_BL=tokens_BL,
        targets_BL=targets_BL,
    )
    return [
        name
        for name, found, due in (
            ("shape", birth.shape, wanted.shape),
            ("number of targets", birth.num_targets, wanted.num_targets),
            ("tokens", birth.tokens_digest, wanted.tokens_digest),
            ("targets", birth.targets_digest, wanted.targets_digest),
            ("documents", birth.document_bounds, wanted.document_bounds),
        )
        if found != due
    ]


@dataclass(frozen=True, kw_only=True)
class DataFraud:
    """A birth record for training whose tokens or targets are not its microbatch's."""

    KIND: ClassVar[Kind] = "data_fraud"
    birth: BirthRecord

    @property
    def accused(self) -> PeerId:
        return self.birth.source

    def to_evidence(self, run: SignedRun) -> Evidence:
        facts: Value = {"birth": self.birth.to_value()}
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=StageIndex(0),
            version=Version(self.birth.step),
            run=run,
            facts=facts,
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "DataFraud":
        """Raises RemoteError if it is malformed."""
        fields = Fields("data fraud", evidence.facts)
        birth = BirthRecord.from_value(fields.message("birth"))
        fields.done()
        if evidence.blobs or birth.kind != "train":
            raise RemoteError("malformed", f"data fraud of kind {birth.kind} with {len(evidence.blobs)} blobs")
        made = cls(birth=birth)
        check_head(evidence, cls.KIND, accused=made.accused, stage=StageIndex(0), version=Version(birth.step))
        return made
