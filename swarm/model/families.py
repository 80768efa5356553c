"""The model families that may be cut into stages, and the check of a run's model.

A family is in the table when its layers, cut anywhere, give the bits of the whole model
(`benchmarks.families.exactness`). Everything a family needs is its row; the rest of the code names none.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: classes by their names in transformers, tensors by their names in a model, settings by their keys."""

    config_class: str
    decoder_class: str
    causal_class: str
    decoder_prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str | None = None
    """The embedding of positions, where they are learned and not rotations."""
    layers: str = "layers"
    norm: str = "norm"
    head_name: str = "lm_head.weight"
    turns_by_kind: bool = False
    """Each kind of layer (`layer_types`) has rotations of its own."""
    embedding_factor: str | None = None
    """What embeddings are multiplied by, once, where the model begins."""
    logits_divisor: str | None = None
    logits_cap: str | None = None
    """Logits are bent to lie within plus and minus this: a setting that may be null."""
    norms_before_products: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """A layer's plain RMSNorms of which products come next."""
    routed: bool = False
    """Layers choose experts for every token."""
    writers: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """A layer's products that are added to the residual stream as they are, or times a number."""
    no_subspace: str | None = None
    """What a layer has that adds to it otherwise."""
    stored: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """How the ends of tensors' names are on disk, where they differ there. Several tensors are one under another;
    {} is the number of an expert."""
    more_keys: tuple[str, ...] = ()
    """Of a config, that transformers reads and does not list."""

    @property
    def embedding_name(self) -> str:
        """Of the tensor, in the whole model."""
        return f"{self.decoder_prefix}{self.embedding}.weight"


def _family(name: str, **row: Any) -> Family:
    """A row with the names that most families' classes have."""
    classes = {"config_class": f"{name}Config", "decoder_class": f"{name}Model", "causal_class": f"{name}ForCausalLM"}
    return Family(**{**classes, **row})


NORMS_AFTER = "norms between its products and the residual stream, which lead out of any subspace"
EXPERTS = "experts, whose products in a subspace are not tested"

FAMILIES: dict[str, Family] = {
    "llama": _family("Llama"),
    "qwen2": _family("Qwen2", more_keys=("head_dim",)),
    "qwen3": _family("Qwen3"),
    "mistral": _family("Mistral"),
    "olmo2": _family("Olmo2", norms_before_products=(), no_subspace=NORMS_AFTER, more_keys=("head_dim",)),
    "granite": _family(
        "Granite", embedding_factor="embedding_multiplier", logits_divisor="logits_scaling", more_keys=("head_dim",)
    ),
    "phi3": _family("Phi3", more_keys=("head_dim",)),
    "smollm3": _family("SmolLM3", more_keys=("head_dim",)),
    "gemma2": _family(
        "Gemma2", logits_cap="final_logit_softcapping", norms_before_products=(), no_subspace=NORMS_AFTER
    ),
    "gemma3_text": _family(
        "Gemma3",
        config_class="Gemma3TextConfig",
        decoder_class="Gemma3TextModel",
        logits_cap="final_logit_softcapping",
        norms_before_products=(),
        no_subspace=NORMS_AFTER,
        turns_by_kind=True,
    ),
    "gpt2": _family(
        "GPT2",
        causal_class="GPT2LMHeadModel",
        decoder_prefix="transformer.",
        embedding="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        norms_before_products=(),
        writers=("attn.c_proj", "mlp.c_proj"),
    ),
    "gpt_neox": _family(
        "GPTNeoX",
        decoder_prefix="gpt_neox.",
        embedding="embed_in",
        norm="final_layer_norm",
        norms_before_products=(),
        writers=("attention.dense", "mlp.dense_4h_to_h"),
        stored=(("lm_head.weight", ("embed_out.weight",)),),
    ),
    "mixtral": _family(
        "Mixtral",
        routed=True,
        no_subspace=EXPERTS,
        stored=(
            (".mlp.gate.weight", (".block_sparse_moe.gate.weight",)),
            (
                ".mlp.experts.gate_up_proj",
                (".block_sparse_moe.experts.{}.w1.weight", ".block_sparse_moe.experts.{}.w3.weight"),
            ),
            (".mlp.experts.down_proj", (".block_sparse_moe.experts.{}.w2.weight",)),
        ),
    ),
    "qwen3_moe": _family(
        "Qwen3Moe",
        routed=True,
        no_subspace=EXPERTS,
        more_keys=("head_dim",),
        stored=(
            (".mlp.experts.gate_up_proj", (".mlp.experts.{}.gate_proj.weight", ".mlp.experts.{}.up_proj.weight")),
            (".mlp.experts.down_proj", (".mlp.experts.{}.down_proj.weight",)),
        ),
    ),
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
    "n_inner": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
}
"""Of what memory grows with: a host's word is bounded before anything is built by it."""
NOT_CAUSAL = ("add_cross_attention", "is_decoder", "reorder_and_upcast_attn", "use_bidirectional_attention")
"""Settings that make of a family's layers what is not tested."""
KINDS = ("full_attention", "sliding_attention")


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
    from swarm.local.transformers_library import transformers

    family = FAMILIES.get(model_type)
    if family is None:
        return frozenset()
    config_class = getattr(transformers, family.config_class)
    listed = frozenset(config_class().to_dict()) | frozenset(config_class.attribute_map) | frozenset(family.more_keys)
    return (listed | LEGACY) - DESCRIPTIVE


def whole_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's `config.json` with every default written out and every old key read, as transformers has it; not
    who wrote it and with what. Dropout is 0 in it, for stages are computed as in evaluation.

    Raises SettingsError as `validate_config`, but for settings that stages could not keep to.
    """
    from swarm.local.transformers_library import transformers

    family = FAMILIES[_checked_type(config)]
    if "quantization_config" in config:
        return config
    with _refusing():
        read = getattr(transformers, family.config_class).from_dict(config).to_dict()
    known = keys_of(str(config["model_type"]))
    return {name: 0.0 if _is_chance(name) and value else value for name, value in read.items() if name in known}


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


def hop_width(model: ModelSettings) -> int:
    """Values of one token between two stages."""
    return validate_config(model.config_json).hidden_size // model.subspace


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


def attention_of(config: Any) -> str:
    """The implementation of attention that stages compute with, and whoever compares a whole model with them must."""
    return "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"


def is_tied(model: ModelSettings, stage: int) -> bool:
    """Whether the stage's head is its embedding: tied embeddings stay so where one stage has both."""
    return model.num_stages == 1 and stage == 0 and validate_config(model.config_json).tied


@lru_cache(maxsize=32)
def _checked_config(config_json: str) -> Any:
    from swarm.local.transformers_library import transformers

    try:
        fields = json.loads(config_json)
    except json.JSONDecodeError as error:
        raise SettingsError(f"model config is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"model config is a JSON {type(fields).__name__}; give an object with model_type")
    model_type = _checked_type(fields)
    _refuse_unknown(fields, model_type)
    with _refusing():
        config = getattr(transformers, FAMILIES[model_type].config_class).from_dict(fields)
    _refuse_inexact(config)
    return config


def _checked_type(fields: dict[str, Any]) -> str:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SettingsError(
            f"model_type {str(model_type)[:40]!r} is not tested for cutting into stages; tested: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return model_type


@contextmanager
def _refusing() -> Iterator[None]:
    """What transformers raises for a config is a SettingsError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise SettingsError(f"model config: transformers refuses it: {error}") from error


def _refuse_unknown(fields: dict[str, Any], model_type: str) -> None:
    """Raises SettingsError for keys that are none of the family's, and for sizes that no model has."""
    from swarm.local.transformers_library import transformers

    family = FAMILIES[model_type]
    if "quantization_config" in fields:
        raise SettingsError("quantization_config: training needs full weights; remove it and give an unquantized model")
    unknown = sorted(str(name)[:40] for name in set(fields) - keys_of(model_type))
    if unknown:
        raise SettingsError(f"model config: {', '.join(unknown[:5])}: no setting of a {model_type}; remove it")
    if family.routed and "num_experts_per_tok" not in fields:
        # By its presence everybody knows that replays are report-only (`ModelSettings.arithmetic`).
        raise SettingsError(f"model config: a {model_type} needs num_experts_per_tok")
    own_name = getattr(transformers, family.config_class).attribute_map
    for general, most in LARGEST.items():
        for name in sorted({general, own_name.get(general, general)}):
            value = fields.get(name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise SettingsError(f"{name} = {str(value)[:40]}: must be a whole number from 1 to {most}")
    for name in ("rope_parameters", "rope_scaling"):
        for rope in _ropes(fields.get(name)):
            share = rope.get("partial_rotary_factor", 1.0)
            if not isinstance(share, int | float) or not 0 < share <= 1:
                raise SettingsError(
                    f"{name}: partial_rotary_factor = {str(share)[:40]}: must be more than 0 and at most 1"
                )


def _ropes(given: Any) -> list[dict[str, Any]]:
    """The settings of a model's rotations: one, or one for each kind of layer."""
    if not isinstance(given, dict):
        return []
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def _is_chance(name: str) -> bool:
    return "dropout" in name or "drop_rate" in name or "pdrop" in name or name in ("layerdrop", "router_jitter_noise")


def _refuse_inexact(config: Any) -> None:
    """Raises SettingsError for what would make a stage random, stateful or different from the whole model."""
    fields = config.to_dict()
    for name, value in sorted(fields.items()):
        if _is_chance(name) and value:
            raise SettingsError(f"{name} = {value}: a stage must be a pure function; set it to 0")
        if name in NOT_CAUSAL and value:
            raise SettingsError(f"{name} = {value}: no such layers are tested; set it to false")
    for rope in _ropes(fields.get("rope_parameters")):
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            raise SettingsError(
                f"rope_type = {rope.get('rope_type')!r} is not tested or depends on earlier sequences; "
                f"use one of {', '.join(ROPE_TYPES)}"
            )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if getattr(config, name, 1) < 1:
            raise SettingsError(f"{name} = {getattr(config, name)}: must be at least 1")
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", heads)
    if heads % key_value_heads:
        raise SettingsError(
            f"num_key_value_heads = {key_value_heads} does not divide num_attention_heads = {heads}; choose a divisor"
        )
    _refuse_uneven(config)


def _refuse_uneven(config: Any) -> None:
    """Raises SettingsError for settings by layer that are not of every layer, or of none that is tested."""
    for name in ("layer_types", "no_rope_layers"):
        by_layer = getattr(config, name, None)
        if by_layer is not None and len(by_layer) != config.num_hidden_layers:
            raise SettingsError(f"{name} is of {len(by_layer)} layers, the model has {config.num_hidden_layers}")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS))
    if unknown:
        raise SettingsError(f"layer_types: {', '.join(unknown[:3])} is not tested; use {', '.join(KINDS)}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and not config.sliding_window:
        raise SettingsError("layer_types has sliding_attention, but sliding_window is not set; give its length")
