"""A run trained by its members in one process, with the run's own model, exact optimizer, codecs and outer steps.

Members take turns; all methods see the same samples at the same step. Nothing but messages and time is left out.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.single_process import WholeRun, joined
from benchmarks.whole_model import host_windows
from benchmarks.windows import forms
from benchmarks.windows.method import Method
from swarm.averaging.aggregate import aggregate
from swarm.core.ids import MicrobatchId
from swarm.core.settings import OptimizerSettings
from swarm.core.state.schedule import learning_rate
from swarm.data.batches import BatchReader
from swarm.model.stage import StageModel, Weights
from swarm.optim.exact import ExactOptimizer
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.window import InnerMoments, outer_step, pseudo_gradient

Floats = NDArray[np.float32]

FINAL_SHARE = 0.02
"""Of the highest rate, at the end: alone, at a constant rate, would pay for noise that the others average away."""
MOST_AT_ONCE = 16
"""Microbatches in a forward."""


class InnerSteps:
    """Steps of one model from any weights and moments."""

    def __init__(self, run: WholeRun, settings: OptimizerSettings) -> None:
        assert len(run.weights) == 1, "the whole model is one stage"
        self.settings = settings
        self._model = StageModel(run.settings.model, 0)
        self.layout = self._model.layout
        self._run = run
        self._reader = BatchReader(run.settings, run.train)
        self._gradient = GradientSum(self.layout.num_values)
        self.optimizer = ExactOptimizer(
            settings, num_values=self.layout.num_values, decay_ranges=self.layout.decay_ranges
        )
        buffers = [np.empty(self.layout.num_values, dtype=np.float32) for _ in range(2)]
        self._versions: list[tuple[Floats, Weights]] = [(flat, self._model.weights(flat)) for flat in buffers]

    def run(self, start: Floats, moments: InnerMoments, step: int, batches: Sequence[Sequence[MicrobatchId]]) -> Floats:
        """Weights after a step on each of the batches, the first of which is step `step`; moments in `optimizer`."""
        moments.load_into(self.optimizer)
        (old, old_weights), (new, new_weights) = self._versions
        old[:] = start
        for number, ids in enumerate(batches, step):
            self._add_gradients(old_weights, ids)
            gradient = self._gradient.take_mean()
            self.optimizer.step(old, gradient, step=number, clip_norm=self.settings.max_norm, out=new)
            self._gradient.zero()
            old, old_weights, new, new_weights = new, new_weights, old, old_weights
        return old.copy()

    def held_out(self, flat: Floats, evaluate_tokens: int) -> float:
        """Nats a token."""
        weights, total, count = self._model.weights(flat), 0.0, 0
        windows = host_windows(self._run.settings, self._run.held_out, evaluate_tokens=evaluate_tokens)
        for at in range(0, len(windows), MOST_AT_ONCE):
            tokens_BL, targets_BL = joined(windows[at : at + MOST_AT_ONCE])
            loss, counted, _ = self._model.loss(
                weights, torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL), keep=False
            )
            total, count = total + loss, count + counted
        return total / count

    def _add_gradients(self, weights: Weights, ids: Sequence[MicrobatchId]) -> None:
        for at in range(0, len(ids), MOST_AT_ONCE):
            tokens_BL, targets_BL = joined([self._reader.batch(one) for one in ids[at : at + MOST_AT_ONCE]])
            _, counted, saved = self._model.loss(
                weights, torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL), keep=True
            )
            assert saved is not None
            self._model.loss_backward(saved, self._gradient.flat)
            self._gradient.add_tokens(counted)


def train(
    run: WholeRun,
    method: Method,
    *,
    members: int,
    microbatches: int,
    steps: int,
    rate: float,
    evaluate_tokens: int,
) -> float:
    """Held-out nats a byte after `steps` inner steps of each member on `microbatches` each."""
    settings = replace(
        run.settings.optimizer,
        learning_rate=rate,
        total_steps=steps,
        warmup_steps=max(1, steps // 20),
        final_learning_rate_share=FINAL_SHARE,
    )
    inner = InnerSteps(run, settings)

    def ids(step: int, member: int) -> list[MicrobatchId]:
        first = (step * members + member) * microbatches
        return [MicrobatchId(first + index) for index in range(microbatches)]

    if method.local_steps == 1:
        batches = [[one for member in range(members) for one in ids(step, member)] for step in range(steps)]
        end = inner.run(run.weights[0], forms.fresh("private", inner.layout.num_values), 0, batches)
        return inner.held_out(end, evaluate_tokens)
    swarm = _Swarm(inner, method, members, run.weights[0])
    for first in range(0, steps, method.local_steps):
        window = range(first, min(first + method.local_steps, steps))
        swarm.take_window(window, [[ids(step, member) for step in window] for member in range(members)])
    return inner.held_out(swarm.finish(), evaluate_tokens)


class _Swarm:
    """Members between their rounds."""

    def __init__(self, inner: InnerSteps, method: Method, members: int, weights: Floats) -> None:
        self._inner, self._method, self._members = inner, method, members
        self._certified = weights
        self._velocity = np.zeros_like(weights)
        self._window = 0
        start = forms.fresh(method.moments, weights.size)
        self._moments = [start] * members
        """That each member's next window starts with."""
        self._pending: list[tuple[list[Floats], InnerMoments | None]] = []
        """Under delay: what members said of the window before, and what the round of it makes of their moments."""

    def take_window(self, window: range, ids: list[list[list[MicrobatchId]]]) -> None:
        """All members' inner steps, and the round that ends by then: this window's, or under delay the last one's."""
        method = self._method
        said, ends = [], []
        for member in range(self._members):
            start = self._certified
            if self._pending:
                start = outer_step(start, self._pending[0][0][member], rate=method.outer_rate)
            end = self._inner.run(start, self._moments[member], window.start, ids[member])
            said.append(self._sent(pseudo_gradient(start, end), f"{self._window} {member}"))
            ends.append(InnerMoments.of(self._inner.optimizer))
        rate_sum = sum(learning_rate(self._inner.settings, step) for step in window)
        layout, seed = self._inner.layout, f"{self._window}".encode()

        def made_public(of: Sequence[int]) -> InnerMoments:
            delta = aggregate([said[one] for one in of], [1] * len(of), rule="mean")
            return forms.public(method.moments, [ends[one] for one in of], delta, rate_sum, layout, seed)

        if method.moments == "private":
            self._moments = ends
        elif not method.delay:
            self._moments = [made_public(range(self._members))] * self._members
        elif method.moments_of == "own" or not self._pending:
            self._moments = [made_public([member]) for member in range(self._members)]
        else:
            before = self._pending[0][1]
            assert before is not None
            self._moments = [before] * self._members
        certified = made_public(range(self._members)) if method.delay and method.moments != "private" else None
        self._pending.append((said, certified))
        while len(self._pending) > method.delay:
            self._round()
        self._window += 1

    def finish(self) -> Floats:
        """The certified weights once every round is over."""
        while self._pending:
            self._round()
        return self._certified

    def _round(self) -> None:
        said, _ = self._pending.pop(0)
        mean = aggregate(said, [1] * len(said), rule=self._method.rule)
        result = self._sent(mean, f"{self._window} result {len(self._pending)}")
        momentum = np.float32(self._method.outer_momentum)
        self._velocity = self._velocity * momentum + result
        direction = result + self._velocity * momentum if self._method.outer_momentum else result
        self._certified = outer_step(self._certified, direction, rate=self._method.outer_rate)

    def _sent(self, values: Floats, what: str) -> Floats:
        """As everyone decodes it."""
        return forms.sent(values, self._method.codec, what.encode())
