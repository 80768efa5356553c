"""`swarm init`: the manifest it writes is read as it was asked for."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.families.configs import CONFIGS
from benchmarks.families.given import write_given
from swarm.commands.init import command
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


def test_a_folder_that_is_no_model_of_a_known_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    (tmp_path / "model.safetensors").touch()
    found = CliRunner().invoke(command, ["--checkpoint", str(tmp_path), str(tmp_path / "run.toml")])
    assert "'bloom' is not tested" in str(found.exception)
    assert "olmo2" in str(found.exception)
    assert not (tmp_path / "run.toml").exists()
