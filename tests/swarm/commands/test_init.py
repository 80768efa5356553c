"""`swarm init`: the manifest it writes is read as it was asked for."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.families.configs import CONFIGS
from benchmarks.families.given import write_given
from swarm.commands.init import command
from swarm.core.errors import SettingsError
from swarm.manifest.file import read_manifest


def test_a_manifest_of_one_stage(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    found = CliRunner().invoke(command, ["--stages", "1", str(path)])
    assert found.exit_code == 0, found.output
    assert read_manifest(path).model.num_stages == 1


def test_a_manifest_of_ones_own_model_and_its_tokenizer(tmp_path: Path) -> None:
    model, path = tmp_path / "model", tmp_path / "run.toml"
    write_given(model, CONFIGS["gpt2"], dtype="bfloat16")
    found = CliRunner().invoke(command, ["--stages", "1", "--checkpoint", str(model), str(path)])
    assert found.exit_code == 0, found.output
    assert "gpt2: 4 layers of width 64, 320 tokens, up to 512 in a sequence, weights in bfloat16" in found.output
    assert "special tokens: eos 1, pad 2" in found.output
    assert "its embeddings are tied, and stay so" in found.output
    read = read_manifest(path)
    assert (read.model.num_stages, read.initial_checkpoint) == (1, model)
    assert (read.data.tokenizer, read.data.sequence_length) == (str(model), 512)
    path.unlink()
    (model / "tokenizer.json").unlink()
    found = CliRunner().invoke(command, ["--checkpoint", str(model), str(path)])
    assert found.exit_code == 0, found.output
    assert "with 2 stages the head trains on its own" in found.output
    assert "no tokenizer.json" in found.output
    assert (read_manifest(path).model.num_stages, read_manifest(path).data.tokenizer) == (2, "bytes")


def test_a_manifest_of_adapters(tmp_path: Path) -> None:
    model, path = tmp_path / "model", tmp_path / "run.toml"
    write_given(model, CONFIGS["qwen3"])
    found = CliRunner().invoke(command, ["--checkpoint", str(model), "--lora", "4", str(path)])
    assert found.exit_code == 0, found.output
    assert "parameters are frozen; adapters of rank 4 with" in found.output
    assert "next: say there what it is trained on, in data.text" in found.output
    read = read_manifest(path)
    assert (read.model.adapters.rank, read.model.adapters.alpha, read.model.adapters.base) == (4, 8.0, "plain")
    assert (read.tables.optimizer.learning_rate, read.tables.optimizer.weight_decay) == (2e-4, 0.0)
    path.unlink()
    found = CliRunner().invoke(command, ["--checkpoint", str(model), "--lora", "4", "--qlora", str(path)])
    assert "frozen in 4 bits" in found.output
    assert read_manifest(path).model.adapters.base == "nf4"
    assert "give --lora RANK too" in str(CliRunner().invoke(command, ["--qlora", str(path)]).exception)
    path.write_text('[adapters]\nbase = "nf4"\n')
    with pytest.raises(SettingsError, match=r"give adapters\.rank too"):
        read_manifest(path)
    path.write_text('[adapters]\nrank = 4\nmodules = ["q_prj"]\n')
    with pytest.raises(SettingsError, match=r"no linear module q_prj; it has down_proj"):
        read_manifest(path)


def test_a_folder_that_is_no_model_of_a_known_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    (tmp_path / "model.safetensors").touch()
    found = CliRunner().invoke(command, ["--checkpoint", str(tmp_path), str(tmp_path / "run.toml")])
    assert "'bloom' is not tested" in str(found.exception)
    assert "olmo2" in str(found.exception)
    assert not (tmp_path / "run.toml").exists()
