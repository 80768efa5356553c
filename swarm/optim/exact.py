"""From version v to version v + 1: AdamW, NAdamW, Muon or SGD on flat fp32 vectors in the host's memory.

Every replica of a stage takes the same step to the last bit: elementwise fp32 operations rounded one by one, norms by
a halving tree, powers of beta as running products in fp64, Muon's products of matrices in integers.

AdamW: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019. NAdamW: Dozat, "Incorporating Nesterov
Momentum into Adam", 2016, with `torch.optim.NAdam`'s schedule. SGD: velocity = momentum * velocity + gradient.
Muon: Jordan et al., 2024, with Nesterov's momentum, for `swarm.optim.matrices`, and AdamW for the rest; updates have
AdamW's length, 0.2 * sqrt(longer side) (Liu et al., "Muon is Scalable for LLM Training", 2025), so that one learning
rate serves both. Moments are fp32, or under AdamW and NAdamW codes of one byte each (`kernels.int8_moments`), as exact.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels import int8_moments, norms, optimizers, orthogonal
from kernels.cache_hints import zeros_on_lines
from kernels.threads import ONE_THREAD, Threads
from swarm.core.errors import LocalError
from swarm.core.settings import PART_VALUES, OptimizerSettings
from swarm.core.state.schedule import learning_rate
from swarm.model.layout import ParameterLayout
from swarm.optim.matrices import Matrices, Matrix, size_of

Floats = NDArray[np.float32]

_MOMENTUM_DECAY = 0.9998367253526753
"""0.96 ** 0.004: NAdam's momentum at step t is beta1 * (1 - 0.5 * 0.96 ** (0.004 * t))."""
_LARGEST_RATIO = 8.0
"""Of the first moment to the root of the second, where the betas bound it by more or not at all."""
_MUON_LENGTH = 0.2
"""Root of the mean square of AdamW's updates, by Liu et al."""

WINDOW_GRAIN = int8_moments.BLOCK_VALUES
"""Values that share a scale where moments are in int8: a window never cuts them."""


@dataclass(frozen=True)
class StepTaken:
    """What a step did."""

    gradient_norm: float
    """Before clipping."""
    clipped: bool
    learning_rate: float


@dataclass(frozen=True)
class BegunStep:
    """What a step does to each value; the running products have moved on."""

    report: StepTaken
    step: int
    keep: Floats
    """What each segment's weights are multiplied by first."""
    times: Floats
    """What each segment's update is multiplied by."""
    scalars: NDArray[np.float32]
    """As the optimizer's kernel has them."""


class ExactOptimizer:
    """Moments of one stage and the step that uses them."""

    def __init__(
        self,
        settings: OptimizerSettings,
        *,
        num_values: int,
        decay_ranges: tuple[tuple[int, int], ...],
        rated_ranges: tuple[tuple[int, int, float], ...] = (),
        matrices: tuple[Matrix, ...] = (),
        window: slice | None = None,
        threads: Threads = ONE_THREAD,
    ) -> None:
        """`decay_ranges`: [start, stop) of the tensors that weight decay applies to, in order, not overlapping.
        `rated_ranges`: the same of those that have so many times the learning rate, and how many.
        `matrices`: those that Muon turns, all under weight decay.

        With a `window` of the values, which begins at a multiple of `WINDOW_GRAIN`, all vectors are of its values
        alone: their bits are those they have in a step of all, but for weights of matrices that it cuts. Raises
        ValueError for int8 moments of another optimizer than AdamW.
        """
        self.settings = settings
        self.num_values = num_values
        self._matrices = Matrices(matrices if settings.name == "muon" else (), num_values)
        self._window = window or slice(0, num_values)
        self._size = self._window.stop - self._window.start
        assert self._window.start % WINDOW_GRAIN == 0, f"window from {self._window.start}"
        assert 0 <= self._size <= num_values - self._window.start, f"window {self._window} of {num_values} values"
        self.matrices = self._matrices.within(self._window)
        """Those that a step turns."""
        self.moments = _no_moments(settings, self._size, size_of(self._matrices.packed(self._window)))
        """By name, one-dimensional: fp32 `first` and `second`, or `momentum`, or under Muon `momentum` of all values
        and `second` of those that AdamW steps; or as codes, int8 `first`, uint8 `second` and fp32 `second_scale`."""
        self.scalars: dict[str, float] = {}
        """Running products: beta1^t and beta2^t; under NAdamW of its momenta and of its momentum's decay."""
        if settings.name in ("adamw", "muon"):
            self.scalars = {"beta1_power": 1.0, "beta2_power": 1.0}
            if settings.correction == "nadamw":
                self.scalars |= {"momentum_product": 1.0, "decay_power": 1.0}
        self._threads = threads
        bounds, self._decays, self._times = _segments(decay_ranges, rated_ranges, num_values)
        self._ends = bounds[1:]
        self._bounds = optimizers.segments_within(bounds, self._window.start, self._window.stop)

    @property
    def segments(self) -> list[slice]:
        """Of which each has a factor of its own in `BegunStep.keep`."""
        return [slice(start, stop) for start, stop in itertools.pairwise(self._bounds.tolist())]

    @classmethod
    def of(
        cls,
        settings: OptimizerSettings,
        layout: ParameterLayout,
        *,
        window: slice | None = None,
        threads: Threads = ONE_THREAD,
    ) -> "ExactOptimizer":
        """That of a stage."""
        return cls(
            settings,
            num_values=layout.num_values,
            decay_ranges=layout.decay_ranges,
            rated_ranges=rated_ranges(settings, layout),
            matrices=Matrices.of(layout).places,
            window=window,
            threads=threads,
        )

    def step(
        self,
        weights: Floats,
        gradient: Floats,
        *,
        step: int,
        clip_norm: float,
        out: Floats,
        gradient_norm: float | None = None,
    ) -> StepTaken:
        """Write the next weights to `out` (not `weights`), update moments and scalars.

        A gradient longer than `clip_norm` is scaled to it. `gradient_norm` is its `norms.norm_of_parts`, where the
        caller has it from the parts already, as it must for a window. Raises LocalError, with nothing changed, if the
        norm is not finite.
        """
        begun = self.begin(step, self.norm(gradient) if gradient_norm is None else gradient_norm, clip_norm=clip_norm)
        self.take(begun, slice(0, self._size), weights, gradient, out, threads=self._threads)
        for matrix in self.matrices:
            self.turn(begun, matrix, weights, out, threads=self._threads)
        return begun.report

    def begin(self, step: int, norm: float, *, clip_norm: float) -> BegunStep:
        """Of a gradient of that norm; then `take` each value once, and then `turn` each matrix. Raises LocalError, with
        nothing changed, if the norm is not finite."""
        if not math.isfinite(norm):
            raise LocalError(f"gradient of step {step} has norm {norm}; nothing was changed")
        clip = clip_norm / norm if norm > clip_norm else 1.0
        rate = learning_rate(self.settings, step)
        lost = rate * self.settings.weight_decay * self._times * self._decays
        if self.settings.name == "sgd":
            scalars = [clip, self.settings.momentum, rate]
        else:
            scalars = [clip, *self._adamw_scalars(rate)]
            if "second_scale" in self.moments:
                scalars.append(longest_first_moment(self.settings))
        if self.settings.name == "muon":
            scalars += [self.settings.muon_momentum, 1.0 - self.settings.muon_momentum]
        report = StepTaken(gradient_norm=norm, clipped=clip != 1.0, learning_rate=rate)
        floats = (np.array(made, dtype=np.float32) for made in (1.0 - lost, self._times, scalars))
        return BegunStep(report, step, *floats)

    def take(
        self,
        begun: BegunStep,
        where: slice,
        weights: Floats,
        gradient: Floats,
        out: Floats,
        *,
        threads: Threads = ONE_THREAD,
    ) -> None:
        """The step of the values at `where`, which begins at a multiple of `WINDOW_GRAIN`: `weights`, `gradient` and
        `out` are of these alone. Their bits do not depend on how the vector is cut."""
        size = where.stop - where.start
        assert weights.size == gradient.size == out.size == size, "sizes differ"
        assert where.start % WINDOW_GRAIN == 0, f"values from {where.start}"
        assert not np.may_share_memory(weights, out), "old weights stay: work in flight uses them"
        bounds = optimizers.segments_within(self._bounds, where.start, where.stop)
        keep, times, scalars = begun.keep, begun.times, begun.scalars
        if self.settings.name == "sgd":
            velocity = self.moments["momentum"][where] if self.moments else np.zeros(size, dtype=np.float32)
            optimizers.sgd(weights, gradient, velocity, out, bounds, keep, times, scalars, threads=threads)
            return
        if self.settings.name == "muon":
            self._take_with_matrices(begun, where, weights, gradient, out, threads)
            return
        first, second = self.moments["first"][where], self.moments["second"][where]
        if "second_scale" not in self.moments:
            optimizers.adamw(weights, gradient, first, second, out, bounds, keep, times, scalars, threads=threads)
            return
        first_block, last_block = where.start // WINDOW_GRAIN, -(-where.stop // WINDOW_GRAIN)
        scales = self.moments["second_scale"][first_block:last_block]
        seed = np.array([begun.step, self.num_values, 0, 0], dtype=np.uint64)
        block = self._window.start // WINDOW_GRAIN + first_block
        int8_moments.adamw(
            *(weights, gradient, first, second, scales, out, bounds, keep, times, scalars, seed),
            block=block,
            threads=threads,
        )

    def _take_with_matrices(
        self, begun: BegunStep, where: slice, weights: Floats, gradient: Floats, out: Floats, threads: Threads
    ) -> None:
        """In the place of a matrix's next weights comes what `turn` begins with."""
        start, before = self._window.start, self._matrices.packed(self._window).start
        for run in self._matrices.runs(slice(start + where.start, start + where.stop)):
            values = slice(run.where.start - start, run.where.stop - start)
            here = slice(values.start - where.start, values.stop - where.start)
            momentum = self.moments["momentum"][values]
            if run.is_turned:
                optimizers.nesterov(gradient[here], momentum, out[here], begun.scalars, threads=threads)
                continue
            packed = self._matrices.packed(run.where)
            second = self.moments["second"][packed.start - before : packed.stop - before]
            bounds = optimizers.segments_within(self._bounds, values.start, values.stop)
            optimizers.adamw(
                *(weights[here], gradient[here], momentum, second, out[here]),
                *(bounds, begun.keep, begun.times, begun.scalars),
                threads=threads,
            )

    def turn(
        self, begun: BegunStep, matrix: Matrix, weights: Floats, out: Floats, *, threads: Threads = ONE_THREAD
    ) -> None:
        """The step of one of `matrices`, whose values are all taken; `weights` and `out` are of all of the window's.

        Once, or where memory gave out, again.
        """
        where = slice(matrix.where.start - self._window.start, matrix.where.stop - self._window.start)
        blend = out[where]
        turned = orthogonal.turned(
            blend.reshape(matrix.rows, matrix.columns), norms.tree_norm(blend, threads=threads), threads=threads
        )
        rate = begun.report.learning_rate * self._times_at(matrix.where.start)
        keep = np.float32(1.0 - rate * self.settings.weight_decay)
        share = np.float32(rate * _MUON_LENGTH * math.sqrt(max(matrix.rows, matrix.columns)))
        optimizers.lessened(weights[where], turned.reshape(-1), blend, keep, share)

    def _times_at(self, value: int) -> float:
        """How many times the learning rate it has."""
        return float(self._times[np.searchsorted(self._ends, value, side="right")])

    def norm(self, gradient: Floats) -> float:
        """`norms.norm_of_parts` of a gradient of all values."""
        assert self._size == self.num_values, "the norm of a window is not that of the gradient"
        return norms.norm_of_parts(gradient, part_values=PART_VALUES, threads=self._threads)

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

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """The moments by name, not copied."""
        return dict(self.moments)

    def load_state(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, float]) -> None:
        """Take over (a copy of) a state. Raises LocalError if names, sizes or types are not this optimizer's."""
        if sorted(arrays) != sorted(self.moments) or sorted(scalars) != sorted(self.scalars):
            raise LocalError(
                f"state holds {sorted(arrays)} and {sorted(scalars)}; {self.settings.name} with correction "
                f"{self.settings.correction} needs {sorted(self.moments)} and {sorted(self.scalars)}"
            )
        for name, array in arrays.items():
            own = self.moments[name]
            if array.shape != own.shape or array.dtype != own.dtype:
                raise LocalError(f"moment {name} is {array.dtype}{array.shape}, not {own.dtype}{own.shape}")
        for name, array in arrays.items():
            self.moments[name][:] = array
        self.scalars = {name: float(value) for name, value in scalars.items()}


def _no_moments(settings: OptimizerSettings, num_values: int, num_packed: int) -> dict[str, NDArray[Any]]:
    """The moments before the first step: all zero. `num_packed`: values that Muon does not turn."""
    if settings.moments == "int8":
        if settings.name != "adamw":
            raise ValueError(f'moments = "int8" needs the optimizer adamw, not {settings.name}; set moments = "fp32"')
        return {
            "first": np.zeros(num_values, dtype=np.int8),
            "second": np.zeros(num_values, dtype=np.uint8),
            "second_scale": np.zeros(int8_moments.num_blocks(num_values), dtype=np.float32),
        }
    if settings.name == "sgd" and settings.momentum == 0.0:
        return {}
    sizes = {
        "adamw": {"first": num_values, "second": num_values},
        "muon": {"momentum": num_values, "second": num_packed},
        "sgd": {"momentum": num_values},
    }[settings.name]
    return {name: zeros_on_lines(size, np.float32) for name, size in sizes.items()}


def longest_first_moment(settings: OptimizerSettings) -> float:
    """How long the first moment can be, in roots of the second: by Cauchy and Schwarz, over any gradients. 8 if it can
    be longer."""
    share = settings.beta1**2 / settings.beta2 if settings.beta2 > 0 else math.inf
    if share >= 1.0:
        return _LARGEST_RATIO
    return min(_LARGEST_RATIO, (1.0 - settings.beta1) / math.sqrt((1.0 - settings.beta2) * (1.0 - share)))


def extrapolated(weights_new: Floats, weights_old: Floats, out: Floats, *, threads: Threads = ONE_THREAD) -> None:
    """out = new + (new - old): the weights one more such update would make (correction = "extrapolate")."""
    optimizers.extrapolate(weights_new, weights_old, out, threads=threads)


def rated_ranges(settings: OptimizerSettings, layout: ParameterLayout) -> tuple[tuple[int, int, float], ...]:
    """Of a stage's tensors that have another learning rate: [start, stop), and how many times the others'."""
    found = []
    for name, start, size in zip(layout.names, layout.offsets, layout.sizes, strict=True):
        times = settings.times_of(name)
        if times != 1.0:
            found.append((start, start + size, times))
    return tuple(found)


def _segments(
    decay_ranges: tuple[tuple[int, int], ...], rated_ranges: tuple[tuple[int, int, float], ...], num_values: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float64]]:
    """Bounds of consecutive segments from 0 to num_values, which of them decay, and their times the learning rate."""
    ranges = [*decay_ranges, *((start, stop) for start, stop, _ in rated_ranges)]
    bounds = np.unique([0, *(bound for one in ranges for bound in one), num_values]).astype(np.int64)
    assert bounds[0] == 0, f"ranges {ranges}"
    assert bounds[-1] == num_values, f"ranges {ranges} of {num_values} values"
    starts = bounds[:-1]
    decays, times = np.zeros(starts.size, np.bool_), np.ones(starts.size)
    for start, stop in decay_ranges:
        decays[(start <= starts) & (starts < stop)] = True
    for start, stop, rate in rated_ranges:
        times[(start <= starts) & (starts < stop)] = rate
    return bounds, decays, times
