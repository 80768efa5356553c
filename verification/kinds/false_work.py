"""An entry of a contribution beside the papers that it names, which say that it is another's, or nobody's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.round.contribution import MAX_WORK, Contribution, Work
from swarm.core.settings import RunSettings
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import Evidence, Kind, check_head
from verification.round.papers import Papers
from verification.round.receipts import FalseEntryError, IsOfStage, check_receipts


@dataclass(frozen=True, kw_only=True)
class FalseWork:
    """What a member signed for that it did, and what was signed to it."""

    KIND: ClassVar[Kind] = "false_work"
    contribution: Contribution
    entry: int
    """Place in the contribution's work."""
    papers: Papers
    """Under the digests that the entry names."""

    @property
    def accused(self) -> PeerId:
        return self.contribution.peer_id

    @property
    def stage(self) -> StageIndex:
        return self.contribution.stage

    @property
    def version(self) -> Version:
        return Version(self.contribution.step)

    @property
    def work(self) -> Work:
        return self.contribution.work[self.entry]

    def to_evidence(self, run: SignedRun) -> Evidence:
        facts: Value = {
            "contribution": self.contribution.to_value(),
            "entry": self.entry,
            "papers": self.papers.to_value(),
        }
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=self.stage,
            version=self.version,
            run=run,
            facts=facts,
            blobs=(),
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "FalseWork":
        """Raises RemoteError if it is malformed."""
        fields = Fields("false work", evidence.facts)
        contribution = Contribution.from_value(fields.message("contribution"))
        entry = fields.integer("entry", high=MAX_WORK)
        papers = Papers.from_value(fields.message("papers"))
        fields.done()
        if evidence.blobs or entry >= len(contribution.work):
            raise RemoteError(
                "malformed", f"entry {entry} of {len(contribution.work)}, with {len(evidence.blobs)} blobs"
            )
        made = cls(contribution=contribution, entry=entry, papers=papers)
        check_head(evidence, cls.KIND, accused=made.accused, stage=made.stage, version=made.version)
        return made


def entry_check(
    settings: RunSettings, *, is_of_stage: IsOfStage, on_lie: Callable[[FalseWork], None]
) -> Callable[[Contribution, int, Value], bool]:
    """Holds papers that are shown against the entry they are shown for; `on_lie` is told of what they prove."""

    def check(made: Contribution, entry: int, value: Value) -> bool:
        papers, work = Papers.from_value(value), made.work[entry]
        try:
            return check_receipts(papers, work, made, settings, is_of_stage=is_of_stage)
        except FalseEntryError:
            on_lie(FalseWork(contribution=made, entry=entry, papers=papers))
            raise

    return check
