"""Whether what one peer's contributions are off by, audit after audit, leads one way: a sum of sketches, and a law.

Rounding has no memory. Given all that was before, an honest error is in the mean no longer than `MovedBounds.bias` (by
which machines of two kinds differ on and on), never longer than `MovedBounds.spread`, and about its mean it goes to one
side as often as to the other. Then the sum of n sketches z is, but for `FALSE_ALARM` of all honest peers in all their
time, no longer than

    n * bias + sqrt(2 ln(2 T n (n + 1) / FALSE_ALARM) * sum of (min(|z|, spread) + bias)^2)

in any of T tests: the stage's regions and the whole. For sums of vectors of given lengths under fair signs obey
Hoeffding's bound (Pinelis, "Optimum Bounds for the Distributions of Martingales in Banach Spaces", 1994, theorem 3.5),
1 / (n (n + 1)) sums to 1 over all n, and a sketch is linear. A bias that is held up grows like n and meets the bound,
as `audits_needed` says. What is longer than `MOST_SPREADS` spreads counts as so long: one broken audit proves nothing.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.core.canonical import digest
from swarm.core.ids import PeerId, Step
from swarm.core.kept import keep_newest
from verification.audit.amplified import MovedBounds, Sketch, region_sizes
from verification.audit.tolerance import CHUNK_FACTOR

FALSE_ALARM = 1e-6
"""Chance that an honest peer is ever found to lead one way, by one who audits it."""
MOST_SPREADS = 4.0
"""That one audit adds at most: five must agree before the law can be met."""
MOST_PEERS = 256
"""Whose sums one auditor keeps: those audited last."""
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
        caps = self._scaled(self.bounds.spread, len(shares))
        sketch = _no_longer(sketch, shares, MOST_SPREADS * caps)
        lengths = _lengths(sketch, shares)
        off, first = self._scaled(self.bounds.bias, len(shares)), self.num_audits == 0
        return RunningBias(
            self.bounds,
            self.num_audits + 1,
            sketch if first else self.total + sketch,
            (np.minimum(lengths, caps) + off) ** 2 + (0 if first else self.spread),
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
    """After how many audits a bias that is always the same is found, in learning rates a step
    over the whole; None: not before the sum begins anew."""
    bias = min(bias, MOST_SPREADS * bounds.spread)
    for num in range(1, LONGEST + 1):
        chance = law_factor(num, tests) * math.sqrt(num) * (min(bias, bounds.spread) + bounds.bias)
        if num * bias > num * bounds.bias + chance:
            return num
    return None


def _lengths(sketch: Sketch, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the whole, and of each region."""
    squares = (sketch * sketch).sum(axis=1)
    lengths: NDArray[np.float64] = np.sqrt(np.array([float((shares * squares).sum()), *squares]))
    return lengths


class RunningBiases:
    """The sums that one auditor, or the run key, keeps: of each peer, under a seed that nobody else knows."""

    def __init__(self, secret: bytes, bounds: MovedBounds) -> None:
        self.bounds = bounds
        self._secret = secret
        self._held: OrderedDict[PeerId, tuple[RunningBias, frozenset[Step]]] = OrderedDict()

    def seed_for(self, peer: PeerId) -> bytes:
        """Of the signs of the peer's sketches."""
        return bias_seed(self._secret, peer)

    def after(self, peer: PeerId, step: Step, sketch: Sketch, *, num_values: int) -> RunningBias:
        """One audit more of a stage's values; the same step counts once."""
        held, steps = self._held.pop(peer, (RunningBias(self.bounds), frozenset[Step]()))
        if step not in steps:
            held = held.after(sketch, region_sizes(num_values))
            steps = frozenset({step}) if held.num_audits == 1 else steps | {step}
        self._held[peer] = held, steps
        keep_newest(self._held, MOST_PEERS)
        return held

    def forget(self, peer: PeerId) -> None:
        """It was put out, or begins again."""
        self._held.pop(peer, None)


def bias_seed(secret: bytes, peer: PeerId) -> bytes:
    """What draws the signs of the sketches of one peer's contributions: whoever knows it can hide a bias."""
    return digest("bias-seed", [secret, peer])


def _no_longer(sketch: Sketch, shares: NDArray[np.float64], most: NDArray[np.float64]) -> Sketch:
    """Each region's row, and then the whole, cut to these lengths."""
    rows = np.sqrt((sketch * sketch).sum(axis=1))
    cut: Sketch = sketch * np.minimum(1.0, most[1:] / np.maximum(rows, most[1:]))[:, None]
    whole = float(_lengths(cut, shares)[0])
    return cut * min(1.0, float(most[0]) / max(whole, float(most[0])))
