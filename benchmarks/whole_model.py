"""A run's model trained whole, in one process, in plain PyTorch: what the swarm is measured against.

transformers' own causal model, one loss over full logits, torch.optim. Of homeswarm's conventions it keeps those that
decide the mathematics: token losses are summed and divided once by a step's target tokens, clipping is per stage,
weight decay is for tensors of two or more dimensions, the schedule goes by step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from swarm.core.settings import OptimizerSettings, RunSettings
from swarm.core.state.schedule import learning_rate
from swarm.data.batches import Batch, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.model.documents import Documents
from swarm.model.families import whole_config
from swarm.model.link import link_to
from swarm.model.stack import stage_layout
from swarm.optim.matrices import Matrices
from verification.pipeline.headers import document_bounds


@dataclass(frozen=True)
class WholeStep:
    """One optimizer step."""

    loss: float
    """Mean training loss in nats a token, on the weights before the step."""
    num_tokens: int
    stage_norms: tuple[float, ...]
    """Norm of each stage's mean gradient before clipping."""
    clipped: tuple[bool, ...]


class WholeModel:
    """The model of a run that begins where the run's stages do."""

    def __init__(self, settings: RunSettings, weights: Sequence[NDArray[np.float32]]) -> None:
        """`weights` are the stages' flat vectors."""
        from transformers import AutoModelForCausalLM

        self.settings = settings
        config = type(whole_config(settings.model.config_json)).from_dict(
            whole_config(settings.model.config_json).to_dict() | {"tie_word_embeddings": False, "use_cache": False}
        )
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self._stages = [stage_layout(settings.model, stage) for stage in range(settings.model.num_stages)]
        tensors = {
            name: torch.from_numpy(view.copy())
            for layout, flat in zip(self._stages, weights, strict=True)
            for name, view in layout.views(flat).items()
        }
        self.model.load_state_dict(tensors, strict=True)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        num_all = sum(layout.num_values for layout in self._stages)
        self._clip_norms = [
            settings.optimizer.max_norm * (layout.num_values / num_all) ** 0.5 for layout in self._stages
        ]
        turned = {
            layout.names[layout.offsets.index(one.start)]
            for layout in self._stages
            for one in Matrices.of(layout).places
        }
        self._optimizers = _optimizers(settings.optimizer, self.parameters, turned)
        self._loss_sum, self._num_tokens = 0.0, 0

    def add(self, batch: Batch) -> None:
        """Add the gradient of the batch's summed token losses to the parameters' gradients."""
        loss_sum, num_tokens = self._loss(batch)
        torch.autograd.backward((loss_sum,))
        self._loss_sum += float(loss_sum.detach())
        self._num_tokens += num_tokens

    def gradient_sums(self) -> dict[str, torch.Tensor]:
        """Copies of what `add` has gathered since the last step, by parameter name."""
        return {name: value.grad.clone() for name, value in self.parameters.items() if value.grad is not None}

    def step(self, number: int) -> WholeStep:
        """Turn version `number` into the next, with the gradients gathered."""
        norms, clipped = [], []
        for layout, clip_norm in zip(self._stages, self._clip_norms, strict=True):
            gradients: list[torch.Tensor] = []
            for name in layout.names:
                gradient = self.parameters[name].grad
                assert gradient is not None
                gradients.append(gradient)
            torch._foreach_div_(gradients, float(self._num_tokens))
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if norm > clip_norm:
                torch._foreach_mul_(gradients, clip_norm / norm)
            norms.append(norm)
            clipped.append(norm > clip_norm)
        rate = learning_rate(self.settings.optimizer, number)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        if self.settings.optimizer.name == "sgd":  # torch's SGD has no decoupled weight decay
            with torch.no_grad():
                for parameter in self.parameters.values():
                    if parameter.ndim >= 2:
                        parameter.mul_(1.0 - rate * self.settings.optimizer.weight_decay)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = WholeStep(self._loss_sum / self._num_tokens, self._num_tokens, tuple(norms), tuple(clipped))
        self._loss_sum, self._num_tokens = 0.0, 0
        return done

    def train_step(self, number: int, batches: Iterable[Batch]) -> WholeStep:
        """One whole step on these microbatches."""
        for batch in batches:
            self.add(batch)
        return self.step(number)

    def held_out_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss in nats a token, nothing learned."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                loss_sum, num_tokens = self._loss(batch)
                total, count = total + float(loss_sum), count + num_tokens
        return total / count

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        tokens_BL, targets_BL = (torch.from_numpy(array) for array in batch)
        bf16 = self.settings.model.compute_dtype == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            documents = Documents.within(document_bounds(targets_BL.numpy()), tokens_BL, link_to(tokens_BL.device))
            given = {} if documents is None else {"position_ids": documents.positions_BL}
            logits_BLV = self.model(input_ids=tokens_BL, **given).logits
        targets_N = targets_BL.flatten().clamp(min=-100)
        loss_sum = functional.cross_entropy(logits_BLV.float().flatten(0, 1), targets_N, reduction="sum")
        return loss_sum, int((targets_N >= 0).sum())


def host_windows(settings: RunSettings, held_out: TokenFile, *, evaluate_tokens: int) -> list[Batch]:
    """The held-out microbatches that a host with this `--evaluate-tokens` evaluates: whole ones only."""
    each = settings.microbatch_tokens
    count = max(1, min(settings.data.num_held_out_samples // settings.batch.microbatch_size, evaluate_tokens // each))
    return held_out_batches(settings, held_out, limit_tokens=count * each)


def _optimizers(
    settings: OptimizerSettings, named: Mapping[str, torch.nn.Parameter], turned: Collection[str]
) -> list[torch.optim.Optimizer]:
    """`turned`: what is Muon's, if that is the run's optimizer."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.name == "sgd":
        return [torch.optim.SGD(named.values(), lr=rate, momentum=settings.momentum)]
    if settings.name == "muon":
        muon = torch.optim.Muon(
            [parameter for name, parameter in named.items() if name in turned],
            lr=rate,
            weight_decay=decay,
            momentum=settings.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = {name: parameter for name, parameter in named.items() if name not in turned}
        return [muon, *_optimizers(replace(settings, name="adamw"), rest, ())]
    parameters = list(named.values())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas, epsilon = (settings.beta1, settings.beta2), settings.epsilon
    if settings.correction == "nadamw":
        return [torch.optim.NAdam(groups, lr=rate, betas=betas, eps=epsilon, decoupled_weight_decay=True)]
    return [torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)]
