"""What one peer's audits of honest work came to, by the numeric class of who did it: how near the bounds it lay."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from swarm.core.errors import RemoteError
from swarm.core.forms import Integer, StageNumber, Text
from swarm.core.ids import PeerId
from swarm.core.layout import AtMost
from swarm.core.record import Record, Row, SignedValue
from swarm.core.settings import TensorKind

MAX_CLASSES = 16
"""In one peer's word."""
MOST_AUDITS = 1 << 32

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]
NumericClass: TypeAlias = Annotated[str, Text(64)]
"""By the word of whose it is."""


@dataclass(frozen=True)
class Agreed(Row):
    """Audits of one kind of tensor that found it honest."""

    num_audits: Annotated[int, Integer(high=MOST_AUDITS)] = 0
    largest_share: float = 0.0
    """Of the bound past which it would have been fraud, own errors included."""

    def _check_fields(self) -> None:
        if not 0 <= self.largest_share <= 1 or (self.largest_share > 0 and self.num_audits == 0):
            raise RemoteError("malformed", f"{self.num_audits} honest audits at {self.largest_share} of the bound")

    def and_one(self, share: float) -> Self:
        """With one more."""
        return replace(self, num_audits=self.num_audits + 1, largest_share=max(self.largest_share, share))


@dataclass(frozen=True, kw_only=True)
class HonestAudits(Record):
    """Of work of one numeric class."""

    numeric_class: NumericClass
    activation: Agreed = Agreed()
    gradient: Agreed = Agreed()
    """Of activations."""
    contribution: Agreed = Agreed()

    def of(self, kind: TensorKind) -> Agreed:
        return {"activation": self.activation, "gradient": self.gradient, "contribution": self.contribution}[kind]

    def and_one(self, kind: TensorKind, share: float) -> Self:
        """With one more audit of that kind."""
        changed: dict[str, Any] = {kind: self.of(kind).and_one(share)}
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class AuditsMade(SignedValue):
    """One peer's word on its audits since it came to the stage, under the settings in force."""

    DOMAIN: ClassVar[str] = "audits-made"
    run_id: str
    auditor: PeerId
    stage: StageNumber
    version: int
    numeric_class: NumericClass
    """Of the auditor's computations."""
    honest: Annotated[tuple[HonestAudits, ...], AtMost(MAX_CLASSES)]
    """Each class once."""

    def _check_fields(self) -> None:
        classes = [audits.numeric_class for audits in self.honest]
        if len(set(classes)) < len(classes):
            raise RemoteError("malformed", f"audits of {len(classes)} numeric classes, some of them twice")

    def check(self, *, run_id: str, auditor: PeerId, stage: int, version: int, verify: Verify) -> None:
        """Raises RemoteError unless it is the auditor's, of this run, stage and version."""
        if (self.run_id, self.auditor, self.stage, self.version) != (run_id, auditor, stage, version):
            said = f"audits of {self.auditor} at stage {self.stage}, version {self.version}"
            raise RemoteError("malformed", f"{said}, in a report of {auditor} at {stage}, {version}", auditor)
        if not verify(auditor, self.signed_bytes(), self.signature):
            raise RemoteError("signature", f"the word on its audits is not signed by {auditor}", auditor)
