"""Whether a certified gradient makes a step: a norm far beyond the last ones makes none.

The norm is certified, those of the last steps are part of the state, the factor is the run's: so every replica, joiner
and auditor decides alike, and nobody votes on it again.
"""

import math
from collections.abc import Sequence

NUM_CERTIFIED_NORMS = 16
"""The state remembers this many norms of certified gradients: they bound the next ones."""


def median_norm(certified_norms: Sequence[float]) -> float | None:
    """Of the last certified norms; None while there are fewer than 16."""
    norms = sorted(certified_norms)
    if len(norms) < NUM_CERTIFIED_NORMS:
        return None
    return (norms[len(norms) // 2] + norms[(len(norms) - 1) // 2]) / 2


def why_skipped(norm: float | None, certified_norms: Sequence[float], *, factor: float) -> str | None:
    """Why a gradient of this norm makes no step; None if it makes one. A `norm` of None: the round had no work.

    `factor` is `optimizer.skip_norm_factor`; 0 sets no bound.
    """
    if norm is None:
        return "the round had no work"
    if norm == 0.0 or not math.isfinite(norm):
        return f"the gradient's norm is {norm}"
    median = median_norm(certified_norms)
    if factor and median and norm > factor * median:
        return f"the gradient's norm {norm:.4g} is more than {factor:g} times {median:.4g}, the median of the last"
    return None


def norms_after(norm: float | None, certified_norms: Sequence[float]) -> list[float]:
    """What is remembered once the step is over, taken or skipped.

    A norm too long to make a step counts too: if gradients have become longer for good, half of what is remembered
    says so after eight steps, and training goes on.
    """
    if norm is None or norm == 0.0 or not math.isfinite(norm):
        return list(certified_norms)
    return [*certified_norms, norm][-NUM_CERTIFIED_NORMS:]
