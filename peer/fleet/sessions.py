"""How long peers stay: heavy-tailed laws as measured, and what is left of a session.

Weibull with a shape below 1: most sessions are short, and who has stayed long stays longer. Stutzbach and Rejaie
("Understanding churn in peer-to-peer networks", IMC 2006) find that of file sharers: no exponential law, a large part
of those present very stable, the rest gone soon. Nurmi, Brevik and Wolski ("Modeling machine availability in enterprise
and wide-area distributed computing environments", Euro-Par 2005) and Javadi et al. ("Mining for statistical models of
availability in large-scale distributed systems", MASCOTS 2009: 230,000 hosts of SETI@home) find it of machines.

Bathtub: Kadupitiya, Jadhao and Sharma ("Modeling the temporally constrained preemptions of transient cloud VMs", HPDC
2020) measured preemptible machines, which end early, or seldom, or at their limit of 24 hours. Their law is
F(t) = A (1 - exp(-t / t1) + exp((t - b) / t2)); here A = 0.45, t1 = 1 h, t2 = 0.8 h, b = 24 h, stretched to the mean.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Law = Literal["weibull", "exponential", "bathtub"]

HOUR_S = 3600.0
_A, _T1_S, _T2_S, _B_S = 0.45, HOUR_S, 0.8 * HOUR_S, 24 * HOUR_S
_GRID_S = 60.0
_PER_PEER = 20


@dataclass(frozen=True)
class Sessions:
    """Lengths of sessions with a given mean, from chance that is given too."""

    law: Law
    mean_s: float
    shape: float = 0.5
    """Of the Weibull law."""

    def draw(self, rng: random.Random) -> float:
        """Length of a session that begins now."""
        if self.law == "exponential":
            return rng.expovariate(1 / self.mean_s)
        if self.law == "weibull":
            scale_s = self.mean_s / math.gamma(1 + 1 / self.shape)
            return float(scale_s * (-math.log(1 - rng.random())) ** (1 / self.shape))
        at = bisect_left(_BATHTUB, rng.random() * _BATHTUB[-1])
        return (at + 0.5) * _GRID_S * self.mean_s / _BATHTUB_MEAN_S

    def draw_present(self, num: int, rng: random.Random) -> list[float]:
        """What is left of the sessions of `num` peers met at any time: who stays long is met more often."""
        lengths = [self.draw(rng) for _ in range(_PER_PEER * num)]
        met = rng.choices(lengths, cum_weights=list(accumulate(lengths)), k=num)
        return [length_s * rng.random() for length_s in met]


def _bathtub() -> Sequence[float]:
    at_s = [(step + 1) * _GRID_S for step in range(round(_B_S / _GRID_S))]
    return [_A * (1 - math.exp(-t / _T1_S) + math.exp((t - _B_S) / _T2_S)) for t in at_s]


_BATHTUB = _bathtub()
_BATHTUB_MEAN_S = sum((1 - share / _BATHTUB[-1]) * _GRID_S for share in _BATHTUB) + _GRID_S
