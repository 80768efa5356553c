"""A certified gradient turns a stage's state into the next: the same bits at a replica and at an auditor.

Clipping is per stage, at max_norm * sqrt(this stage's parameters / all).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.checkpoint.state import Array, StageState
from swarm.core.errors import LocalError
from swarm.core.plan import FLOAT_BYTES
from swarm.core.settings import OptimizerSettings, RunSettings
from swarm.core.state.step_rule import norms_after, why_skipped
from swarm.memory.kept_buffers import UNIT_BYTES, KeptBuffers, empty_floats
from swarm.model.layout import ParameterLayout
from swarm.model.stack import stage_layout
from swarm.optim.carried_moments import CARRIED, Carried, CarriedMoments
from swarm.optim.exact import BegunStep, ExactOptimizer, extrapolated
from swarm.optim.matrices import Matrix

Floats = NDArray[np.float32]


class Gradient(Protocol):
    """A stage's gradient, or that of a window of it, piece by piece."""

    @property
    def norm(self) -> float:
        """Of the whole stage's."""

    @property
    def pieces(self) -> Sequence[slice]:
        """Where each lies: all values, in order. Each begins at a multiple of `WINDOW_GRAIN`."""

    def values(self, piece: int) -> Floats:
        """(any thread) Of one piece."""

    def moments(self) -> Sequence[Encoded | None]:
        """Of a round of windows: what it says of moments, as `CertifiedGradient.moments`."""


@dataclass(frozen=True)
class FlatGradient:
    """One that is in memory whole."""

    flat: Floats
    norm: float

    @property
    def pieces(self) -> Sequence[slice]:
        return [slice(0, self.flat.size)]

    def values(self, piece: int) -> Floats:
        return self.flat

    def moments(self) -> Sequence[Encoded | None]:
        return ()


@dataclass(frozen=True)
class Stepped:
    """What a step made."""

    state: StageState
    gradient_norm: float
    """Before clipping; 0 if the round had no work."""
    skipped: str | None
    """Why weights and moments stayed what they were; None if the step was taken."""


@dataclass(frozen=True)
class _Taking:
    """A step on its way: of some pieces weights and moments are the next version's, of the others they are not."""

    version: int
    name: bytes
    """Of the next version."""
    begun: BegunStep
    weights: Floats
    """The next version's."""
    done: set[int] = field(default_factory=set)
    """Pieces."""
    turned: set[Matrix] = field(default_factory=set)


class StageStep:
    """The moments of one stage, and the step that uses them."""

    def __init__(
        self,
        settings: OptimizerSettings,
        layout: ParameterLayout,
        *,
        clip_norm: float,
        window: slice | None = None,
        carried: CarriedMoments | None = None,
        threads: Threads = ONE_THREAD,
        memory: KeptBuffers | None = None,
    ) -> None:
        """`clip_norm` is `stage_clip_norm`; `threads` share the work and change none of its bits. `settings` are the
        run's `outer`, and `carried` is what its windows carry, if it has any.

        `memory`: of versions of the weights; by itself it keeps that of one which nobody uses any more, for the next:
        new memory takes a quarter of a step. `window` as in `ExactOptimizer`: states and gradients are then of its
        values alone.
        """
        self._layout = layout
        self._carried = carried
        self._clip_norm = clip_norm
        self._skip_norm_factor = settings.skip_norm_factor
        self._threads = threads
        self._taking: _Taking | None = None
        """The step that was begun and has not ended: no other is taken before `restore`."""
        self._memory = memory if memory is not None else memory_of_one(layout)
        self._optimizer = ExactOptimizer.of(settings, layout, window=window, threads=threads)

    @classmethod
    def of_run(
        cls,
        settings: RunSettings,
        layout: ParameterLayout,
        *,
        clip_norm: float,
        threads: Threads = ONE_THREAD,
        memory: KeptBuffers | None = None,
    ) -> "StageStep":
        """That of all values of a stage in the run."""
        return cls(
            settings.outer,
            layout,
            clip_norm=clip_norm,
            carried=CarriedMoments(settings, layout) if settings.has_windows else None,
            threads=threads,
            memory=memory,
        )

    def restore(self, state: StageState) -> StageState:
        """Take over (a copy of) the state's moments, if it has any; the state with that copy in place of its own.

        Moments that windows carry are not copied: no step writes to them. Raises LocalError if they are of another
        kind.
        """
        self._taking = None
        if self._carried is not None:
            self._check_carried(state)
            return state
        if not state.moments:
            return state
        self._optimizer.load_state(state.moments, state.scalars)
        return replace(state, moments=dict(self._optimizer.state_arrays()))

    def next(self, old: StageState, gradient: Gradient | None, name: bytes) -> Stepped:
        """The state after `old` that this certified gradient makes; where it makes no step, that only counts on.

        Moments move on: call it once a version; where memory gives out, again, and it goes on where it was. They are
        shared with the state that is returned, until the next call changes them.
        """
        norm = None if gradient is None else gradient.norm
        skipped = why_skipped(norm, old.certified_norms, factor=self._skip_norm_factor)
        if gradient is None or norm is None or skipped is not None:
            self._check_whole()
            weights = empty_floats(old.weights.size, self._memory)
            weights[:] = old.weights
        else:
            weights = self._taken(old, gradient, name)
        moments, scalars = self._moments(old, gradient if skipped is None else None)
        weights.setflags(write=False)
        state = StageState(
            version=old.version + 1,
            layout=self._layout,
            weights=weights,
            moments=moments,
            scalars=scalars,
            certified_norms=norms_after(norm, old.certified_norms),
            name=name,
        )
        return Stepped(state, 0.0 if norm is None else norm, skipped)

    def _taken(self, old: StageState, gradient: Gradient, name: bytes) -> Floats:
        """The next weights: all pieces that were not stepped yet are, and then the matrices that they lie in."""
        taking, optimizer = self._taking, self._optimizer
        if taking is None or (taking.version, taking.name) != (old.version, name):
            self._check_whole()
            weights = empty_floats(old.weights.size, self._memory)
            begun = optimizer.begin(old.version, gradient.norm, clip_norm=self._clip_norm)
            self._taking = taking = _Taking(old.version, name, begun, weights)
        pieces, weights, begun, done = gradient.pieces, taking.weights, taking.begun, taking.done
        inner = self._threads if len(pieces) == 1 else ONE_THREAD

        def take(piece: int) -> None:
            where = pieces[piece]
            optimizer.take(begun, where, old.weights[where], gradient.values(piece), weights[where], threads=inner)
            done.add(piece)

        self._threads.map(take, [piece for piece in range(len(pieces)) if piece not in done])
        for matrix in (matrix for matrix in optimizer.matrices if matrix not in taking.turned):
            optimizer.turn(begun, matrix, old.weights, weights, threads=self._threads)
            taking.turned.add(matrix)
        self._taking = None
        return weights

    def _moments(self, old: StageState, taken: Gradient | None) -> tuple[dict[str, Array], dict[str, float]]:
        """The next version's, and its scalars; of a round without a step None is taken."""
        if self._carried is None:
            return dict(self._optimizer.state_arrays()), dict(self._optimizer.scalars)
        if taken is None:
            return dict(old.moments), dict(old.scalars)
        before = Carried.of(old)
        if before is None:  # a window of the values, in which no moments lie
            return {}, self._carried.powers_after(old.scalars)
        after = self._carried.after(before, taken.moments())
        return {CARRIED: after.encoded}, dict(after.scalars)

    def _check_carried(self, state: StageState) -> None:
        assert self._carried is not None
        wanted, found = self._carried.at_first(), Carried.of(state)
        if (
            found is None
            or found.encoded.size != wanted.encoded.size
            or sorted(found.scalars) != sorted(wanted.scalars)
        ):
            raise LocalError(
                f"state holds {sorted(state.moments)} and {sorted(state.scalars)}; windows in such codecs begin with "
                f"{wanted.encoded.size} bytes of {CARRIED} moments and {sorted(wanted.scalars)}"
            )

    def _check_whole(self) -> None:
        if self._taking is not None:
            raise LocalError(f"step {self._taking.version} ended half way: the moments are of no version")


def memory_of_one(layout: ParameterLayout) -> KeptBuffers:
    """Memory of vectors with a value for each parameter, which keeps that of one while nobody uses it."""
    return KeptBuffers(most_kept_bytes=FLOAT_BYTES * layout.num_values + UNIT_BYTES)


def first_state(settings: RunSettings, layout: ParameterLayout, weights: Floats) -> StageState:
    """Version 0 of a stage, without a name."""
    if settings.has_windows:
        carried = CarriedMoments(settings, layout).at_first()
        return StageState(0, layout, weights, {CARRIED: carried.encoded}, dict(carried.scalars))
    optimizer = ExactOptimizer.of(settings.outer, layout)
    return StageState(0, layout, weights, dict(optimizer.state_arrays()), dict(optimizer.scalars))


def stage_clip_norm(settings: RunSettings, stage: int) -> float:
    """The gradient norm that the stage clips at."""
    sizes = [stage_layout(settings.model, other).num_values for other in range(settings.model.num_stages)]
    return float(settings.outer.max_norm * np.sqrt(np.float64(sizes[stage] / sum(sizes))))


def stage_num_parts(settings: RunSettings) -> list[int]:
    """Of each stage's rounds."""
    stages = range(settings.model.num_stages)
    return [len(Parts.of(settings, stage_layout(settings.model, stage))) for stage in stages]


def extrapolates(settings: RunSettings, version: int) -> bool:
    """Whether the step after the version's is computed on weights extrapolated from it and the one before."""
    return settings.optimizer.correction == "extrapolate" and settings.averaging.delay > 0 and version > 1


def weights_ahead(
    settings: RunSettings, old: StageState, new: StageState, *, threads: Threads = ONE_THREAD
) -> Floats | None:
    """The extrapolated weights at the new version; None where nothing is extrapolated."""
    if not extrapolates(settings, new.version):
        return None
    ahead = np.empty_like(new.weights)
    extrapolated(new.weights, old.weights, ahead, threads=threads)
    return ahead
