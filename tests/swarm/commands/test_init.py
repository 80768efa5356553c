"""`swarm init`: the manifest it writes is read as it was asked for."""

import json
from pathlib import Path

from click.testing import CliRunner

from swarm.commands.init import command
from swarm.manifest.file import read_manifest
from swarm.model.presets import preset_config


def test_a_manifest_of_one_stage(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    found = CliRunner().invoke(command, ["--stages", "1", str(path)])
    assert found.exit_code == 0, found.output
    assert read_manifest(path).model.num_stages == 1


def test_a_manifest_of_ones_own_model_and_its_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(preset_config("tiny", 256)))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text("{}")
    path = tmp_path / "run.toml"
    found = CliRunner().invoke(command, ["--stages", "1", "--checkpoint", str(model), str(path)])
    assert found.exit_code == 0, found.output
    assert f'tokenizer = "{model}"' in path.read_text()
    (model / "tokenizer.json").unlink()
    path.unlink()
    CliRunner().invoke(command, ["--stages", "1", "--checkpoint", str(model), str(path)])
    read = read_manifest(path)
    assert (read.model.num_stages, read.initial_checkpoint) == (1, model)
