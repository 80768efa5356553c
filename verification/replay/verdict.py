"""A judgement in words and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.core.ids import PeerId
from verification.audit.amplified import Amplified
from verification.audit.evidence import Evidence, Kind


@dataclass(frozen=True)
class Verdict:
    """What the evidence shows; the same on every machine for the exact kinds."""

    kind: Kind
    accused: PeerId
    guilty: bool
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name."""
    is_local: bool = False
    """Whether what is wrong is little enough of its tensor for a fault, if the accused gets it right another time."""

    amplified: Amplified | None = field(default=None, compare=False)
    """Of a contribution, with a sketch if a seed was given."""

    @classmethod
    def of(cls, evidence: Evidence, guilty: bool, reason: str, **figures: float) -> "Verdict":
        return cls(evidence.kind, evidence.accused, guilty, reason, figures)
