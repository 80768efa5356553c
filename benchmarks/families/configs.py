"""A small config of every family, with the settings that a stage could get wrong."""

from typing import Any

VOCAB_SIZE = 97

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


def _without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


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
    "qwen2": _SIZES
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "mistral": _SIZES | {"model_type": "mistral", "head_dim": 32, "sliding_window": 8},
    "olmo2": _SIZES | {"model_type": "olmo2"},
    "granite": _SIZES
    | {
        "model_type": "granite",
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
    },
    "phi3": _SIZES
    | {
        "model_type": "phi3",
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "smollm3": _SIZES | {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    "gemma2": _SIZES
    | {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
    "gemma3": _SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": None,
        "initializer_range": 0.1,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "gpt_neox": _without(_SIZES, "num_key_value_heads")
    | {
        "model_type": "gpt_neox",
        "classifier_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "gpt_neox-serial": _without(_SIZES, "num_key_value_heads")
    | {"model_type": "gpt_neox", "classifier_dropout": 0.0, "use_parallel_residual": False, "attention_bias": False},
    "mixtral": _SIZES
    | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    # A layer that is not routed, named by its place in the whole model.
    "qwen3_moe": _SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [2],
        "norm_topk_prob": True,
    },
}
