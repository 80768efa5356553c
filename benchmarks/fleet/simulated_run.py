"""A whole run computed in one process, step by step, with the very code of its peers.

Every stage has the same number of replicas, each with its own gradient sum and residual. A step's microbatches are
dealt out to them in turn; activations, their gradients, contributions and results all pass through the run's codecs,
contributions through its aggregation, and the first replica of a stage takes the exact step for all of them. Nothing
but messages, signatures and time is left out.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.single_process import WholeRun, joined
from benchmarks.whole_model import host_windows
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import Accumulation, StageReplica
from swarm.averaging.activations import activation_codec
from swarm.averaging.certified_gradient import squares_of
from swarm.checkpoint.state import StageState
from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step
from swarm.core.round.contribution import ReducedPart, Work
from swarm.core.settings import RunSettings
from swarm.data.batches import BatchReader
from swarm.model.stage import StageModel, Weights
from swarm.model.subspace import StageInput, given_on
from swarm.optim.exact import ExactOptimizer
from swarm.optim.stage_step import stage_clip_norm

Floats = NDArray[np.float32]
Tamper = Callable[[StageIndex, Step, list[Floats]], list[Floats]]
"""What the replicas of a stage contribute in place of their mean gradients, which are given in their order."""


class SimulatedRun:
    """A run at some version, with `num_replicas` in each stage."""

    def __init__(
        self, run: WholeRun, settings: RunSettings, num_replicas: int, *, tamper: Tamper | None = None
    ) -> None:
        """`settings` may differ from the run's own in codecs, averaging and optimizer."""
        self.settings = settings
        self.activation_bytes = 0
        """Of the steps so far, all boundaries between stages, there and back."""
        self.upload_bytes = 0
        """Of the rounds so far, by the replica that sends most."""
        self._tamper = tamper
        self._run = run
        self._reader = BatchReader(settings, run.train)
        self._forward = activation_codec(settings.codecs.activations)
        self._backward = activation_codec(settings.codecs.activation_gradients)
        models = [StageModel(settings.model, stage) for stage in range(settings.model.num_stages)]
        clip_norms = [stage_clip_norm(settings, stage) for stage in range(settings.model.num_stages)]
        self.stages = [
            [_replica(settings, model, flat, clip_norm) for _ in range(num_replicas)]
            for model, flat, clip_norm in zip(models, run.weights, clip_norms, strict=True)
        ]

    def step(self, number: int) -> float:
        """Take step `number`; the mean training loss in nats a token on the weights before it."""
        step, each = Step(number), self.settings.microbatches_per_step
        ids = [MicrobatchId(number * each + index) for index in range(each)]
        num_replicas = len(self.stages[0])
        loss_sum = sum(self._work(replica, step, ids[replica::num_replicas]) for replica in range(num_replicas))
        uploads = [self._round(replicas, step) for replicas in self.stages]
        self.upload_bytes += max(uploads)
        return loss_sum / (each * self.settings.microbatch_tokens)

    def held_out_loss(self, evaluate_tokens: int) -> float:
        """Nats a token as the host measures them: forward through the run's activation codec."""
        loss_sum, count = 0.0, 0
        for tokens_BL, targets_BL in host_windows(self.settings, self._run.held_out, evaluate_tokens=evaluate_tokens):
            ids_BL = torch.from_numpy(tokens_BL)
            x: StageInput = ids_BL
            for replicas in self.stages[:-1]:
                y_BLD, _ = replicas[0].model.forward(_weights(replicas[0]), x, keep=False)
                x = self._sent_forward(y_BLD, ids_BL)
            last = self.stages[-1][0]
            found, num_tokens, _ = last.model.loss(_weights(last), x, torch.from_numpy(targets_BL), keep=False)
            loss_sum, count = loss_sum + found, count + num_tokens
        return loss_sum / count

    def _work(self, replica: int, step: Step, ids: Sequence[MicrobatchId]) -> float:
        """Forward and backward of these microbatches, by this replica of every stage; the sum of token losses."""
        if not ids:
            return 0.0
        tokens_BL, targets_BL = (torch.from_numpy(array) for array in joined([self._reader.batch(key) for key in ids]))
        line = [replicas[replica] for replicas in self.stages]
        x: StageInput = tokens_BL
        saved = []
        for stage in line[:-1]:
            y_BLD, kept = stage.model.forward(_weights(stage), x, keep=True)
            saved.append(kept)
            x = self._sent_forward(y_BLD, tokens_BL)
        sums = [stage.sum_of(step) for stage in line]
        loss_sum, num_tokens, kept_loss = line[-1].model.loss(_weights(line[-1]), x, targets_BL, keep=True)
        assert kept_loss is not None
        grad_BLD = line[-1].model.loss_backward(kept_loss, sums[-1].gradient.flat)
        for index in reversed(range(len(line) - 1)):
            kept = saved[index]
            assert kept is not None
            assert grad_BLD is not None
            sent_BLD = self._sent_backward(grad_BLD)
            grad_BLD = line[index].model.backward(kept, sent_BLD, sums[index].gradient.flat)
        for stage in line:
            for key in ids:
                stage.record(step, Work(key, 0, stage.version, num_tokens // len(ids), bytes(32), bytes(32)))
        return loss_sum

    def _sent_forward(self, y_BLD: torch.Tensor, ids_BL: torch.Tensor) -> StageInput:
        encoded = self._forward.encode(y_BLD)
        self.activation_bytes += len(encoded)
        return given_on(self.settings.model, self._forward.decode(encoded, _shape(y_BLD)), ids_BL)

    def _sent_backward(self, grad_BLD: torch.Tensor) -> torch.Tensor:
        encoded = self._backward.encode(grad_BLD)
        self.activation_bytes += len(encoded)
        return self._backward.decode(encoded, _shape(grad_BLD))

    def _round(self, replicas: Sequence[StageReplica], step: Step) -> int:
        """Contributions, aggregation, result and the exact step of a stage; bytes that each replica sent."""
        first = replicas[0]
        closed = [replica.close(step) for replica in replicas]
        if self._tamper is not None:
            self._replace(first.stage, step, closed)
        encoded = [
            ContributionEncoder(replica).encode(step, accumulation, _seeds(replica, step, index))[0]
            for index, (replica, accumulation) in enumerate(zip(replicas, closed, strict=True))
        ]
        everyone = tuple(PeerId(f"replica {index}") for index in range(len(replicas)))
        bodies, reduced = [], []
        for part in range(first.num_parts):
            held = [
                (accumulation.gradient.num_tokens, parts[part])
                for accumulation, parts in zip(closed, encoded, strict=True)
                if parts
            ]
            seed = digest("reduced-seed", [step, first.stage, part])
            body, found = PartReducer(first).reduce(part, held, norm_cap=first.norm_cap(), seed=seed)
            bodies.append(body)
            squares = squares_of(first.parts().result_codec(part), body, first.parts().size(part))
            reduced.append(ReducedPart(part, found, everyone, squares=squares))
        new = first.next_version(first.certified_gradient(reduced, bodies), digest("version", [step]))
        for replica in replicas:
            replica.swap(new)
        others = len(replicas) - 1
        contribution_bytes = max(sum(map(len, parts)) for parts in encoded)
        return round((contribution_bytes + sum(map(len, bodies))) * others / len(replicas))

    def _replace(self, stage: StageIndex, step: Step, closed: Sequence[Accumulation]) -> None:
        assert self._tamper is not None
        means = self._tamper(stage, step, [accumulation.gradient.take_mean() for accumulation in closed])
        for accumulation, mean in zip(closed, means, strict=True):
            accumulation.gradient.flat.copy_(torch.from_numpy(mean * np.float32(accumulation.gradient.num_tokens)))


def run_steps(simulated: SimulatedRun, steps: int) -> float:
    """Take so many steps; the last training loss, or infinity as soon as it is not finite."""
    loss = math.inf
    for number in range(steps):
        loss = simulated.step(number)
        if not math.isfinite(loss):
            return math.inf
    return loss


def _replica(settings: RunSettings, model: StageModel, flat: Floats, clip_norm: float) -> StageReplica:
    layout = model.layout
    optimizer = ExactOptimizer.of(settings.optimizer, layout)
    state = StageState(0, layout, flat, dict(optimizer.state_arrays()), dict(optimizer.scalars))
    return StageReplica(settings, model, state, clip_norm=clip_norm)


def _seeds(replica: StageReplica, step: Step, index: int) -> list[bytes]:
    return [digest("part-seed", [step, replica.stage, index, part]) for part in range(replica.num_parts)]


def _weights(replica: StageReplica) -> Weights:
    return replica.weights_for(Step(replica.version))[1]


def _shape(tensor_BLD: torch.Tensor) -> tuple[int, int, int]:
    num_samples, num_tokens, width = tensor_BLD.shape
    return num_samples, num_tokens, width
