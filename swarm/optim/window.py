"""A window's mathematics: inner steps from a public start, their pseudo-gradient, and the outer step of its mean.

A member starts at weights that everyone can work out, takes H steps by itself and says start - end. The round's mean
of that makes the next version: theta <- theta - a * mean. With `delay` = 1 the round of window t runs during window
t + 1, which therefore starts from the last certified weights moved on by what the member itself said of window t.
(Douillard et al., "DiLoCo", 2023, with SGD as outer optimizer.)

Inner moments are public: everyone begins with the same, made of the members' at their windows' ends. They go on as if
one optimizer had taken all inner steps, the powers of its betas included: to take young moments for grown ones cost
more loss than three local steps do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import windows
from kernels.threads import ONE_THREAD, Threads
from swarm.optim.exact import ExactOptimizer

Floats = NDArray[np.float32]


def pseudo_gradient(start: Floats, end: Floats, *, threads: Threads = ONE_THREAD) -> Floats:
    """What a window contributes: start - end."""
    out = np.empty_like(start)
    windows.difference(start, end, out, threads=threads)
    return out


def outer_step(weights: Floats, direction: Floats, *, rate: float, threads: Threads = ONE_THREAD) -> Floats:
    """weights - fp32(rate) * direction, in an array of its own.

    `direction` is the decoded result of a round; or, for where a window starts under `delay` = 1, the member's own
    contribution of the window before, decoded as everyone decodes it.
    """
    out = np.empty_like(weights)
    windows.descend(weights, direction, np.float32(rate), out, threads=threads)
    return out


@dataclass(frozen=True)
class InnerMoments:
    """AdamW's, in fp32, and its running products of betas."""

    first: Floats
    second: Floats
    scalars: Mapping[str, float]
    """The same for all members who took as many steps."""

    @classmethod
    def of(cls, optimizer: ExactOptimizer) -> "InnerMoments":
        """Copies of where an optimizer is."""
        moments = optimizer.moments
        return cls(moments["first"].copy(), moments["second"].copy(), dict(optimizer.scalars))

    def load_into(self, optimizer: ExactOptimizer) -> None:
        """Begin there. Raises LocalError for an optimizer of other settings or size."""
        optimizer.load_state({"first": self.first, "second": self.second}, self.scalars)
