"""Models that cannot be cut are refused, and those that can are tried."""

import json
from typing import Any

import pytest
import torch
from transformers.utils.import_utils import is_kernels_available

from benchmarks.families.exactness import check_family_is_exact
from swarm.core.errors import SettingsError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.settings import ModelSettings
from swarm.model import stack
from swarm.model.families import FAMILIES, canonical_config_json, validate_config, whole_fields
from swarm.model.presets import PRESETS, preset_config
from swarm.model.stack import stage_layout
from tests.swarm.model.tiny_models import CONFIGS, CUTS, stages_of, tiny_model, token_batch, whole_model

_SIZES_OF_GEMMA = {name: value for name, value in CONFIGS["gemma3"].items() if "_" not in name} | {
    "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "sliding_window": 8, "vocab_size": 97,
}  # fmt: skip


@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("compute_dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_every_family_is_exact(config: str, compute_dtype: str) -> None:
    check_family_is_exact(tiny_model(config, 2, compute_dtype=compute_dtype))


def test_every_row_has_a_test_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("config", ["qwen3-window", "smollm3", "gemma3"])
def test_family_is_refused_when_a_stage_takes_the_wrong_kind_of_layer(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = stack.Stack

    class FromNought(right):  # type: ignore[misc, valid-type]
        """Counts its layers from 0, as a decoder of fewer layers would."""

        def __init__(self, family: Any, config: Any, decoder: Any, layers: range, **given: Any) -> None:
            super().__init__(family, config, decoder, layers, **given)
            other = right(family, config, decoder, range(len(layers)), **given)
            self.layers, self.kinds = other.layers, other.kinds

    monkeypatch.setattr(stack, "Stack", FromNought)
    with pytest.raises(AssertionError, match="logits differ"):
        check_family_is_exact(tiny_model(config, 1))


@pytest.mark.parametrize("config", ["mixtral", "qwen3_moe"])
def test_balance_is_transformers_of_each_layer_and_sequence(config: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    coefficient, (x_BL, targets_BL) = 0.5, token_batch(3, 20)
    fields = CONFIGS[config] | {"router_aux_loss_coef": coefficient}
    plain, balanced = (
        ModelSettings(config_json=canonical_config_json(fields | {"router_aux_loss_coef": each}), stage_layers=CUTS[1])
        for each in (0.0, coefficient)
    )
    whole = whole_model(plain)
    routers: list[torch.Tensor] = []
    for module in whole.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, given, found: routers.append(found[0]))
    whole(input_ids=x_BL, use_cache=False)
    of_sequences = [logits.view(3, 20, -1)[at] for logits in routers for at in range(3)]
    imbalances = [load_balancing_loss_func((logits,), 5, 2) for logits in of_sequences]
    loss = coefficient * 20 / 4 * torch.stack(imbalances).sum()
    expected = dict(zip(dict(whole.named_parameters()), torch.autograd.grad(loss, list(whole.parameters()),
        allow_unused=True), strict=True))  # fmt: skip

    def gradients(model: ModelSettings, mode: ComputeMode | None) -> dict[str, torch.Tensor]:
        ((stage, flat),) = stages_of(model, whole)
        sums = torch.zeros(stage.layout.num_values)
        stage = stage.computing(mode)
        _, _, saved = stage.loss(stage.weights(flat), x_BL, targets_BL, keep=True)
        assert saved is not None
        stage.loss_backward(saved, sums)
        return stage.layout.views(sums)

    without, at_once = gradients(plain, None), gradients(balanced, None)
    in_pieces = gradients(balanced, ComputeMode(samples_at_once=1, recompute=True))
    for name, value in expected.items():
        scale = float(at_once[name].norm()) + 1e-6
        added = at_once[name] - without[name]
        assert float((added - (0 if value is None else value)).norm()) <= 1e-5 * scale, name
        assert float((at_once[name] - in_pieces[name]).norm()) <= 1e-5 * scale, name
    gate = "model.layers.0.mlp.gate.weight"
    assert float((at_once[gate] - without[gate]).norm()) > 0.1 * float(at_once[gate].norm())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom'.*gemma2.*llama.*qwen3_moe"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mixtral"}, "needs num_experts_per_tok"),
        ({"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 1 << 20}, "num_local_experts"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "transformers refuses"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
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


def test_checkpoints_config_is_read_with_its_old_keys() -> None:
    """As gemma-3's and GPT-2's own have them."""
    gemma = whole_fields(
        _SIZES_OF_GEMMA | {"sliding_window_pattern": 2, "rope_local_base_freq": 5000.0, "rope_theta": 2e6}
    )
    assert gemma["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert gemma["rope_parameters"]["sliding_attention"]["rope_theta"] == 5000.0
    assert gemma["rope_parameters"]["full_attention"]["rope_theta"] == 2e6
    validate_config(canonical_config_json(gemma))
    gpt2 = whole_fields({"model_type": "gpt2", "n_layer": 2, "n_ctx": 1024, "architectures": ["GPT2LMHeadModel"]})
    assert (gpt2["embd_pdrop"], gpt2["attn_pdrop"], gpt2["n_layer"]) == (0.0, 0.0, 2)
    shape = validate_config(canonical_config_json(gpt2))
    assert (shape.num_layers, shape.hidden_size, shape.max_positions, shape.tied) == (2, 768, 1024, True)


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


def test_transformers_does_not_take_our_kernels_for_hugging_faces() -> None:
    """It goes by the version of whatever distribution has a package of this name: homeswarm 0.18.2 would do."""
    assert not is_kernels_available()
