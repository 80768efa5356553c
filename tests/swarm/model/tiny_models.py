"""Small models for tests: configs of every family, whole models and their weights cut into stages."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.core.settings import ModelSettings
from swarm.model.families import canonical_config_json, family_of, whole_config
from swarm.model.stage import StageModel
from tests.swarm.model.exactness import flat_weights

VOCAB_SIZE = 97

CUTS = {
    1: ((0, 4),),
    2: ((0, 1), (1, 4)),
    3: ((0, 1), (1, 3), (3, 4)),
}
"""Stage layers of the four-layer models below, by number of stages."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "llama-tied": _SIZES
    | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-scaled-positions": _SIZES
    | {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # head_dim is not hidden_size / heads, as in every real Qwen3.
    "qwen3": _SIZES
    | {"model_type": "qwen3", "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3-tied": _SIZES | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "dtype": "bfloat16"},
    # Two kinds of layer, so that a stage which counts its layers from 0 would take the wrong kind.
    "qwen3-window": _SIZES
    | {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
}


def tiny_model(config: str, num_stages: int, **settings: Any) -> ModelSettings:
    """Settings of one of CONFIGS cut into 1, 2 or 3 stages."""
    return ModelSettings(config_json=canonical_config_json(CONFIGS[config]), stage_layers=CUTS[num_stages], **settings)


def whole_model(model: ModelSettings, seed: int = 0) -> Any:
    """The transformers model, whole, randomly initialized."""
    import transformers

    config = whole_config(model.config_json)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole_class = getattr(transformers, family_of(model.config_json).causal_class)
        own = type(config).from_dict(config.to_dict())
        return whole_class._from_config(own, dtype=torch.float32, attn_implementation="sdpa").eval()


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
