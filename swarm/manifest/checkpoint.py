"""A manifest that goes on from a Hugging Face folder: what `swarm init --checkpoint` writes, and says of the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.core.tables import show
from swarm.data.tokenizer import BYTES
from swarm.manifest.file import Manifest
from swarm.manifest.model import checkpoint_config, num_frozen, stage_num_parameters
from swarm.manifest.tables import ModelTable

LONGEST_SEQUENCE = 1024
"""Proposed for models that were made for more: memory grows with it."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def fields_from(folder: Path, model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By table: the model, as many tokens in a sample as its positions allow, and its tokenizer if it has one.

    `model` has fields that were chosen. Raises SettingsError for a folder that holds no model that can be trained.
    """
    from swarm.model.families import canonical_config_json, validate_config

    shape = validate_config(canonical_config_json(checkpoint_config(folder)))
    stages = min(ModelTable.stages, shape.num_layers)
    data: dict[str, Any] = {"sequence_length": min(LONGEST_SEQUENCE, shape.max_positions)}
    if (folder / "tokenizer.json").is_file():
        data["tokenizer"] = str(folder)
    return {"model": {"preset": None, "checkpoint": str(folder), "stages": stages, **model}, "data": data}


def what_was_read(manifest: Manifest) -> list[str]:
    """Lines for people: what a manifest takes from its checkpoint."""
    from swarm.model.families import validate_config

    config: Mapping[str, Any] = json.loads(manifest.model.config_json)
    shape, stages = validate_config(manifest.model.config_json), manifest.model.num_stages
    special = [f"{name.removesuffix('_token_id')} {show(config[name])}" for name in SPECIAL if config.get(name)]
    lines = [
        f"{shape.model_type}: {shape.num_layers} layers of width {shape.hidden_size}, {shape.vocab_size} tokens, "
        f"up to {shape.max_positions} in a sequence, weights in {config['dtype']}"
    ]
    if special:
        lines.append(f"special tokens: {', '.join(special)}")
    adapters = manifest.model.adapters
    if adapters.rank:
        frozen, trained = num_frozen(manifest.model), sum(stage_num_parameters(manifest.model))
        lines.append(
            f"its {frozen:,} parameters are frozen{' in 4 bits' if adapters.base == 'nf4' else ''}; adapters of rank "
            f"{adapters.rank} with {trained:,} are trained"
        )
    if shape.tied and adapters.rank:
        lines.append("its embeddings are tied, and frozen")
    elif shape.tied and stages == 1:
        lines.append("its embeddings are tied, and stay so")
    elif shape.tied:
        lines.append(
            f"its embeddings are tied: with {stages} stages the head trains on its own, and is exported so; "
            "model.stages = 1 keeps them tied"
        )
    if manifest.data.tokenizer == BYTES:
        lines.append(
            'there is no tokenizer.json: data.tokenizer = "bytes" is right for a model of bytes; else save its '
            "tokenizer there with save_pretrained() of transformers"
        )
    return lines
