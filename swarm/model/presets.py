"""Models to begin with: sizes that cut into even stages."""

from typing import Any

from swarm.core.errors import SettingsError

_DIMENSIONS = {
    # name: hidden size, layers, heads, key-value heads, MLP size
    "tiny": (128, 4, 4, 4, 320),
    "small": (512, 8, 8, 8, 1152),
    "medium": (1024, 16, 16, 8, 3072),
}

PRESETS = tuple(_DIMENSIONS)
"""tiny 0.8 M parameters, small 23 M, medium 202 M (each plus embedding and head)."""


def preset_config(name: str, vocab_size: int) -> dict[str, Any]:
    """Hugging Face config of a Llama. Raises SettingsError for an unknown name."""
    if name not in _DIMENSIONS:
        raise SettingsError(f"model preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    hidden_size, num_layers, heads, key_value_heads, mlp_size = _DIMENSIONS[name]
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": mlp_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        # A token is whatever the run's tokenizer says: none of them is special to the model.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
