"""A first glance at what comes in: is its norm within a band of what norms are here?

A screen that trips is no verdict. It makes its sender suspicious, whose work is then audited more often.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

ScreenKind = Literal["activation_norm", "gradient_norm", "contribution_norm"]
"""Of an activation, of an activation's gradient, of a part of a contribution to an averaging round."""

BANDS: dict[ScreenKind, float] = {"activation_norm": 8.0, "gradient_norm": 32.0, "contribution_norm": 16.0}
"""How many times larger or smaller than its average a norm may be. Gradients of easy and hard texts differ most."""
WINDOWS: dict[ScreenKind, int] = {"activation_norm": 64, "gradient_norm": 64, "contribution_norm": 16}
"""About how many norms the moving average reaches back."""
FEWEST_SEEN = 8
"""Nothing trips before so many norms: there is no average yet."""


class Screened(NamedTuple):
    ok: bool
    reason: str


@dataclass
class NormScreen:
    """Moving geometric average of norms, and the band around it.

    What is outside the band moves the average as far as the band's edge would: one liar does not shift it far, and
    honest norms that have changed for good are believed in the end.
    """

    band: float
    window: int

    def __post_init__(self) -> None:
        if not (self.band > 1.0 and self.window >= 1):
            raise ValueError(f"a band of {self.band} (more than 1) over {self.window} norms (1 or more)")
        self._seen = 0
        self._log_average = 0.0

    @classmethod
    def of_kind(cls, kind: ScreenKind) -> "NormScreen":
        return cls(band=BANDS[kind], window=WINDOWS[kind])

    @property
    def average(self) -> float:
        """1 before anything was seen."""
        return math.exp(self._log_average)

    def is_near(self, value: float, other: float) -> bool:
        """Whether the two, both finite, are within the band of each other."""
        if value <= 0 or other <= 0:
            return value == other
        return abs(math.log(value / other)) <= math.log(self.band)

    def check(self, value: float) -> Screened:
        """Whether the norm is within the band of those before it. It counts for those after it."""
        if not math.isfinite(value):
            return Screened(False, f"norm is {value}")
        average, is_known, reach = self.average, self._seen >= FEWEST_SEEN, math.log(self.band)
        deviation = math.log(value) - self._log_average if value > 0 else -math.inf
        if self._seen == 0 and value == 0:
            return Screened(True, "norm is 0, and there is none to compare it with")
        within = deviation if self._seen == 0 else min(max(deviation, -reach), reach)
        self._seen += 1
        self._log_average += within / min(self._seen, self.window)
        if is_known and abs(deviation) > reach:
            return Screened(False, f"norm {value:.3g} is not within {self.band:g} times the average of {average:.3g}")
        return Screened(True, f"norm {value:.3g}, average {average:.3g}")
