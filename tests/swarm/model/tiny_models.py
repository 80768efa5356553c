"""Small models for tests: configs of every family, whole models and their weights cut into stages."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.families import exactness
from benchmarks.families.configs import CONFIGS, VOCAB_SIZE
from benchmarks.families.exactness import flat_weights
from swarm.core.settings import ModelSettings
from swarm.model.families import canonical_config_json
from swarm.model.stage import StageModel

CUTS = {
    1: ((0, 4),),
    2: ((0, 1), (1, 4)),
    3: ((0, 1), (1, 3), (3, 4)),
}
"""Stage layers of the four-layer models below, by number of stages."""


def tiny_model(config: str, num_stages: int, **settings: Any) -> ModelSettings:
    """Settings of one of CONFIGS cut into 1, 2 or 3 stages."""
    return ModelSettings(config_json=canonical_config_json(CONFIGS[config]), stage_layers=CUTS[num_stages], **settings)


def whole_model(model: ModelSettings, seed: int = 0) -> Any:
    """The transformers model, whole, randomly initialized."""
    return exactness.whole_model(model.config_json, seed)


def stages_of(model: ModelSettings, whole: Any) -> list[tuple[StageModel, NDArray[np.float32]]]:
    """Each stage with the whole model's weights as its flat vector."""
    stages = [StageModel(model, stage) for stage in range(model.num_stages)]
    return [(stage, flat_weights(stage.layout, whole.state_dict())) for stage in stages]


def token_batch(num_samples: int, sequence_length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, each (B, L) int64; a tenth of the targets is not counted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (num_samples, sequence_length + 1), generator=generator)
    targets_BL = ids[:, 1:].clone()
    targets_BL[torch.rand(targets_BL.shape, generator=generator) < 0.1] = -100
    return ids[:, :-1].contiguous(), targets_BL
