"""Whether what one peer's contributions are off by, audit after audit, leads one way: a sum of sketches, and a law.

Rounding has no memory: given all that was before, honest errors have a mean of at most `MovedBounds.bias` (what machines
of two kinds differ by on and on), and what they scatter about it is as likely as its opposite. Then the sum of n
sketches is, but for one peer in 1 / `FALSE_ALARM` in all its time, no longer than

    n * bias + sqrt(2 ln(2 T n (n + 1) / FALSE_ALARM) * sum of min(|sketch|, spread)^2),        T tests: regions and whole

for sums of vectors of fixed lengths under fair signs obey Hoeffding's bound (Pinelis, "Optimum Bounds for the
Distributions of Martingales in Banach Spaces", 1994, theorem 3.5, of a Hilbert space), 1 / (n (n + 1)) sums to 1 over all
n, and a sketch is linear. A bias that is held up grows like n and meets the bound, as `audits_needed` says.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verification.audit.amplified import MovedBounds, Sketch
from verification.audit.tolerance import CHUNK_FACTOR

FALSE_ALARM = 1e-6
"""Chance that an honest peer is ever found to lead one way, by one who audits it."""
LONGEST = 256
"""After so many audits the sum begins anew: what was honest long ago hides nothing."""


@dataclass(frozen=True)
class RunningBias:
    """Of one peer, as one auditor has seen it under one seed."""

    bounds: MovedBounds
    num_audits: int = 0
    total: Sketch = field(default_factory=lambda: np.zeros((0, 0)))
    spread: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Of the whole and of each region: the sum of squares that stands in the law."""
    shares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Of the stage's values in each region."""

    def after(self, sketch: Sketch, sizes: NDArray[np.int64]) -> "RunningBias":
        """One audit more; `sizes` as `region_sizes` has them."""
        if self.num_audits >= LONGEST:
            return RunningBias(self.bounds).after(sketch, sizes)
        shares = sizes / sizes.sum()
        lengths, caps = _lengths(sketch, shares), self._scaled(self.bounds.spread, len(shares))
        first = self.num_audits == 0
        return RunningBias(
            self.bounds,
            self.num_audits + 1,
            sketch if first else self.total + sketch,
            np.minimum(lengths, caps) ** 2 + (0 if first else self.spread),
            shares,
        )

    @property
    def share(self) -> float:
        """Of what an honest peer may come to, the test that is nearest it; past 1 it leads one way."""
        if not self.num_audits:
            return 0.0
        tests = len(self.spread)
        chance = law_factor(self.num_audits, tests) * np.sqrt(self.spread)
        allowed = self.num_audits * self._scaled(self.bounds.bias, tests - 1) + chance
        return float((_lengths(self.total, self.shares) / allowed).max())

    @property
    def is_led(self) -> bool:
        return self.share > 1.0 and not self.bounds.report_only

    @staticmethod
    def _scaled(bound: float, regions: int) -> NDArray[np.float64]:
        """Of the whole, and of each region: few values scatter more than many."""
        return np.array([bound, *[CHUNK_FACTOR * bound] * regions])


def law_factor(num_audits: int, tests: int) -> float:
    """By what the root of the sum of squares is multiplied."""
    return math.sqrt(2.0 * math.log(2.0 * tests * num_audits * (num_audits + 1) / FALSE_ALARM))


def audits_needed(bias: float, bounds: MovedBounds, *, tests: int) -> int | None:
    """After how many audits a bias that is always the same is found, in learning rates a step over the whole; None:
    not before the sum begins anew."""
    for num in range(1, LONGEST + 1):
        chance = law_factor(num, tests) * math.sqrt(num) * min(bias, bounds.spread)
        if num * bias > num * bounds.bias + chance:
            return num
    return None


def _lengths(sketch: Sketch, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the whole, and of each region."""
    squares = (sketch * sketch).sum(axis=1)
    return np.sqrt(np.array([float((shares * squares).sum()), *squares]))
