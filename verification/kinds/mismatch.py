"""What the two kinds of evidence share that are proved by a replay: juries and pleas are about them."""

from typing import TypeAlias

from verification.audit.evidence import Evidence
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.replay_mismatch import ReplayMismatch

Mismatch: TypeAlias = ReplayMismatch | HopMismatch

MISMATCHES = (ReplayMismatch.KIND, HopMismatch.KIND)


def mismatch_of(evidence: Evidence) -> Mismatch:
    """The case. Raises RemoteError if it is malformed, or of another kind."""
    is_hop = evidence.kind == HopMismatch.KIND
    return HopMismatch.from_evidence(evidence) if is_hop else ReplayMismatch.from_evidence(evidence)
