"""The truth for tests: a run's model trained whole, in plain PyTorch, on exactly given microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.whole_model import WholeModel, WholeStep, host_windows
from bootstrap.state.run_folder import PreparedRun
from swarm.core.ids import MicrobatchId
from swarm.data.batches import BatchReader


@dataclass(frozen=True)
class Reference:
    """What single-process training made of the run."""

    model: WholeModel
    steps: list[WholeStep] = field(default_factory=list)
    first_gradient_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over the first step's tokens, neither divided nor clipped, by parameter name."""
    held_out_loss: float = 0.0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.parameters.items()}


def train_reference(
    run: PreparedRun, microbatches: Mapping[str, Sequence[int]], *, evaluate_tokens: int = 65536
) -> Reference:
    """Train on `microbatches` (a report's: ids by step), from the run's initial weights.

    Held-out loss is over the windows the host evaluates with the same `evaluate_tokens`.
    """
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    settings = run.settings
    reader = BatchReader(settings, run.data.train())
    whole = WholeModel(settings, [state.weights for state in run.states])
    steps: list[WholeStep] = []
    first: dict[str, torch.Tensor] = {}
    for number in range(len(microbatches)):
        for microbatch_id in microbatches[str(number)]:
            whole.add(reader.batch(MicrobatchId(microbatch_id)))
        first = first or whole.gradient_sums()
        steps.append(whole.step(number))
    held_out = host_windows(settings, run.data.held_out(), evaluate_tokens=evaluate_tokens)
    return Reference(whole, steps, first, whole.held_out_loss(held_out))
