"""Models that cannot be cut are refused, and those that can are tried."""

import json
from typing import Any

import pytest

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model import families
from swarm.model.families import FAMILIES, canonical_config_json, stage_layout, validate_config
from swarm.model.presets import PRESETS, preset_config
from tests.swarm.model.exactness import check_family_is_exact
from tests.swarm.model.tiny_models import CONFIGS, tiny_model


@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_every_family_is_exact(config: str, compute_dtype: str) -> None:
    check_family_is_exact(tiny_model(config, 2, compute_dtype=compute_dtype))


def test_every_row_has_a_test_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def test_family_is_refused_when_a_stage_takes_the_wrong_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_rightly = families.stage_config

    def cut_wrongly(model: ModelSettings, stage: int) -> Any:
        config = cut_rightly(model, stage)
        config.layer_types = families.whole_config(model.config_json).layer_types[: config.num_hidden_layers]
        return config

    monkeypatch.setattr(families, "stage_config", cut_wrongly)
    with pytest.raises(AssertionError, match="cut into 3 stages: logits differ"):
        check_family_is_exact(tiny_model("qwen3-window", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*llama, qwen3"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0, "head_dim": 16}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"auto_map": {"AutoConfig": "evil.py"}}, "auto_map: no setting of a llama"),
        ({"hiden_size": 64}, "hiden_size: no setting"),
        ({"head_dim": 1 << 34}, "head_dim = 17179869184: must be a whole number from 1 to 16384"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"intermediate_size": True}, "intermediate_size = True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1e9}}, "partial_rotary"),
    ],
)
def test_config_is_refused_when_stages_would_not_be_the_model(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        validate_config(canonical_config_json(CONFIGS["llama"] | change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"model_type": null}'])
def test_config_is_refused_when_it_is_no_model(text: str) -> None:
    with pytest.raises(SettingsError):
        validate_config(text)


def test_shape_is_read_from_the_config() -> None:
    shape = validate_config(canonical_config_json(CONFIGS["qwen3-tied"]))
    assert (shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size) == ("qwen3", 4, 64, 97)
    assert shape.tied
    assert shape.max_positions == 512


@pytest.mark.parametrize("name", PRESETS)
def test_presets_cut_into_even_stages(name: str) -> None:
    config = preset_config(name, 256)
    num_layers = validate_config(canonical_config_json(config)).num_layers
    half = num_layers // 2
    model = ModelSettings(config_json=canonical_config_json(config), stage_layers=((0, half), (half, num_layers)))
    sizes = [stage_layout(model, stage).num_values for stage in range(2)]
    assert max(sizes) / min(sizes) < 1.01
    expected = {"tiny": 0.8e6, "small": 22.8e6, "medium": 202e6}[name]
    assert sum(sizes) == pytest.approx(expected, rel=0.05)


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(SettingsError, match="choose one of tiny"):
        preset_config("huge", 256)


def test_config_text_is_canonical() -> None:
    text = canonical_config_json(CONFIGS["llama"])
    assert json.loads(text) == CONFIGS["llama"]
    assert text == canonical_config_json(dict(reversed(CONFIGS["llama"].items())))
    assert " " not in text
