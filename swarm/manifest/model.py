"""A manifest's [model] as the core's ModelSettings: config, and layers cut into stages.

`swarm.model` is imported only when called: it knows the families, and brings in transformers.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.core.errors import SettingsError
from swarm.core.pipeline.partition import even_layers
from swarm.core.plan import StageSize
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.manifest.tables import ModelTable

if TYPE_CHECKING:
    from swarm.model.families import ModelShape


def model_settings(
    table: ModelTable, adapters: AdapterSettings, *, vocab_size: int, sequence_length: int, seed: int
) -> ModelSettings:
    """The model a manifest describes, its paths absolute; `seed`: of what is drawn in it. Raises SettingsError for one
    that cannot be trained."""
    from swarm.model.families import canonical_config_json

    field, config = _config(table, vocab_size)
    try:
        config_json = canonical_config_json(config)
        shape = _checked_shape(config_json)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{field}: {error}") from error
    settings = ModelSettings(
        config_json=config_json,
        stage_layers=_cut(table, shape.num_layers, _head_cost(config_json)),
        compute_dtype=table.compute_dtype,
        recompute=table.recompute,
        adapters=adapters,
        subspace=table.subspace,
        subspace_seed=seed if table.subspace > 1 else 0,
    )
    check_model(settings, vocab_size=vocab_size, sequence_length=sequence_length)
    return settings


def check_model(model: ModelSettings, *, vocab_size: int, sequence_length: int) -> None:
    """Raises SettingsError unless the config is a tested model in canonical JSON, cut whole, that fits the data."""
    from swarm.model.adapters.base import check_adapters
    from swarm.model.families import validate_stage_layers
    from swarm.model.subspace import check_subspace

    try:
        shape = _checked_shape(model.config_json)
    except SettingsError as error:
        raise SettingsError(f"model.config: {error}") from error
    validate_stage_layers(model)
    check_adapters(model)
    check_subspace(model)
    if shape.vocab_size < vocab_size:
        raise SettingsError(
            f"model vocab_size = {shape.vocab_size} is less than the {vocab_size} ids of data.tokenizer; "
            "take the model's own tokenizer, or a model with more"
        )
    if shape.max_positions < sequence_length:
        raise SettingsError(
            f"data.sequence_length = {sequence_length} is more than the model's "
            f"max_position_embeddings = {shape.max_positions}; shorten it"
        )


def recut(model: ModelSettings, table: ModelTable) -> ModelSettings:
    """The same model, cut as the table says. Raises SettingsError."""
    from swarm.model.families import is_tied

    made = replace(model, stage_layers=_cut(table, model.stage_layers[-1][1], _head_cost(model.config_json)))
    if is_tied(made, 0) != is_tied(model, 0):
        raise SettingsError(
            f"model.stages = {made.num_stages}: the run's embeddings are tied at one stage and not at more, and "
            f"{model.num_stages} were the run's; begin a new run from its export"
        )
    return made


def cuts(model: ModelSettings) -> list[ModelSettings]:
    """The same model whole, and cut evenly into two stages, three, and so on."""
    num_layers, head_cost = model.stage_layers[-1][1], _head_cost(model.config_json)
    return [
        replace(model, stage_layers=even_layers(num_layers, num_stages, last_cost=head_cost))
        for num_stages in range(1, num_layers + 1)
    ]


def stage_num_parameters(model: ModelSettings) -> list[StageSize]:
    """Of each stage; nothing is allocated. Raises SettingsError for a model that cannot be cut."""
    return [stage_size(model, stage) for stage in range(model.num_stages)]


def num_frozen(model: ModelSettings) -> int:
    """Values of the frozen base, those that two stages share once; 0 where the whole model is trained."""
    from swarm.model.adapters.base import base_layout

    return sum(tensor.num_values for tensor in base_layout(model).tensors) if model.has_base else 0


def stage_size(model: ModelSettings, stage: int) -> StageSize:
    """What is trained of it, and what is frozen."""
    from swarm.model.adapters.base import base_tensors
    from swarm.model.stack import stage_layout
    from swarm.optim.matrices import turned_of

    layout = stage_layout(model, stage)
    trained, turned = layout.num_values, turned_of(layout)
    if not model.has_base:
        return StageSize(trained, turned=turned)
    tensors = base_tensors(model, stage)
    return StageSize(
        trained,
        frozen=sum(tensor.num_values for tensor in tensors),
        frozen_bytes=sum(tensor.size_bytes for tensor in tensors),
        largest_frozen=max(tensor.num_values for tensor in tensors),
        turned=turned,
    )


def hidden_size(model: ModelSettings) -> int:
    """Values of one token within a stage."""
    from swarm.model.families import validate_config

    return validate_config(model.config_json).hidden_size


def _checked_shape(config_json: str) -> "ModelShape":
    """Shape of a config that may come from a stranger. Raises SettingsError."""
    from swarm.model.families import canonical_config_json, validate_config

    try:
        config = json.loads(config_json)
        is_canonical = isinstance(config, dict) and canonical_config_json(config) == config_json
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the config is not JSON: {error}") from error
    if not is_canonical:
        raise SettingsError("the config is no canonical JSON object; write it with sorted keys and no spaces")
    try:
        return validate_config(config_json)
    except SettingsError:
        raise
    except Exception as error:  # transformers was not written for strangers: it trips over anything
        raise SettingsError(f"transformers cannot read it ({error!r}); mend the config") from error


def _config(table: ModelTable, vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The field that names the config, as an error shows it, and the config."""
    from swarm.model.presets import PRESETS, preset_config

    if table.checkpoint is not None:
        folder = Path(table.checkpoint)
        return f'model.checkpoint = "{folder}"', checkpoint_config(folder)
    if isinstance(table.config, str):
        return f'model.config = "{table.config}"', _read_config("model.config", Path(table.config))
    if table.config is not None:
        return "model.config", {"vocab_size": vocab_size, **table.config}
    if table.preset not in PRESETS:
        raise SettingsError(f'model.preset = "{table.preset}" is unknown; choose one of {", ".join(PRESETS)}')
    return f'model.preset = "{table.preset}"', preset_config(table.preset, vocab_size)


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """The config of a Hugging Face folder with weights, their type in it. Raises SettingsError."""
    from swarm.model.stored import stored_dtype

    if not list(folder.glob("*.safetensors")):
        raise SettingsError(
            f'model.checkpoint = "{folder}" holds no safetensors; give a local folder written by save_pretrained()'
        )
    config = _read_config("model.checkpoint", folder / "config.json")
    if config.get("dtype") is None:
        config["dtype"] = stored_dtype(folder)
    return config


def _read_config(field: str, path: Path) -> dict[str, Any]:
    from swarm.model.families import whole_fields

    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f'{field} = "{path}" cannot be read ({error.strerror}); correct the path') from error
    except ValueError as error:
        raise SettingsError(f'{field} = "{path}" is not JSON ({error}); give a Hugging Face config.json') from error
    if not isinstance(config, dict):
        raise SettingsError(f'{field} = "{path}" is no JSON object; give a Hugging Face config.json')
    return whole_fields(config)


def _cut(table: ModelTable, num_layers: int, head_cost: float) -> tuple[tuple[int, int], ...]:
    if not table.stage_layers:
        if table.stages > num_layers:
            raise SettingsError(
                f"model.stages = {table.stages} is more than the model's {num_layers} layers; "
                f"set it to {num_layers} or fewer"
            )
        return even_layers(num_layers, table.stages, last_cost=head_cost)
    if sum(table.stage_layers) != num_layers:
        raise SettingsError(
            f"model.stage_layers = {list(table.stage_layers)} adds up to {sum(table.stage_layers)} layers, the model "
            f"has {num_layers}; change the counts"
        )
    return _ranges(table.stage_layers)


def _ranges(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return tuple(pairwise(starts))


def _head_cost(config_json: str) -> float:
    """Multiplications of the output head in units of a decoder layer (attention projections and gated MLP)."""
    from swarm.model.families import whole_config

    config = whole_config(config_json)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 2 * head_dim * (heads + getattr(config, "num_key_value_heads", heads))
    mlp_size = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", 1)
    return float(config.vocab_size / (attention + 3 * experts * getattr(config, "moe_intermediate_size", mlp_size)))
