"""One more contribution of a peer that an auditor's sketches say is led one way, laid before the run key to replay.

It may be within every bound by itself: the run key adds its own sketch of it to those it has of the peer
(`verification.audit.running_bias`).
"""

from typing import ClassVar

from verification.audit.evidence import Kind
from verification.kinds.mismatch import MISMATCHES
from verification.kinds.replay_mismatch import ReplayMismatch


class Bias(ReplayMismatch):
    """What a replay of the whole contribution needs: with parts."""

    KIND: ClassVar[Kind] = "bias"

    @classmethod
    def of(cls, case: ReplayMismatch) -> "Bias":
        """The same contribution."""
        return cls(**vars(case))


WITH_A_STATE = (*MISMATCHES, Bias.KIND)
"""Kinds of evidence that hold a stage's whole state."""
