"""A member's window: inner steps of AdamW by itself, from a version that everybody has to where it goes from there.

Among friends each member's moments go on from its window before, and whoever joins begins with none (Douillard et
al., "DiLoCo", 2023). Where replicas replay each other's work nothing may be private: there moments begin anew at each
window, the first as zero without correction of its bias, the second with it. Neither costs a byte; docs/outer_steps.md
says what forms that cost some are worth. The learning rate goes by the inner step's number in the run.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.threads import ONE_THREAD, Threads
from swarm.core.settings import RunSettings
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer, StepReport

Floats: TypeAlias = NDArray[np.float32]


class LocalWindow:
    """One window after another, in the same memory: 20 bytes a parameter.

    Equal gradients, and equal windows before where moments go on, give equal bits on every machine.
    """

    def __init__(self, settings: RunSettings, layout: ParameterLayout, *, threads: Threads = ONE_THREAD) -> None:
        """`threads` share the work and change none of its bits."""
        self._num_steps = settings.averaging.local_steps
        self._is_public = settings.replays
        self._clip_norm = settings.inner.max_norm
        self._optimizer = ExactOptimizer(
            settings.inner, num_values=layout.num_values, decay_ranges=layout.decay_ranges, threads=threads
        )
        self._buffers = [np.empty(layout.num_values, dtype=np.float32) for _ in range(2)]
        self._start: Floats | None = None
        self._version = 0
        self.steps_taken = 0

    def begin(self, start: Floats, version: int) -> None:
        """From the weights of this version, which do not change while the window lasts."""
        if self._is_public:
            self.forget()
        self._start, self._version, self.steps_taken = start, version, 0

    def forget(self) -> None:
        """What is known of earlier windows."""
        for moments in self._optimizer.moments.values():
            moments.fill(0)
        self._optimizer.scalars |= {"beta1_power": 0.0 if self._is_public else 1.0, "beta2_power": 1.0}

    @property
    def is_full(self) -> bool:
        return self.steps_taken >= self._num_steps

    @property
    def weights(self) -> Floats:
        """Where the window is. They hold until the step after the next."""
        assert self._start is not None, "no window has begun"
        return self._start if not self.steps_taken else self._buffers[self.steps_taken % 2]

    def take(self, gradient: Floats) -> StepReport:
        """One inner step, of a batch's mean gradient. Raises LocalError, with nothing changed, if it is not finite."""
        assert not self.is_full, f"a window of {self._num_steps} steps"
        number = self._version * self._num_steps + self.steps_taken
        out = self._buffers[(self.steps_taken + 1) % 2]
        report = self._optimizer.step(self.weights, gradient, step=number, clip_norm=self._clip_norm, out=out)
        self.steps_taken += 1
        return report

    def way_back(self, where: slice) -> Floats:
        """Start - end of these values: what the window contributes, its pseudo-gradient."""
        assert self._start is not None, "no window has begun"
        found: Floats = np.subtract(self._start[where], self.weights[where], dtype=np.float32)
        return found
