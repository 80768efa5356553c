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
from swarm.model.stage import StageModel
from swarm.optim.carried_moments import Carried
from swarm.optim.exact import ExactOptimizer
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

    if method.local_steps == 1:
        weights = _synchronous(model, settings, run.weights[0], members, ids)
    else:
        weights = _in_windows(model, settings, run.weights[0], members, ids, overlap=method.overlap)
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


def _in_windows(
    model: WholeModel, settings: RunSettings, weights: Floats, members: int, ids: Ids, *, overlap: int
) -> Floats:
    """Of a round that goes on during the next window's first `overlap` steps, the weights come evenly over the first
    half of them, and the rest in the end."""
    layout, num_steps = model.layout, settings.averaging.local_steps
    state, window = first_state(settings, layout, weights), LocalWindow(settings, layout)
    step = StageStep.of_run(settings, layout, clip_norm=stage_clip_norm(settings, 0))
    parts = Parts.of(settings, layout)
    under_way: list[list[memoryview]] = []
    for version in range(settings.optimizer.total_steps):
        certified = _made(settings, parts, step, state, under_way) if under_way else state
        said = []
        for member in range(members):
            batches = [ids(version * num_steps + number, member) for number in range(num_steps)]
            own = under_way[member] if under_way else None
            _take(window, state, own, certified, batches, model, overlap=overlap)
            said.append(encoded_window(window, parts, version, member))
        if overlap:
            state, under_way = certified, said
        else:
            state = _made(settings, parts, step, certified, said)
    return _made(settings, parts, step, state, under_way).weights if under_way else state.weights


def _made(
    settings: RunSettings, parts: Parts, step: StageStep, state: StageState, said: Sequence[Sequence[memoryview]]
) -> StageState:
    """The version that a round of these contributions makes."""
    reduced, bodies = averaged(settings, parts, state.version, said)
    return step.next(state, CertifiedGradient.of(parts, reduced, bodies), digest("version", [state.version])).state


def _take(
    window: LocalWindow,
    state: StageState,
    own: Sequence[memoryview] | None,
    certified: StageState,
    batches: Sequence[list[MicrobatchId]],
    model: WholeModel,
    *,
    overlap: int,
) -> None:
    """From the state, or from where it has come to by its `own` contribution, until what all have made is there."""
    carried = Carried.of(certified)
    assert carried is not None
    if own is None:
        window.begin(certified.weights, certified.version, carried)
    else:
        window.begin_ahead(state, own)
    for number, batch in enumerate(batches, 1):
        window.take_mean(model.mean_gradient(window.weights, batch))
        if own is not None and number == min(overlap, len(batches)):
            window.begin_from(certified.weights, carried)
        elif own is not None and number <= -(-overlap // 2):
            where = _share(certified.weights.size, number - 1, -(-overlap // 2))
            window.move([(where, certified.weights[where])])
    window.end()


def _share(size: int, index: int, count: int) -> slice:
    """One of so many, of so many values."""
    return slice(index * size // count, (index + 1) * size // count)


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
