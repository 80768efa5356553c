"""A run's first weights: from a seed or from a checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model.families import canonical_config_json, whole_fields
from swarm.model.initial import initial_weights, stage_weights
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel
from tests.swarm.model.tiny_models import CUTS, tiny_model, token_batch, whole_model


def tensors_of(model: ModelSettings, seed: int, source: Path | None = None) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for stage, flat in enumerate(initial_weights(model, seed, source)):
        tensors |= stage_layout(model, stage).views(flat)
    return tensors


@pytest.mark.parametrize("config", ["llama", "llama-tied", "qwen3"])
def test_drawn_weights_do_not_depend_on_the_cut(config: str) -> None:
    one, three = (tensors_of(tiny_model(config, stages), seed=5) for stages in (1, 3))
    assert set(three) - set(one) == ({"lm_head.weight"} if config == "llama-tied" else set())
    assert all(one[name].tobytes() == three[name].tobytes() for name in one)
    other = tensors_of(tiny_model(config, 1), seed=6)
    embedding = "model.embed_tokens.weight"
    assert one[embedding].tobytes() != other[embedding].tobytes()


@pytest.mark.parametrize("config", ["llama-tied", "gemma2", "gpt2", "gpt_neox", "mixtral"])
def test_drawn_weights_follow_the_familys_rules(config: str) -> None:
    drawn = tensors_of(tiny_model(config, 2), seed=5)
    whole = whole_model(tiny_model(config, 2)).state_dict()
    for name, tensor in drawn.items():
        expected = whole[name]
        if expected.ndim == 1:
            assert torch.equal(torch.from_numpy(tensor), expected), name
        else:
            assert tensor.std() == pytest.approx(float(expected.std()), rel=0.1), name
            assert abs(tensor.mean()) < 0.01
    matrices = [tensor.tobytes() for name, tensor in drawn.items() if tensor.ndim > 1]
    tied = json.loads(tiny_model(config, 2).config_json).get("tie_word_embeddings", False)
    assert len(set(matrices)) == len(matrices) - tied  # a tied head is a copy of the embedding


def test_drawing_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    tensors_of(tiny_model("llama", 2), seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_tied_head_starts_as_a_copy() -> None:
    drawn = tensors_of(tiny_model("qwen3-tied", 2), seed=5)
    assert drawn["lm_head.weight"].tobytes() == drawn["model.embed_tokens.weight"].tobytes()


@pytest.mark.parametrize("config", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_checkpoint_is_read_and_gives_transformers_loss(config: str, max_shard_size: str, tmp_path: Path) -> None:
    whole = whole_model(tiny_model(config, 2))
    whole.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "60KB")
    config_json = canonical_config_json(whole_fields(json.loads((tmp_path / "config.json").read_text())))
    model = ModelSettings(config_json=config_json, stage_layers=CUTS[2])
    first, last = StageModel(model, 0), StageModel(model, 1)
    first_flat, last_flat = initial_weights(model, 0, tmp_path)
    x_BL, targets_BL = token_batch(2, 40)
    y_BLD, _ = first.forward(first.weights(first_flat), x_BL, keep=False)
    loss_sum, num_tokens, _ = last.loss(last.weights(last_flat), y_BLD, targets_BL, keep=False)
    logits = whole(input_ids=x_BL, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction="mean")
    assert loss_sum / num_tokens == pytest.approx(float(expected.detach()), rel=1e-6)


def test_half_precision_checkpoint_is_widened_exactly(tmp_path: Path) -> None:
    whole = whole_model(tiny_model("llama", 2)).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    read = tensors_of(tiny_model("llama", 2), 0, tmp_path)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(torch.from_numpy(read[name]), tensor.float()), name


def test_checkpoint_is_refused_with_file_and_tensor_when_it_does_not_fit(tmp_path: Path) -> None:
    whole_model(tiny_model("llama", 2)).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"has no tensor model\.layers\.0\.self_attn\.\w_norm"):
        tensors_of(tiny_model("qwen3", 2), 0, tmp_path)
    config = json.loads(tiny_model("llama", 2).config_json)
    wider = ModelSettings(config_json=canonical_config_json(config | {"vocab_size": 98}), stage_layers=CUTS[2])
    with pytest.raises(
        SettingsError, match=r"model\.safetensors: tensor model\.embed_tokens\.weight has shape \(97, 64\)"
    ):
        tensors_of(wider, 0, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(SettingsError, match=r"model\.safetensors cannot be read"):
        tensors_of(tiny_model("llama", 2), 0, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="convert the checkpoint"):
        tensors_of(tiny_model("llama", 2), 0, tmp_path)


def test_index_is_refused_when_it_leads_elsewhere_or_a_shard_is_missing(tmp_path: Path) -> None:
    names = [name for stage in range(2) for name in stage_layout(tiny_model("llama", 2), stage).names]
    for file in ("../secret.safetensors", "gone.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        with pytest.raises(SettingsError, match=r"lacks .*\.safetensors"):
            tensors_of(tiny_model("llama", 2), 0, tmp_path)


@pytest.mark.parametrize("config", ["gpt2", "gpt_neox", "mixtral", "qwen3_moe"])
def test_checkpoint_is_read_under_its_own_names(config: str, tmp_path: Path) -> None:
    whole = whole_model(tiny_model(config, 2))
    whole.save_pretrained(tmp_path)
    read = tensors_of(tiny_model(config, 2), 0, tmp_path)
    for name, tensor in read.items():
        assert torch.equal(torch.from_numpy(tensor), whole.state_dict()[name]), name


def test_stage_is_read_where_the_other_stages_files_are_missing(tmp_path: Path) -> None:
    model = tiny_model("llama", 3)
    whole_model(model).save_pretrained(tmp_path, max_shard_size="60KB")
    expected = list(initial_weights(model, 0, tmp_path))
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for stage in range(3):
        own = {files[name] for name in stage_layout(model, stage).names}
        missing = sorted(set(files.values()) - own)
        assert missing
        for file in missing:
            (tmp_path / file).rename(tmp_path / f"{file}.gone")
        assert stage_weights(model, stage, 0, tmp_path).tobytes() == expected[stage].tobytes()
        for file in missing:
            (tmp_path / f"{file}.gone").rename(tmp_path / file)
