"""What one member of a run of whole models comes to by itself: exact steps in this process, and their held-out loss."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.core.ids import MicrobatchId
from swarm.core.settings import OptimizerSettings, RunSettings
from swarm.data.batches import BatchReader, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.model.stage import StageModel
from swarm.optim.exact import ExactOptimizer
from swarm.optim.gradient_sum import GradientSum

Floats = NDArray[np.float32]


def trained_alone(
    settings: RunSettings,
    chosen: OptimizerSettings,
    flat: Floats,
    train: TokenFile,
    steps: Iterable[Iterable[MicrobatchId]],
) -> tuple[Floats, list[float]]:
    """Weights after these steps, each on its microbatches, and the mean loss of each step before it, nats a token."""
    model, reader = StageModel(settings.model, 0), BatchReader(settings, train)
    optimizer, gradient = ExactOptimizer.of(chosen, model.layout), GradientSum(model.layout.num_values)
    losses = list[float]()
    for step, numbers in enumerate(steps):
        weights, loss_sum = model.weights(flat), 0.0
        gradient.zero()
        for number in numbers:
            loss, counted, saved = model.loss(weights, *map(torch.from_numpy, reader.batch(number)), keep=True)
            assert saved is not None
            model.loss_backward(saved, gradient.flat)
            gradient.add_tokens(counted)
            loss_sum += loss
        gradient.close()
        losses.append(loss_sum / gradient.num_tokens)
        out = np.empty_like(flat)
        optimizer.step(flat, gradient.take_mean(), step=step, clip_norm=chosen.max_norm, out=out)
        flat = out
    return flat, losses


def held_out_loss(settings: RunSettings, flat: Floats, held_out: TokenFile, *, limit_tokens: int) -> float:
    """Of these weights, nats a token."""
    model, total, count = StageModel(settings.model, 0), 0.0, 0
    weights = model.weights(flat)
    for batch in held_out_batches(settings, held_out, limit_tokens=limit_tokens):
        loss, counted, _ = model.loss(weights, *map(torch.from_numpy, batch), keep=False)
        total, count = total + loss, count + counted
    return total / count
