"""This is where version v becomes version v + 1: AdamW, NAdamW or SGD on flat fp32 vectors in the host's memory.

Every replica of a stage takes the same step to the last bit: elementwise fp32 operations rounded one by one, norms by
a halving tree, powers of beta as running products in fp64.

AdamW: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019. NAdamW: Dozat, "Incorporating Nesterov
Momentum into Adam", 2016, with `torch.optim.NAdam`'s schedule. SGD: velocity = momentum * velocity + gradient.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import norms, optimizers
from swarm.core.errors import LocalError
from swarm.core.schedule import learning_rate
from swarm.core.settings import OptimizerSettings

Floats = NDArray[np.float32]

_MOMENTUM_DECAY = 0.9998367253526753
"""0.96 ** 0.004: NAdam's momentum at step t is beta1 * (1 - 0.5 * 0.96 ** (0.004 * t))."""


@dataclass(frozen=True)
class StepReport:
    """What a step did."""

    gradient_norm: float
    """Before clipping."""
    clipped: bool
    learning_rate: float


class ExactOptimizer:
    """Moments of one stage and the step that uses them."""

    def __init__(
        self, settings: OptimizerSettings, *, num_values: int, decay_ranges: tuple[tuple[int, int], ...]
    ) -> None:
        """`decay_ranges`: [start, stop) of the tensors that weight decay applies to, in order, not overlapping."""
        self.settings = settings
        self.num_values = num_values
        names = ("first", "second") if settings.name == "adamw" else ("momentum",)
        self.moments: dict[str, Floats] = {name: np.zeros(num_values, dtype=np.float32) for name in names}
        self.scalars: dict[str, float] = {}
        """Running products: beta1^t and beta2^t; under NAdamW of its momenta and of its momentum's decay."""
        if settings.name == "adamw":
            self.scalars = {"beta1_power": 1.0, "beta2_power": 1.0}
            if settings.correction == "nadamw":
                self.scalars |= {"momentum_product": 1.0, "decay_power": 1.0}
        self._bounds, self._decays = _segments(decay_ranges, num_values)

    def step(self, weights: Floats, gradient: Floats, *, step: int, clip_norm: float, out: Floats) -> StepReport:
        """Write the next weights to `out` (not `weights`), update moments and scalars.

        A gradient longer than `clip_norm` is scaled to it. Raises LocalError, with nothing changed, if the gradient's
        norm is not finite.
        """
        assert weights.size == gradient.size == out.size == self.num_values, "sizes differ"
        assert not np.may_share_memory(weights, out), "old weights stay: work in flight uses them"
        norm = norms.tree_norm(gradient)
        if not math.isfinite(norm):
            raise LocalError(f"gradient of step {step} has norm {norm}; nothing was changed")
        clip = clip_norm / norm if norm > clip_norm else 1.0
        rate = learning_rate(self.settings, step)
        keep = np.where(self._decays, np.float32(1.0 - rate * self.settings.weight_decay), np.float32(1.0))
        if self.settings.name == "adamw":
            scalars = np.array([clip, *self._adamw_scalars(rate)], dtype=np.float32)
            first, second = self.moments["first"], self.moments["second"]
            optimizers.adamw(weights, gradient, first, second, out, self._bounds, keep, scalars)
        else:
            scalars = np.array([clip, self.settings.momentum, rate], dtype=np.float32)
            optimizers.sgd(weights, gradient, self.moments["momentum"], out, self._bounds, keep, scalars)
        return StepReport(gradient_norm=norm, clipped=clip != 1.0, learning_rate=rate)

    def _adamw_scalars(self, rate: float) -> list[float]:
        """Advance the running products by a step; what follows `clip` in `kernels.optimizers.adamw`."""
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        self.scalars["beta1_power"] *= beta1
        self.scalars["beta2_power"] *= beta2
        if self.settings.correction == "nadamw":
            decay = self.scalars["decay_power"] * _MOMENTUM_DECAY
            momentum = beta1 * (1.0 - 0.5 * decay)
            next_momentum = beta1 * (1.0 - 0.5 * (decay * _MOMENTUM_DECAY))
            product = self.scalars["momentum_product"] * momentum
            self.scalars |= {"decay_power": decay, "momentum_product": product}
            moment_share = rate * next_momentum / (1.0 - product * next_momentum)
            gradient_share = rate * (1.0 - momentum) / (1.0 - product)
        else:
            moment_share = rate / (1.0 - self.scalars["beta1_power"])
            gradient_share = 0.0
        unbias = 1.0 / math.sqrt(1.0 - self.scalars["beta2_power"])
        return [beta1, 1.0 - beta1, beta2, 1.0 - beta2, unbias, self.settings.epsilon, moment_share, gradient_share]

    def state_arrays(self) -> dict[str, Floats]:
        """The moments by name, not copied."""
        return dict(self.moments)

    def load_state(self, arrays: Mapping[str, Floats], scalars: Mapping[str, float]) -> None:
        """Take over (a copy of) a state. Raises LocalError if names, sizes or types are not this optimizer's."""
        if sorted(arrays) != sorted(self.moments) or sorted(scalars) != sorted(self.scalars):
            raise LocalError(
                f"state holds {sorted(arrays)} and {sorted(scalars)}; {self.settings.name} with correction "
                f"{self.settings.correction} needs {sorted(self.moments)} and {sorted(self.scalars)}"
            )
        for name, array in arrays.items():
            if array.shape != (self.num_values,) or array.dtype != np.float32:
                raise LocalError(f"moment {name} is {array.dtype}{array.shape}, not float32({self.num_values},)")
        for name, array in arrays.items():
            self.moments[name][:] = array
        self.scalars = {name: float(value) for name, value in scalars.items()}


def extrapolated(weights_new: Floats, weights_old: Floats, out: Floats) -> None:
    """out = new + (new - old): the weights one more such update would make (correction = "extrapolate")."""
    optimizers.extrapolate(weights_new, weights_old, out)


def _segments(
    decay_ranges: tuple[tuple[int, int], ...], num_values: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Bounds of consecutive segments from 0 to num_values, and which of them decay."""
    bounds, decays = [0], []
    for start, stop in decay_ranges:
        assert bounds[-1] <= start <= stop <= num_values, f"decay range {start}:{stop} after {bounds[-1]}"
        for end, decay in ((start, False), (stop, True)):
            if end > bounds[-1]:
                bounds.append(end)
                decays.append(decay)
    if num_values > bounds[-1]:
        bounds.append(num_values)
        decays.append(False)
    return np.array(bounds, dtype=np.int64), np.array(decays, dtype=np.bool_)
