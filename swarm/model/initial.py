"""A run's first weights: drawn from a seed, or read from a Hugging Face checkpoint.

They are made once, by whoever starts the run, and shipped: seeded initialization gives other bits on other machines.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model.families import family_of, is_tied, validate_config, validate_stage_layers
from swarm.model.layout import ParameterLayout
from swarm.model.stack import decoder_of, global_name
from swarm.model.stage import StageModel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def initial_weights(model: ModelSettings, seed: int, source: Path | None) -> Iterator[NDArray[np.float32]]:
    """Flat weights of each stage, one at a time: memory for one stage is enough.

    Without `source` they follow the family's own initialization rules, each module from a seed of its own; with it,
    `source` is a folder with a Hugging Face checkpoint in safetensors, and only a stage's own tensors are read. With
    tied embeddings the head is a copy of the embedding. Raises SettingsError naming the file and tensor at fault.
    """
    validate_stage_layers(model)
    for stage in range(model.num_stages):
        if source is None:
            yield _drawn(model, stage, seed)
        else:
            yield _read(model, StageModel(model, stage).layout, source)


def _drawn(model: ModelSettings, stage: int, seed: int) -> NDArray[np.float32]:
    import torch
    from torch import nn

    stage_model = StageModel(replace(model, compute_dtype="fp32"), stage)
    flat = np.zeros(stage_model.layout.num_values, dtype=np.float32)
    weights = stage_model.weights(flat)
    decoder = decoder_of(model.config_json)
    family = family_of(model.config_json)
    shape = validate_config(model.config_json)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module, name in _in_order(weights.stack):
            # A seed for each module: a stage's weights do not depend on how the others are cut.
            torch.manual_seed(_seed_of(seed, global_name(model, stage, name)))
            decoder._init_weights(module)
        if weights.head_VD is not None and not is_tied(model, stage):
            name = family.embedding_name if shape.tied else family.head_name
            head = (
                nn.Embedding(shape.vocab_size, shape.hidden_size, decoder.config.pad_token_id, device="meta")
                if shape.tied
                else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
            )
            head.weight = weights.head_VD
            torch.manual_seed(_seed_of(seed, name))
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


def _read(model: ModelSettings, layout: ParameterLayout, source: Path) -> NDArray[np.float32]:
    from safetensors import SafetensorError, safe_open

    family = family_of(model.config_json)
    tied = validate_config(model.config_json).tied
    files = _files_by_tensor(source)
    by_file: dict[str, list[tuple[str, str]]] = {}
    for name in layout.names:
        # A tied checkpoint has no tensor for the head, or one that is not used: its embedding counts.
        stored = family.embedding_name if tied and name == family.head_name else name
        if stored not in files:
            raise SettingsError(
                f"{source} has no tensor {stored}; the model's config and the checkpoint must be of one architecture"
            )
        by_file.setdefault(files[stored], []).append((name, stored))
    flat = np.empty(layout.num_values, dtype=np.float32)
    views = layout.views(flat)
    for file, wanted in sorted(by_file.items()):
        try:
            with safe_open(source / file, framework="pt") as tensors:
                for name, stored in wanted:
                    shape = tuple(tensors.get_slice(stored).get_shape())
                    if shape != views[name].shape:
                        raise SettingsError(
                            f"{source / file}: tensor {stored} has shape {shape}, the model's config asks for "
                            f"{views[name].shape}; use the checkpoint's own config"
                        )
                    np.copyto(views[name], tensors.get_tensor(stored).float().numpy())
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{source / file} cannot be read: {error}; download it again") from error
    return flat


def _files_by_tensor(source: Path) -> dict[str, str]:
    """File name of each tensor of a checkpoint, in one file or sharded with an index."""
    from safetensors import SafetensorError, safe_open

    if (source / INDEX_FILE).is_file():
        try:
            files = json.loads((source / INDEX_FILE).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SettingsError(f"{source / INDEX_FILE} is no safetensors index: {error}") from error
        for file in sorted(set(files.values())):
            # An index is data: it may not lead out of its folder.
            if Path(file).name != file or not (source / file).is_file():
                raise SettingsError(f"{source} lacks {file}, which {INDEX_FILE} names; download it again")
        return dict(files)
    if not (source / SINGLE_FILE).is_file():
        raise SettingsError(
            f"{source} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert the checkpoint to safetensors "
            "(`save_pretrained` of transformers writes it)"
        )
    try:
        with safe_open(source / SINGLE_FILE, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{source / SINGLE_FILE} cannot be read: {error}; download it again") from error
