"""A window: the inner steps that a member takes by itself between two rounds, from a version of its stage.

Each is a step of AdamW on the mean gradient of one batch, from weights and moments that everybody has. What the window
contributes is where it went, start - end, and the moments at its end (Douillard et al., "DiLoCo", 2023, with SGD as
outer optimizer; moments there are private). docs/outer_steps.md says what other forms are worth. The learning rate goes
by the inner step's number in the run.

Where a round goes on while the next window is computed (`averaging.delay`), that begins from where the member's own
contribution has brought it, and what the round made of all takes the place of that when it is there.

A window lies where its stage is computed, if there is room: else its gradients and weights cross at every inner step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import windows
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import Encoded
from swarm.checkpoint.state import StageState
from swarm.core.settings import RunSettings
from swarm.model.layout import ParameterLayout
from swarm.model.link import Link
from swarm.model.stage import StageModel
from swarm.optim.adamw_there import AdamWThere
from swarm.optim.carried_moments import Carried, CarriedMoments
from swarm.optim.exact import ExactOptimizer, StepTaken
from swarm.optim.factored_moments import means_of
from swarm.optim.gradient_sum import GradientSum

Floats: TypeAlias = NDArray[np.float32]


class Window(ABC):
    """One window after another, in the same memory, wherever its steps are taken: it begins and ends on the host.

    Equal starts and gradients give equal bits on every machine.
    """

    def __init__(self, settings: RunSettings, layout: ParameterLayout, *, threads: Threads = ONE_THREAD) -> None:
        """`threads` share the work and change none of its bits."""
        self._num_steps = settings.averaging.local_steps
        self._clip_norm = settings.inner.max_norm
        self._layout = layout
        self._threads = threads
        self._carried = CarriedMoments(settings, layout)
        self._optimizer = ExactOptimizer.of(settings.inner, layout, threads=threads)
        self._buffers = [np.empty(layout.num_values, dtype=np.float32) for _ in range(2)]
        self._start: Floats | None = None
        self._began: Carried | None = None
        self._end: Floats | None = None
        self._means: Floats | None = None
        self._version = 0
        self.steps_taken = 0

    def begin(self, start: Floats, version: int, carried: Carried) -> None:
        """From these weights and moments, which do not change while the window lasts: of this version, or of one member
        on its way there. Raises RemoteError for moments that no result holds."""
        self._carried.load(carried, self._optimizer, threads=self._threads)
        self._start, self._began, self._end, self._means = start, carried, None, None
        self._version, self.steps_taken = version, 0

    def begin_ahead(self, version: StageState, said: Sequence[Encoded]) -> None:
        """As `begin`, of the window after the version's, from where a member has come to by all that it `said`."""
        weights, carried = own_start(self._carried, version, said, threads=self._threads)
        self.begin(weights, version.version + 1, carried)

    def move(self, pieces: Iterable[tuple[slice, Floats]]) -> None:
        """Have begun from these weights there, which are written into those that `begin` had: they are nobody else's.
        What steps have moved since stays. `weights` are others from here on."""
        assert self._start is not None, "no window has begun"
        start, here = self._start, self._here
        self._bring(here)
        for where, values in pieces:
            if self.steps_taken:
                windows.move(here[where], start[where], values, threads=self._threads)
            start[where] = values
        self._take_back(here)

    def begin_from(self, start: Floats, carried: Carried) -> None:
        """Have begun from these instead: what was moved since stays, of the moments as much as the steps since leave.
        `weights` are others from here on. Raises RemoteError as `begin`."""
        assert self._start is not None, "no window has begun"
        assert self._began is not None
        if not self.steps_taken:
            self.begin(start, self._version, carried)
            return
        here, scratch = self._here, self._buffers[(self.steps_taken + 1) % 2]
        self._bring(here)
        windows.move(here, self._start, start, threads=self._threads)
        self._carried.move(
            self._optimizer, self._began, carried, scratch, num_steps=self.steps_taken, threads=self._threads
        )
        self._take_back(here)
        self._start, self._began = start, carried

    @abstractmethod
    def _bring(self, here: Floats) -> None:
        """Have weights and moments on the host."""

    @abstractmethod
    def _take_back(self, here: Floats) -> None:
        """They are changed there."""

    @property
    def is_full(self) -> bool:
        return self.steps_taken >= self._num_steps

    @property
    @abstractmethod
    def weights(self) -> Floats | torch.Tensor:
        """Where the window is, as `StageModel.weights` takes them. They hold until the step after the next."""

    @property
    def _here(self) -> Floats:
        assert self._start is not None, "no window has begun"
        return self._start if not self.steps_taken else self._buffers[self.steps_taken % 2]

    @abstractmethod
    def take(self, gradient: GradientSum) -> StepTaken:
        """One inner step, of the mean of a batch's gradients. Raises LocalError, with nothing changed, if it is not
        finite."""

    @property
    def _number(self) -> int:
        """In the run, of the inner step that comes."""
        assert not self.is_full, f"a window of {self._num_steps} steps"
        return self._version * self._num_steps + self.steps_taken

    def end(self) -> None:
        """No step is taken any more: `values` can be said."""
        self._end = self._here
        self._means = means_of(self._optimizer.moments["second"], self._layout, threads=self._threads)

    def values(self, where: slice) -> Floats:
        """(any thread) What the window contributes to a part of the round's vector, as `Parts` lays it out."""
        assert self._start is not None, "no window has begun"
        assert self._end is not None, "the window has not ended"
        assert self._means is not None
        size = self._layout.num_values
        if where.start < size:
            found = np.empty(where.stop - where.start, dtype=np.float32)
            windows.difference(self._start[where], self._end[where], found)
            return found
        if where.start < 2 * size:
            return self._optimizer.moments["first"][where.start - size : where.stop - size]
        return self._means[where.start - 2 * size : where.stop - 2 * size]


class LocalWindow(Window):
    """One that lies on the host: 20 bytes a parameter."""

    @property
    def weights(self) -> Floats:
        return self._here

    def _bring(self, here: Floats) -> None:
        """They are."""

    def _take_back(self, here: Floats) -> None:
        """Nobody else has them."""

    def take(self, gradient: GradientSum) -> StepTaken:
        return self.take_mean(gradient.take_mean())

    def take_mean(self, gradient: Floats) -> StepTaken:
        """`take`, of the mean."""
        out = self._buffers[(self.steps_taken + 1) % 2]
        report = self._optimizer.step(self._here, gradient, step=self._number, clip_norm=self._clip_norm, out=out)
        self.steps_taken += 1
        return report


class WindowThere(Window):
    """One that lies on its stage's device, to the same bits: 16 bytes a parameter there, and 12 on the host, where it
    begins and ends."""

    def __init__(
        self, settings: RunSettings, layout: ParameterLayout, link: Link, *, threads: Threads = ONE_THREAD
    ) -> None:
        super().__init__(settings, layout, threads=threads)
        self._there = AdamWThere(self._optimizer, link)

    def begin(self, start: Floats, version: int, carried: Carried) -> None:
        super().begin(start, version, carried)
        self._there.begin(start)

    @property
    def weights(self) -> torch.Tensor:
        return self._there.weights

    def take(self, gradient: GradientSum) -> StepTaken:
        report = self._there.step(gradient, step=self._number, clip_norm=self._clip_norm)
        self.steps_taken += 1
        return report

    def _bring(self, here: Floats) -> None:
        self._there.end(here)

    def _take_back(self, here: Floats) -> None:
        self._there.begin(here)

    def end(self) -> None:
        if self.steps_taken:
            self._bring(self._here)
        super().end()


def own_start(
    moments: CarriedMoments, version: StageState, said: Sequence[Encoded], *, threads: Threads = ONE_THREAD
) -> tuple[Floats, Carried]:
    """Where a member has come to from a version by all that it `said` of its window, if anything: weights, the caller's
    own, and moments."""
    before = Carried.of(version)
    assert before is not None, "a version of a run with windows"
    if not said:
        return version.weights.copy(), replace(before, scalars=moments.powers_after(before.scalars))
    parts, weights = moments.parts, np.empty_like(version.weights)

    def step(part: int) -> None:
        where = parts.gradient[part]
        parts.contribution_codec(part).decode(said[part], weights[where])
        windows.difference(version.weights[where], weights[where], weights[where])

    threads.map(step, range(len(parts.gradient)))
    return weights, moments.after_own(before, said)


def window_of(settings: RunSettings, model: StageModel, *, threads: Threads = ONE_THREAD) -> Window:
    """The quickest for which the stage's mode has room."""
    if model.device.type != "cpu" and (model.mode is None or model.mode.steps_there):
        return WindowThere(settings, model.layout, model.link, threads=threads)
    return LocalWindow(settings, model.layout, threads=threads)
