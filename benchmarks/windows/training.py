"""A run trained by its members in one process: the run's own model, windows, parts, reductions and outer steps.

Members take turns; all methods see the same samples at the same step. Nothing but messages and time is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.single_process import WholeRun, joined
from benchmarks.whole_model import host_windows
from benchmarks.windows.method import Method
from kernels import windows
from kernels.threads import ONE_THREAD
from swarm.averaging.certified_gradient import CertifiedGradient, squares_of
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.averaging.reduce import reduce_part
from swarm.averaging.seeds import part_seeds, reduced_seed
from swarm.checkpoint.state import StageState
from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Version
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import RunSettings
from swarm.data.batches import BatchReader
from swarm.model.layout import ParameterLayout
from swarm.model.stage import StageModel
from swarm.optim.carried_moments import CARRIED, Carried, CarriedMoments
from swarm.optim.exact import ExactOptimizer, longest_first_moment
from swarm.optim.factored_moments import means_of
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import LocalWindow
from swarm.optim.stage_step import StageStep, first_state, stage_clip_norm

Floats = NDArray[np.float32]

FINAL_SHARE = 0.02
"""Of the highest rate, at the end: alone, at a constant rate, would pay for noise that the others average away."""
MOST_AT_ONCE = 16
"""Microbatches in a forward."""
RUN_ID = "benchmark"


class WholeModel:
    """Gradients and losses of a run's model at any weights."""

    def __init__(self, run: WholeRun) -> None:
        assert len(run.weights) == 1, "the whole model is one stage"
        self._model = StageModel(run.settings.model, 0)
        self.layout = self._model.layout
        self._run = run
        self._reader = BatchReader(run.settings, run.train)
        self._gradient = GradientSum(self.layout.num_values)

    def mean_gradient(self, flat: Floats, ids: Sequence[MicrobatchId]) -> Floats:
        """Of these microbatches together."""
        weights = self._model.weights(flat)
        self._gradient.zero()
        for at in range(0, len(ids), MOST_AT_ONCE):
            tokens_BL, targets_BL = joined([self._reader.batch(one) for one in ids[at : at + MOST_AT_ONCE]])
            _, counted, saved = self._model.loss(
                weights, torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL), keep=True
            )
            assert saved is not None
            self._model.loss_backward(saved, self._gradient.flat)
            self._gradient.add_tokens(counted)
        return self._gradient.take_mean()

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
    """Held-out nats a byte after `steps` inner steps of each member on `microbatches` each, in whole windows."""
    model, settings = WholeModel(run), _settings_of(run.settings, method, steps, rate)

    def ids(step: int, member: int) -> list[MicrobatchId]:
        first = (step * members + member) * microbatches
        return [MicrobatchId(first + index) for index in range(microbatches)]

    if method.overlap:
        weights = _overlapped(model, settings, run.weights[0], members, ids, method.overlap)
    else:
        trained = _synchronous if method.local_steps == 1 else _in_windows
        weights = trained(model, settings, run.weights[0], members, ids)
    return model.held_out(weights, evaluate_tokens)


def _settings_of(settings: RunSettings, method: Method, steps: int, rate: float) -> RunSettings:
    rounds = -(-steps // method.local_steps)
    optimizer = replace(
        settings.optimizer,
        learning_rate=rate,
        total_steps=rounds,
        warmup_steps=max(1, rounds // 20),
        final_learning_rate_share=FINAL_SHARE,
    )
    return replace(
        settings,
        optimizer=optimizer,
        averaging=replace(settings.averaging, local_steps=method.local_steps, rule=method.rule),
        codecs=replace(settings.codecs, averaging=method.codec),
    )


Ids = Callable[[int, int], list[MicrobatchId]]
"""Microbatches of a step's member."""


def _synchronous(model: WholeModel, settings: RunSettings, weights: Floats, members: int, ids: Ids) -> Floats:
    chosen, layout = settings.optimizer, model.layout
    optimizer = ExactOptimizer.of(chosen, layout)
    for step in range(chosen.total_steps):
        gradient = model.mean_gradient(weights, [one for member in range(members) for one in ids(step, member)])
        out = np.empty_like(weights)
        optimizer.step(weights, gradient, step=step, clip_norm=chosen.max_norm, out=out)
        weights = out
    return weights


def _in_windows(model: WholeModel, settings: RunSettings, weights: Floats, members: int, ids: Ids) -> Floats:
    layout, num_steps = model.layout, settings.averaging.local_steps
    state, window = first_state(settings, layout, weights), LocalWindow(settings, layout)
    step = StageStep.of_run(settings, layout, clip_norm=stage_clip_norm(settings, 0))
    parts = Parts.of(settings, layout)
    for version in range(settings.optimizer.total_steps):
        said = []
        for member in range(members):
            _take(window, state, [ids(version * num_steps + number, member) for number in range(num_steps)], model)
            said.append(encoded_window(window, parts, version, member))
        reduced, bodies = averaged(settings, parts, version, said)
        state = step.next(state, CertifiedGradient.of(parts, reduced, bodies), digest("version", [version])).state
    return state.weights


def _overlapped(
    model: WholeModel, settings: RunSettings, weights: Floats, members: int, ids: Ids, overlap: int
) -> Floats:
    """Rounds go on during the first steps of the next window. Each member begins that where it has come to by what it
    has committed to; when the result is there, its way and moments are moved by what it differs from them, the moments
    by as much of it as the steps since have left. What it contributes is what its own steps have moved."""
    layout, num_steps = model.layout, settings.averaging.local_steps
    state, parts = first_state(settings, layout, weights), Parts.of(settings, layout)
    step = StageStep.of_run(settings, layout, clip_norm=stage_clip_norm(settings, 0))
    moments, window = CarriedMoments(settings, layout), _Overlapping(settings, layout, overlap)
    under_way: list[list[memoryview]] = []
    for version in range(settings.optimizer.total_steps):
        certified = state
        if under_way:
            certified = _made(settings, parts, step, state, under_way)
        said = []
        for member in range(members):
            batches = [ids(version * num_steps + number, member) for number in range(num_steps)]
            own = _own_state(parts, moments, state, under_way[member]) if under_way else state
            values = window.take(own, certified, batches, model, version=version)
            seeds = part_seeds(RUN_ID, StageIndex(0), Version(version), PeerId(f"{member}"), num_parts=len(parts))
            said.append(
                [
                    parts.contribution_codec(part).encode(np.ascontiguousarray(values[where]), seed=seed)
                    for part, (where, seed) in enumerate(zip(parts, seeds, strict=True))
                ]
            )
        state, under_way = certified, said
    return _made(settings, parts, step, state, under_way).weights


def _made(
    settings: RunSettings, parts: Parts, step: StageStep, state: StageState, said: Sequence[Sequence[memoryview]]
) -> StageState:
    """The version that a round of these contributions makes."""
    reduced, bodies = averaged(settings, parts, state.version, said)
    return step.next(state, CertifiedGradient.of(parts, reduced, bodies), digest("version", [state.version])).state


def _own_state(parts: Parts, moments: CarriedMoments, state: StageState, said: Sequence[memoryview]) -> StageState:
    """Where a member has come to from a version, by its contribution alone."""
    way = np.empty(parts.num_values, dtype=np.float32)
    for part, where in enumerate(parts):
        if where.start < way.size:
            parts.contribution_codec(part).decode(said[part], way[where])
    before = Carried.of(state)
    assert before is not None
    carried = moments.after(before, [said[part] for part in parts.moments])
    return replace(
        state, weights=state.weights - way, moments={CARRIED: carried.encoded}, scalars=dict(carried.scalars)
    )


class _Overlapping:
    """Windows that begin before the round of the one before has ended."""

    def __init__(self, settings: RunSettings, layout: ParameterLayout, overlap: int) -> None:
        self._settings, self._layout, self._overlap = settings, layout, overlap
        self._moments = CarriedMoments(settings, layout)
        self._ratio = np.float32(longest_first_moment(settings.inner))

    def _optimizer(self, state: StageState) -> ExactOptimizer:
        layout, carried = self._layout, Carried.of(state)
        assert carried is not None
        found = ExactOptimizer.of(self._settings.inner, layout)
        self._moments.load(carried, found)
        return found

    def take(
        self,
        own: StageState,
        certified: StageState,
        batches: Sequence[list[MicrobatchId]],
        model: WholeModel,
        *,
        version: int,
    ) -> Floats:
        """All that it says."""
        chosen, optimizer, weights = self._settings.inner, self._optimizer(own), own.weights
        way = np.zeros_like(weights)
        for number, batch in enumerate(batches):
            if own is not certified and number == self._overlap:
                weights = self._joined(optimizer, weights, own, certified, number)
            out, at = np.empty_like(weights), version * len(batches) + number
            gradient = model.mean_gradient(weights, batch)
            optimizer.step(weights, gradient, step=at, clip_norm=chosen.max_norm, out=out)
            way, weights = way + (weights - out), out
        if own is not certified and self._overlap >= len(batches):
            self._joined(optimizer, weights, own, certified, len(batches))
        means = means_of(optimizer.moments["second"], self._layout)
        return np.concatenate([way, optimizer.moments["first"], means])

    def _joined(
        self, optimizer: ExactOptimizer, weights: Floats, own: StageState, certified: StageState, steps: int
    ) -> Floats:
        """What all have done takes the place of what it has; `steps` were taken since."""
        chosen, mine, all_of_us = self._settings.inner, self._optimizer(own), self._optimizer(certified)
        for name, beta in (("first", chosen.beta1), ("second", chosen.beta2)):
            moved = all_of_us.moments[name] - mine.moments[name]
            optimizer.moments[name] += np.float32(beta**steps) * moved
        np.maximum(optimizer.moments["second"], np.float32(0.0), out=optimizer.moments["second"])
        windows.shorten(optimizer.moments["first"], optimizer.moments["second"], self._ratio, threads=ONE_THREAD)
        return weights + (certified.weights - own.weights)


def _take(window: LocalWindow, state: StageState, batches: Sequence[list[MicrobatchId]], model: WholeModel) -> None:
    carried = Carried.of(state)
    assert carried is not None
    window.begin(state.weights, state.version, carried)
    for batch in batches:
        window.take_mean(model.mean_gradient(window.weights, batch))
    window.end()


def encoded_window(window: LocalWindow, parts: Parts, version: int, member: int) -> list[memoryview]:
    seeds = part_seeds(RUN_ID, StageIndex(0), Version(version), PeerId(f"{member}"), num_parts=len(parts))
    return [
        parts.contribution_codec(part).encode(window.values(where), seed=seed)
        for part, (where, seed) in enumerate(zip(parts, seeds, strict=True))
    ]


def averaged(
    settings: RunSettings, parts: Parts, version: int, said: Sequence[Sequence[memoryview]]
) -> tuple[list[ReducedPart], list[Encoded]]:
    """What reducers make of members who have done the same work."""
    reduced, bodies = [], list[Encoded]()
    for part in range(len(parts)):
        made = reduce_part(
            "all",
            parts.codec_name(part),
            parts.size(part),
            [(1, one[part]) for one in said],
            rule=settings.averaging.reduction,
            norm_cap=None,
            seed=reduced_seed(RUN_ID, StageIndex(0), Version(version), part),
        )
        squares = squares_of(parts.result_codec(part), made.body, parts.size(part))
        reduced.append(ReducedPart(part, made.digest, tuple(PeerId(f"{one}") for one in range(len(said))), (), squares))
        bodies.append(made.body)
    return reduced, bodies
