"""A run's first weights: drawn from a seed, or read from a Hugging Face checkpoint.

They are made once, by whoever starts the run, and shipped: seeded initialization gives other bits on other machines.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.core.settings import ModelSettings
from swarm.model.families import family_of, is_tied, validate_config, validate_stage_layers
from swarm.model.layout import ParameterLayout
from swarm.model.stack import decoder_of, global_name, stage_layout
from swarm.model.stage import StageModel
from swarm.model.stored import read_tensors


def initial_weights(model: ModelSettings, seed: int, source: Path | None) -> Iterator[NDArray[np.float32]]:
    """Flat weights of each stage, one at a time: memory for one stage is enough. Raises as `stage_weights`."""
    validate_stage_layers(model)
    for stage in range(model.num_stages):
        yield stage_weights(model, stage, seed, source)


def stage_weights(model: ModelSettings, stage: int, seed: int, source: Path | None) -> NDArray[np.float32]:
    """A stage's flat weights.

    Without `source` they follow the family's own initialization rules, each module from a seed of its own; with it,
    `source` is a folder with a Hugging Face checkpoint in safetensors, of which only the stage's own tensors are read,
    and only the files that hold them need be there. With tied embeddings the head is a copy of the embedding, where it
    is not the embedding itself. Raises SettingsError naming the file and tensor at fault.

    Of a model with a frozen base, what the adapters begin with, whatever the base is.
    """
    if model.has_base:
        return _first_adapters(stage_layout(model, stage), seed)
    if source is None:
        return _drawn(model, stage, seed)
    family, tied = family_of(model.config_json), validate_config(model.config_json).tied
    return read_tensors(source, family, stage_layout(model, stage), family.head_name if tied else None)


def _first_adapters(layout: ParameterLayout, seed: int) -> NDArray[np.float32]:
    """As peft has it: A uniform as a linear module's weights are (Kaiming, a = sqrt 5), B zero."""
    import torch

    flat = np.zeros(layout.num_values, dtype=np.float32)
    for name, view in layout.views(flat).items():
        if ".lora_A." in name:
            bound = view.shape[1] ** -0.5
            chance = torch.Generator().manual_seed(_seed_of(seed, name))
            torch.from_numpy(view).uniform_(-bound, bound, generator=chance)
    return flat


def _drawn(model: ModelSettings, stage: int, seed: int) -> NDArray[np.float32]:
    import torch
    from torch import nn

    stage_model = StageModel(replace(model, compute_dtype="fp32"), stage)
    flat = np.zeros(stage_model.layout.num_values, dtype=np.float32)
    weights = stage_model.weights(flat)
    decoder = decoder_of(model.config_json)
    family = family_of(model.config_json)
    shape = validate_config(model.config_json)
    chance = torch.default_generator  # transformers draws from it; torch.manual_seed would seed each kind of device
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module, name in _in_order(weights.stack):
            # A seed for each module: a stage's weights do not depend on how the others are cut.
            chance.manual_seed(_seed_of(seed, global_name(model, stage, name)))
            decoder._init_weights(module)
        if weights.head_VD is not None and not is_tied(model, stage):
            name = family.embedding_name if shape.tied else family.head_name
            head = (
                nn.Embedding(shape.vocab_size, shape.hidden_size, decoder.config.pad_token_id, device="meta")
                if shape.tied
                else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
            )
            head.weight = weights.head_VD
            chance.manual_seed(_seed_of(seed, name))
            decoder._init_weights(head)
    return flat


def _in_order(stack: Any) -> Iterator[tuple[Any, str]]:
    """The stack's modules as transformers initializes them, parts before the whole: some families' wholes do it again.
    Each has the name of its first parameter, or its own."""
    for path, module in reversed(list(stack.named_modules())):
        owned = [name for name, _ in module.named_parameters(recurse=False)]
        if path not in ("", "layers") and any(True for _ in module.parameters()):
            yield module, ".".join([path, *owned[:1]])


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"homeswarm/initial/{seed}/{name}".encode()).digest()[:7], "big")
