"""Adapters of a checkpoint as peft has them, and the model that they make with their base."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.checkpoint.archive import CheckpointInfo, load_weights
from swarm.checkpoint.parent import weights_digest
from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.data.pieces import list_pieces
from swarm.disk.mapped_file import mapped
from swarm.model.adapters.base import Base, BaseTensor, base_by_layer, base_layout
from swarm.model.adapters.making import as_kept
from swarm.model.families import family_of
from swarm.model.layout import ParameterLayout
from swarm.model.stack import stage_layout
from swarm.model.stored import read_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
WeightsByPart = list[tuple[ParameterLayout, Callable[[], NDArray[np.float32]]]]
"""A model's, some at a time."""

PREFIX = "base_model.model."
"""Of tensors' names in peft's files."""
HOW_TO_LOAD = "these are LoRA adapters: `PeftModel.from_pretrained(model, FOLDER)` of peft puts them onto their base"


def write_adapters(info: CheckpointInfo, out: Path) -> None:
    """Both files into the folder `out`. Raises SettingsError if the checkpoint is damaged."""
    from safetensors.torch import save_file

    adapters, tensors = info.meta.model.adapters, adapters_of(info)
    parent = info.meta.lineage.get("parent")
    config = {
        "base_model_name_or_path": None if parent is None else parent["name"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "task_type": "CAUSAL_LM",
    }
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {PREFIX + name: torch.from_numpy(np.array(values)) for name, values in tensors.items()}
    save_file(named, out / TENSORS, metadata={"format": "pt"})


def adapters_of(info: CheckpointInfo) -> dict[str, NDArray[np.float32]]:
    """Of all stages, by name."""
    model, found = info.meta.model, dict[str, NDArray[np.float32]]()
    for stage in range(model.num_stages):
        layout = stage_layout(model, stage)
        found |= layout.views(load_weights(info, stage, layout))
    return found


def merged_weights(info: CheckpointInfo, base: Path) -> WeightsByPart:
    """The whole model's weights, a layer's at a time: what the swarm has computed with, in one matrix where it were
    three.

    `base` is the Hugging Face folder that the run began from, or the host's file. Raises SettingsError for another.
    """
    model = info.meta.model
    if not model.has_base:
        raise SettingsError(f"{info.path} holds a whole model, no adapters: export it without --base")
    _check_base(info, base)
    adapters = adapters_of(info)
    made: WeightsByPart = []
    for tensors in base_by_layer(model):
        layout = ParameterLayout.of({tensor.name: tensor.shape for tensor in tensors})
        made.append((layout, partial(_merged, model, base, layout, tensors, adapters)))
    return made


def _merged(
    model: ModelSettings,
    base: Path,
    layout: ParameterLayout,
    tensors: tuple[BaseTensor, ...],
    adapters: dict[str, NDArray[np.float32]],
) -> NDArray[np.float32]:
    if base.is_dir():
        flat = read_tensors(base, family_of(model.config_json), layout, None)
        values = {tensor.name: as_kept(tensor, torch.from_numpy(layout.views(flat)[tensor.name])) for tensor in tensors}
    else:
        held = Base(base_layout(model), mapped(base))
        values = {tensor.name: held.tensor(tensor.name).dense(torch.float32) for tensor in tensors}
    merged = np.empty(layout.num_values, dtype=np.float32)
    for name, view in layout.views(merged).items():
        module = name.removesuffix(".weight")
        low, high = adapters.get(f"{module}.lora_A.weight"), adapters.get(f"{module}.lora_B.weight")
        dense = values[name]
        if low is not None and high is not None:
            dense = dense + model.adapters.scale * (torch.from_numpy(np.array(high)) @ torch.from_numpy(np.array(low)))
        np.copyto(view, dense.numpy())
    return merged


def _check_base(info: CheckpointInfo, base: Path) -> None:
    """Raises SettingsError unless it is what the run's adapters stand on."""
    if not base.exists():
        raise SettingsError(f"--base {base} is not there; give the model folder that the run began from")
    if not base.is_dir():
        wanted, found = info.meta.run.get("base_digest"), list_pieces(base).digest.hex()
    else:
        parent = info.meta.lineage.get("parent")
        if parent is None:
            raise SettingsError(f"--base {base}: the run began from no checkpoint; give the host's model.base")
        wanted, found = parent["digest"], weights_digest(base)
    if found != wanted:
        raise SettingsError(f"--base {base} has digest {found[:16]}, the run's base {str(wanted)[:16]}; give that one")
