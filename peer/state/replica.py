"""A peer's replica of its stage: weights by version, gradient sums by step, and the exact step between them.

Methods marked (compute) run on the compute thread, (exact) on the exact thread; the rest on the event loop.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels import optimizers, windows
from kernels.threads import ONE_THREAD, Threads
from peer.state.past_weights import PastVersion, PastWeights
from swarm.averaging.certified_gradient import CertifiedGradient
from swarm.averaging.encoded import Encoded
from swarm.averaging.error_feedback import Residual
from swarm.averaging.parts import Parts
from swarm.averaging.reduce import norm_cap
from swarm.checkpoint.state import StageState
from swarm.core.errors import LocalError
from swarm.core.ids import MicrobatchId, StageIndex, Step, Version
from swarm.core.round.contribution import ReducedPart, Work
from swarm.core.settings import RunSettings
from swarm.disk.cold_bytes import ColdBytes
from swarm.memory.kept_buffers import BUFFERS, empty_floats
from swarm.model.stage import StageModel, Weights
from swarm.optim.carried_moments import Carried
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import Window, window_of
from swarm.optim.stage_step import Gradient, StageStep, Stepped, extrapolates, memory_of_one, weights_ahead
from verification.round.papers import Papers

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]


@dataclass
class Accumulation:
    """A step's gradient sum and the work in it. Once closed it takes no more."""

    gradient: GradientSum
    """In a window, of its present inner step."""
    window: Window | None = None
    """Where this peer takes inner steps by itself."""
    at: Weights | None = None
    """Where the window is."""
    follows: int = 0
    """The version that the window begins from; the one before its step's while that is not there."""
    said: Sequence[Encoded] | None = None
    """All that a window which has ended brings to its round; None before that is known."""
    num_whole: int = 0
    """In a window, so much of the work is in inner steps that were taken: the first."""
    work: dict[MicrobatchId, Work] = field(default_factory=dict)
    papers: dict[MicrobatchId, Papers] = field(default_factory=dict)
    """Of the work, what this peer shows for it to those who vote on its round."""
    stale: int = 0
    """Microbatches computed on the version before the step's."""
    not_finite: set[MicrobatchId] = field(default_factory=set)
    """Of the work, what added nothing here because its loss or the whole sum was not finite."""
    closed: bool = False

    def quotient_of(self, where: slice) -> tuple[Floats, np.float32]:
        """Those values of what is contributed, and what they are to be divided by. Raises LocalError if there was no
        work."""
        if self.window is None:
            return self.gradient.quotient_of(where)
        return self.window.values(where), np.float32(1.0)

    def listed(self) -> tuple[Work, ...]:
        """What a contribution says was done; in a window as it came, for on which weights follows from the order."""
        return tuple(self.work[key] for key in (self.work if self.window is not None else sorted(self.work)))

    def leave_out_the_rest(self) -> None:
        """Of a window that is cut short: what is in no inner step that was taken."""
        for number in list(self.work)[self.num_whole :]:
            del self.work[number]
            self.papers.pop(number, None)
            self.not_finite.discard(number)


@dataclass(frozen=True)
class NewVersion:
    """What a step made, ready to be swapped in."""

    state: StageState
    weights: Weights
    ahead: Floats | None
    """What the step after the version's is computed on, if that is not `weights`; and the same as a module."""
    extrapolated: Weights | None
    gradient_norm: float


class StageReplica:
    """One stage of the run, as this peer holds it.

    `state.weights` of a version is never written again: work in flight keeps the version it began with.
    """

    def __init__(
        self,
        settings: RunSettings,
        model: StageModel,
        state: StageState,
        *,
        clip_norm: float,
        threads: Threads = ONE_THREAD,
        era: int = 0,
        folder: Path | None = None,
    ) -> None:
        """`clip_norm` is `stage_clip_norm`, `era` as in `restore`. `threads` share the exact work, not its bits.

        `folder`: where that lies which is seldom read: old weights that audits may need, encoded parts; None: in
        memory.
        """
        self.settings = settings
        self.threads = threads
        self.stage = StageIndex(model.stage)
        self.model = model
        self.layout = model.layout
        self._parts = Parts.of(settings, self.layout)
        self.num_parts = len(self._parts)
        self.stale_share: dict[Step, tuple[int, int]] = {}
        self._sums: dict[Step, Accumulation] = {}
        self._memory = memory_of_one(self.layout)
        """A version's weights have that of the step's sum, which was let go of, and the next sum has that of theirs."""
        self._coming: dict[int, Encoded] = {}
        """Parts of weights in the result of the present round, which no window knows yet."""
        self._step = StageStep.of_run(settings, self.layout, clip_norm=clip_norm, threads=threads, memory=self._memory)
        self._window = window_of(settings, model, threads=threads) if settings.has_windows else None
        self.past = PastWeights.of_run(settings, folder)
        self.inputs = ColdBytes(folder, "inputs")
        """Encoded parts of contributions to the present round."""
        self.outputs = ColdBytes(folder, "outputs")
        """Encoded parts of its result."""
        self.restore(state, era=era)

    @property
    def version(self) -> Version:
        return Version(self.state.version)

    def restore(self, state: StageState, *, era: int) -> None:
        """(compute) Continue from this state; what was accumulated, and what is owed from before, is dropped.

        `era`: of the stage's chain. Work of another one counts no more, though its step may have the same number.
        """
        self.state, self.era = self._step.restore(state), era
        self.past.clear()
        self._coming.clear()
        self._weights = self.model.weights(state.weights)
        self._ahead: Floats | None = None
        self._extrapolated: Weights | None = None
        self._stepped: Stepped | None = None
        self._sums.clear()
        self.residual = Residual(self.layout.num_values) if self.settings.leaves_residual else None
        """What this peer's contributions left unsaid; no other replica has it. None if the codec leaves nothing."""

    def release(self) -> None:
        """Nothing is added or replayed any more: let go of what lies on disk. The state stays."""
        self.past.clear()
        self.inputs.begin_anew()
        self.outputs.begin_anew()

    def model_of_replays(self) -> StageModel:
        """What others' work is computed again with, on this peer's device, perhaps beside its own work."""
        return self.model.computing(self.model.mode)

    # -- microbatches -------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """Of the version."""
        return self._weights

    def weights_for(self, step: Step) -> tuple[Version, Weights]:
        """(compute) The version a microbatch of `step` is computed on now, and its weights: in a window, where that
        has come to from there."""
        if self._window is not None:
            held = self.sum_of(step)
            return Version(held.follows), held.at or self._weights
        if self._extrapolated is not None and int(step) > self.version:
            return self.version, self._extrapolated
        return self.version, self._weights

    def can_compute(self, step: Step) -> bool:
        """Whether the weights that every replica computes the step on are known here.

        An extrapolating run's are not where a state was loaded: they also need the version before. A window goes on
        from what this peer itself has said of the one before, if it has.
        """
        if int(step) <= self.version:
            return True
        if self._window is not None:
            before = self._sums.get(Step(self.version))
            return before is not None and before.said is not None
        return not extrapolates(self.settings, self.version) or self._extrapolated is not None

    def has_done(self, step: Step, microbatch_id: MicrobatchId) -> bool:
        held = self._sums.get(step)
        return held is not None and microbatch_id in held.work

    def accepts(self, step: Step, era: int) -> bool:
        """Whether the step's sum is still open here, for work of this era."""
        held = self._sums.get(step)
        return era == self.era and int(step) >= self.version and (held is None or not held.closed)

    def sum_of(self, step: Step) -> Accumulation:
        """(compute) The open sum that the step's microbatches go into."""
        held = self._sums.get(step)
        if held is None:
            if not self.settings.averaging.delay:  # no round goes on whose messages would take it again
                BUFFERS.give_back()
            gradient = GradientSum(self.layout.num_values, self.model.link, self._memory)
            held = Accumulation(gradient, self._window)
            if held.window is not None:
                self._begin_window(held, held.window, step)
            self._sums[step] = held
        return held

    def _begin_window(self, held: Accumulation, window: Window, step: Step) -> None:
        """(compute) From the step's version, or from where this peer has come to on its way there."""
        before = self._sums.get(Step(int(step) - 1))
        state = self.state  # of the step, if `before` has just gone
        held.follows = state.version
        if state.version == int(step):
            carried = Carried.of(state)
            assert carried is not None
            window.begin(state.weights, int(step), carried)
            return
        window.begin_ahead(state, (before.said if before is not None else None) or ())
        held.at = self.model.weights(window.weights)

    def _follow(self, held: Accumulation, window: Window, step: Step) -> None:
        """(compute) The window begins from the version that its step is on, if that has come since; else from what is
        here of it."""
        state = self.state
        if held.follows == int(step):
            return
        if state.version == int(step):
            carried = Carried.of(state)
            assert carried is not None
            window.begin_from(state.weights, carried)
            held.follows = state.version
        else:
            coming, self._coming = self._coming, {}
            if not coming:
                return
            window.move((self._parts[part], self._stepped_part(state, part, coming[part])) for part in sorted(coming))
        held.at = self.model.weights(window.weights)

    def _stepped_part(self, state: StageState, part: int, body: Encoded) -> Floats:
        """(compute) The weights of the next version there, if that is what the round ends with."""
        where = self._parts[part]
        values = np.zeros(where.stop - where.start, dtype=np.float32)
        if len(body):
            self._parts.result_codec(part).decode(body, values)
        windows.difference(state.weights[where], values, values)
        return values

    def hear_of_result(self, step: Step, part: int, body: Encoded) -> None:
        """A part of what the step's round makes is here. Nobody may have voted on it yet: a window that has begun is
        moved there for the time being, and to the version in the end."""
        if self._window is not None and int(step) == self.version and part < len(self._parts.gradient):
            self._coming[part] = body

    def record(self, step: Step, work: Work) -> None:
        """(compute) The microbatch's gradient is in the step's sum."""
        held = self.sum_of(step)
        assert not held.closed
        held.work[work.microbatch_id] = work
        held.gradient.add_tokens(work.num_tokens)
        held.stale += int(work.version) < int(step)
        if held.window is not None and len(held.work) - held.num_whole == self.settings.microbatches_per_step:
            self._inner_step(held, step)

    def _inner_step(self, held: Accumulation, step: Step) -> None:
        """(compute) A window has a batch together."""
        assert held.window is not None
        if not held.window.is_full:
            held.gradient.close()
            try:
                held.window.take(held.gradient)
            except LocalError as error:
                log.warning("stage %d step %d: an inner step is left out: %s", self.stage, self.version, error)
                held.not_finite.update(list(held.work)[held.num_whole :])
            held.at = self.model.weights(held.window.weights)
        held.num_whole = len(held.work)
        held.gradient.zero()
        self._follow(held, held.window, step)

    @property
    def present_step(self) -> Step:
        """The newest of which there is a sum."""
        return max([*self._sums], default=Step(self.version))

    def inner_steps_taken(self, step: Step) -> int:
        """Of the window of `step`."""
        held = self._sums.get(step)
        return held.num_whole // self.settings.microbatches_per_step if held is not None else 0

    def num_done(self, step: Step) -> int:
        held = self._sums.get(step)
        return len(held.work) if held is not None else 0

    # -- the step -----------------------------------------------------------------------------------------

    def close(self, step: Step) -> Accumulation:
        """(compute) Close the step's sum: nothing is added to it any more."""
        held = self.sum_of(step)
        held.closed = True
        if held.window is not None:
            held.leave_out_the_rest()
            self._follow(held, held.window, step)
            held.window.end()
            held.gradient.let_go()
            held.at = None
        else:
            held.gradient.close()
        self.stale_share[step] = (held.stale, len(held.work))
        return held

    def mean_part(self, accumulation: Accumulation, where: slice) -> NDArray[np.float32]:
        """(exact, its threads) That part of the contribution."""
        mean = empty_floats(where.stop - where.start)
        optimizers.divide(*accumulation.quotient_of(where), mean)
        return mean

    def certified_gradient(self, reduced: Sequence[ReducedPart], bodies: Sequence[Encoded]) -> CertifiedGradient | None:
        """What a certified result stands for; None if there was no work in it."""
        return CertifiedGradient.of(self.parts(), reduced, bodies)

    def next_version(self, gradient: Gradient | None, name: bytes) -> NewVersion:
        """(exact) The version that this certified gradient makes: moments move on, until `swap` the version does not.
        What this peer has itself for the step is let go of: all of it was said.

        Where memory gives out it may be called again.
        """
        own = self._sums.get(Step(self.version))
        if own is not None and own.closed:
            own.gradient.let_go()
        made = self._stepped
        if made is None or made.state.name != name:
            made = self._stepped = self._step.next(self.state, gradient, name)
            if made.skipped is not None:
                log.warning("stage %d skips step %d: %s", self.stage, self.version, made.skipped)
        ahead = weights_ahead(self.settings, self.state, made.state, threads=self.threads)
        extrapolated = self.model.weights(ahead) if ahead is not None else None
        return NewVersion(made.state, self.model.weights(made.state.weights), ahead, extrapolated, made.gradient_norm)

    def placed(self, new: NewVersion) -> NewVersion:
        """The same version, made by another replica, on this one's device."""
        ahead = self.model.weights(new.ahead) if new.ahead is not None else None
        return replace(new, weights=self.model.weights(new.state.weights), extrapolated=ahead)

    def swap(self, new: NewVersion) -> None:
        """The new version is the stage's from now on."""
        if new.state.version != self.state.version + 1:
            raise LocalError(f"version {new.state.version} does not follow {self.state.version}")
        left, known = self.state, self.can_compute(Step(self.version + 1))
        self.past.remember(left.version, PastVersion(left.weights, self._ahead, known, Carried.of(left)))
        self._coming.clear()
        self.state, self._weights = new.state, new.weights
        self._ahead, self._extrapolated, self._stepped = new.ahead, new.extrapolated, None
        self.inputs.begin_anew()
        self.outputs.begin_anew()
        for step in [step for step in self._sums if int(step) < self.version]:
            del self._sums[step]

    def frozen_state(self) -> StageState:
        """(exact) A copy of the state that later steps leave alone: weights are shared, moments copied."""
        state = self.state
        return StageState(
            version=state.version,
            layout=state.layout,
            weights=state.weights,
            moments={name: array.copy() for name, array in state.moments.items()},
            scalars=dict(state.scalars),
            certified_norms=list(state.certified_norms),
            name=state.name,
        )

    def norm_cap(self) -> float | None:
        """As `swarm.averaging.reduce.norm_cap` has it, at this version."""
        return norm_cap(self.state.certified_norms)

    def parts(self) -> Parts:
        """Where each part lies in the vector that a round averages."""
        return self._parts
