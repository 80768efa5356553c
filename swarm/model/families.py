"""The model families that may be cut into stages, and the check of a run's model.

A family is in the table when its layers, cut anywhere, give the bits of the whole model
(`tests.swarm.model.exactness`). Everything a family needs is its row; the rest of the code names none.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model.layout import ParameterLayout

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: classes by their names in transformers, tensors by their names in a checkpoint."""

    config_class: str
    decoder_class: str
    """The stack of layers: has `embed_tokens`, `layers`, `norm`, `rotary_emb`; takes `inputs_embeds`."""
    causal_class: str
    decoder_prefix: str = "model."
    embedding_name: str = "model.embed_tokens.weight"
    head_name: str = "lm_head.weight"


FAMILIES: dict[str, Family] = {
    "llama": Family(config_class="LlamaConfig", decoder_class="LlamaModel", causal_class="LlamaForCausalLM"),
    "qwen3": Family(config_class="Qwen3Config", decoder_class="Qwen3Model", causal_class="Qwen3ForCausalLM"),
}
"""Tested families by `model_type`."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The others change their frequencies with the sequences they have seen, so a stage would not be a pure function."""

DESCRIPTIVE = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version"),
        *("id2label", "label2id", "problem_type", "return_dict", "is_encoder_decoder"),
        *("chunk_size_feed_forward", "output_attentions", "output_hidden_states"),
    }
)
"""Keys of a config that say nothing of a layer's numbers; some would have a reader of the export run code."""
LEGACY = frozenset({"rope_theta", "rope_scaling", "torch_dtype"})
"""Keys that transformers still reads and writes otherwise."""
LARGEST = {
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
}
"""Of what memory grows with: a host's word is bounded before anything is built by it."""


@dataclass(frozen=True)
class ModelShape:
    """What a manifest needs to know of a model before anything is built."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    """Longest sequence the positions were made for."""
    tied: bool
    """The config asks for tied embeddings: the head starts as a copy of the embedding, and trains on its own."""


def canonical_config_json(config: dict[str, Any]) -> str:
    """A config as `ModelSettings.config_json` wants it: sorted keys, no spaces."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)


def keys_of(model_type: str) -> frozenset[str]:
    """The keys that a config of the family may have, but for `DESCRIPTIVE` ones. Empty for an unknown family."""
    import transformers

    family = FAMILIES.get(model_type)
    if family is None:
        return frozenset()
    return (frozenset(getattr(transformers, family.config_class)().to_dict()) | LEGACY) - DESCRIPTIVE


def without_description(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` without what says nothing of the model: who wrote it, and with what."""
    known = keys_of(str(config.get("model_type"))) | {"quantization_config"}
    return {name: value for name, value in config.items() if name in known} if len(known) > 1 else config


def validate_config(config_json: str) -> ModelShape:
    """Shape of the model a config describes.

    Raises SettingsError for a family that is not in the table, for what transformers itself refuses, and for
    settings under which stages would not give the whole model's numbers.
    """
    config = whole_config(config_json)
    return ModelShape(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
    )


def validate_stage_layers(model: ModelSettings) -> None:
    """Raises SettingsError unless the stages hold all layers, in order, at least one each."""
    num_layers = validate_config(model.config_json).num_layers
    expected_start = 0
    for stage, (start, stop) in enumerate(model.stage_layers):
        if start != expected_start or stop <= start:
            raise SettingsError(
                f"model.stage_layers: stage {stage} has layers [{start}, {stop}) where [{expected_start}, ...) is next"
                "; give each stage at least one layer, in order, without gaps"
            )
        expected_start = stop
    if expected_start != num_layers:
        raise SettingsError(f"model.stage_layers: the stages hold {expected_start} layers, the model has {num_layers}")


def family_of(config_json: str) -> Family:
    """The row of a config's family. Raises SettingsError as `validate_config`."""
    return FAMILIES[whole_config(config_json).model_type]


def whole_config(config_json: str) -> Any:
    """The checked transformers config of the whole model; do not change it, it is shared."""
    return _checked_config(config_json)


def stage_config(model: ModelSettings, stage: int) -> Any:
    """Config of a decoder stack that holds only the stage's layers.

    Layers count from 0 in it, so settings listed by layer (`layer_types`) are cut along.
    """
    whole = whole_config(model.config_json)
    start, stop = model.stage_layers[stage]
    fields = whole.to_dict()
    if fields.get("layer_types") is not None:
        fields["layer_types"] = fields["layer_types"][start:stop]
    fields.update(num_hidden_layers=stop - start, use_cache=False, tie_word_embeddings=False)
    config = type(whole).from_dict(fields)
    config._attn_implementation = "sdpa"
    return config


def build_stack(model: ModelSettings, stage: int, *, device: "torch.device") -> "nn.Module":
    """The stage's decoder stack: parameters on the meta device take no memory, rotary tables are real on `device`.

    Stages but the first have no embedding, stages but the last no final norm.
    """
    import torch
    import transformers
    from torch import nn

    config = stage_config(model, stage)
    with torch.device("meta"):
        stack: Any = getattr(transformers, family_of(model.config_json).decoder_class)(config)
    # Buffers that no checkpoint holds would stay on the meta device: make them again.
    stack.rotary_emb = type(stack.rotary_emb)(config).to(device)
    if stage > 0:
        stack.embed_tokens = None
    if stage < model.num_stages - 1:
        stack.norm = nn.Identity()
    built: nn.Module = stack.eval()
    return built


def run_stack(stack: Any, x: "torch.Tensor") -> "torch.Tensor":
    """What `stack(x)` gives for token ids or hidden values without a cache, layer by layer.

    transformers' own forward looks at the positions for packed sequences, which makes the host wait for a GPU.
    """
    import torch
    from transformers import masking_utils

    config, hidden_BLD = stack.config, stack.embed_tokens(x) if stack.embed_tokens is not None else x
    positions_1L = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    masks = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    given: dict[str, Any] = {"attention_mask": None, "past_key_values": None, "position_ids": None}
    made: dict[str, Any] = {
        kind: masks[kind](config=config, inputs_embeds=hidden_BLD, **given) for kind in sorted(set(kinds))
    }
    rotations = stack.rotary_emb(hidden_BLD, positions_1L)
    for layer, kind in zip(stack.layers, kinds, strict=True):
        hidden_BLD = layer(
            hidden_BLD, attention_mask=made[kind], position_embeddings=rotations, position_ids=positions_1L
        )
    normed: torch.Tensor = stack.norm(hidden_BLD)
    return normed


def global_name(model: ModelSettings, stage: int, name: str) -> str:
    """Name in the whole model of the stage's stack parameter `name`: its layers count from the stage's first."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + model.stage_layers[stage][0])
    return family_of(model.config_json).decoder_prefix + ".".join(parts)


def stage_layout(model: ModelSettings, stage: int) -> ParameterLayout:
    """Layout of a stage without building it in memory. Raises SettingsError as `validate_stage_layers`."""
    import torch

    validate_stage_layers(model)
    return layout_of_stack(model, stage, build_stack(model, stage, device=torch.device("cpu")))


def layout_of_stack(model: ModelSettings, stage: int, stack: "nn.Module") -> ParameterLayout:
    """Layout of the stack's parameters, and the head's at the last stage, under their names in the whole model."""
    shapes = {global_name(model, stage, name): tuple(value.shape) for name, value in stack.named_parameters()}
    if stage == model.num_stages - 1:
        shape = validate_config(model.config_json)
        shapes[family_of(model.config_json).head_name] = (shape.vocab_size, shape.hidden_size)
    return ParameterLayout.of(shapes)


@lru_cache(maxsize=32)
def _checked_config(config_json: str) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        fields = json.loads(config_json)
    except json.JSONDecodeError as error:
        raise SettingsError(f"model config is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"model config is a JSON {type(fields).__name__}; give an object with model_type")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SettingsError(
            f"model_type {model_type!r} is not tested for cutting into stages; tested: {', '.join(sorted(FAMILIES))}"
        )
    _refuse_unknown(fields, model_type)
    try:
        config = getattr(transformers, FAMILIES[model_type].config_class).from_dict(fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"model config: transformers refuses it: {error}") from error
    _refuse_inexact(config.to_dict())
    return config


def _refuse_unknown(fields: dict[str, Any], model_type: str) -> None:
    """Raises SettingsError for keys that are none of the family's, and for sizes that no model has."""
    if "quantization_config" in fields:
        raise SettingsError("quantization_config: training needs full weights; remove it and give an unquantized model")
    unknown = sorted(str(name)[:40] for name in set(fields) - keys_of(model_type))
    if unknown:
        raise SettingsError(f"model config: {', '.join(unknown[:5])}: no setting of a {model_type}; remove it")
    for name, most in LARGEST.items():
        value = fields.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise SettingsError(f"{name} = {str(value)[:40]}: must be a whole number from 1 to {most}")
    for name in ("rope_parameters", "rope_scaling"):
        share = (fields.get(name) or {}).get("partial_rotary_factor", 1.0) if isinstance(fields.get(name), dict) else 1
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError(f"{name}: partial_rotary_factor = {str(share)[:40]}: must be more than 0 and at most 1")


def _refuse_inexact(fields: dict[str, Any]) -> None:
    """Raises SettingsError for what would make a stage random, stateful or different from the whole model."""
    for name, value in sorted(fields.items()):
        random = "dropout" in name or "drop_rate" in name or name in ("layerdrop", "router_jitter_noise")
        if random and value:
            raise SettingsError(f"{name} = {value}: a stage must be a pure function; set it to 0")
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise SettingsError(
            f"rope_type = {rope.get('rope_type')!r} is not tested or depends on earlier sequences; "
            f"use one of {', '.join(ROPE_TYPES)}"
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if fields[name] < 1:
            raise SettingsError(f"{name} = {fields[name]}: must be at least 1")
    heads, key_value_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if heads % key_value_heads:
        raise SettingsError(
            f"num_key_value_heads = {key_value_heads} does not divide num_attention_heads = {heads}; choose a divisor"
        )
