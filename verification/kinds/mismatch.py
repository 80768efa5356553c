"""What the two kinds of evidence share that are proved by a replay: juries and pleas are about them."""

from typing import TypeAlias

from swarm.core.round.contribution import Charge
from verification.audit.evidence import Evidence
from verification.audit.verdicts import Accusation
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.replay_mismatch import ReplayMismatch

Mismatch: TypeAlias = ReplayMismatch | HopMismatch

MISMATCHES = (ReplayMismatch.KIND, HopMismatch.KIND)


def accusation_of(light: Evidence) -> Accusation:
    """The charge that a jury is brought, of evidence without a past."""
    return Accusation(light.run_id, light.accused, light.stage, light.version, light.kind, light.digest())


def charge_of(evidence: Evidence) -> Charge | None:
    """By what whoever brought this evidence before a jury committed to it; None of what goes before none. Raises
    RemoteError if it is malformed."""
    if evidence.kind not in MISMATCHES:
        return None
    light = mismatch_of(evidence).without_past().to_evidence(evidence.run)
    return Charge(light.accused, accusation_of(light).digest())


def mismatch_of(evidence: Evidence) -> Mismatch:
    """The case. Raises RemoteError if it is malformed, or of another kind."""
    is_hop = evidence.kind == HopMismatch.KIND
    return HopMismatch.from_evidence(evidence) if is_hop else ReplayMismatch.from_evidence(evidence)
