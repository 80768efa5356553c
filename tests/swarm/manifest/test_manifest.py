"""The manifest: what a file says is what a run has, and every mistake is named with its remedy."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm.core.errors import SettingsError
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.settings import ModelSettings
from swarm.data.prepare import prepare_data
from swarm.manifest.default import default_manifest_text
from swarm.manifest.file import MIN_CHUNKS, Manifest, freeze, read_manifest
from swarm.manifest.model import recut
from swarm.manifest.tables import ManifestTables, ModelTable
from swarm.model.families import canonical_config_json
from swarm.model.presets import preset_config


def _read(folder: Path, text: str) -> Manifest:
    path = folder / "run.toml"
    path.write_text(text)
    return read_manifest(path)


def _refusal(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        _read(folder, text)
    return str(caught.value)


def test_default_manifest_reads_as_the_empty_one(tmp_path: Path) -> None:
    assert _read(tmp_path, default_manifest_text()) == _read(tmp_path, "")


def test_default_manifest_shows_every_field_with_its_default() -> None:
    lines = default_manifest_text().splitlines()
    for table in fields(ManifestTables):
        start = lines.index(f"[{table.name}]")
        stop = next((at for at in range(start + 1, len(lines)) if lines[at].startswith("[")), len(lines))
        shown = {line.removeprefix("# ").partition(" = ")[0] for line in lines[start:stop]}
        assert {field.name for field in fields(vars(ManifestTables())[table.name])} <= shown, table.name
        for at in range(start + 1, stop):
            if re.match(r"(# )?[a-z_0-9]+ = ", lines[at]):
                assert lines[at - 1].startswith("# "), f"no sentence above {lines[at]}"


def test_paths_start_at_the_folder_of_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    (folder / "text").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(preset_config("tiny", 256)))
    monkeypatch.chdir(tmp_path)
    manifest = _read(folder, '[data]\ntext = ["text"]\n[model]\nconfig = "config.json"\n')
    assert manifest.data.text == (str(folder / "text"),)
    assert json.loads(manifest.model.config_json).items() >= json.loads(_read(folder, "").model.config_json).items()
    assert manifest.model.stage_layers == _read(folder, "").model.stage_layers


def test_config_can_be_a_table(tmp_path: Path) -> None:
    text = """
    [model]
    stage_layers = [1, 2]
    [model.config]
    model_type = "llama"
    hidden_size = 32
    intermediate_size = 64
    num_hidden_layers = 3
    num_attention_heads = 2
    num_key_value_heads = 1
    max_position_embeddings = 128
    """
    manifest = _read(tmp_path, text)
    assert manifest.model.stage_layers == ((0, 1), (1, 3))
    assert json.loads(manifest.model.config_json)["vocab_size"] == 256


def some_weights(folder: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(1, dtype=torch.bfloat16)}, folder / "model.safetensors")


def test_checkpoint_names_the_model(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text(json.dumps(preset_config("tiny", 300)))
    some_weights(tmp_path / "start")
    manifest = _read(tmp_path, '[model]\ncheckpoint = "start"\nstages = 1')
    assert json.loads(manifest.model.config_json)["dtype"] == "bfloat16"
    assert manifest.initial_checkpoint == tmp_path / "start"
    assert json.loads(manifest.model.config_json)["vocab_size"] == 300
    assert manifest.model.stage_layers == ((0, 4),)


def test_dear_head_leaves_its_stage_fewer_layers(tmp_path: Path) -> None:
    config = preset_config("tiny", 20_000) | {"num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = _read(tmp_path, '[model]\nconfig = "config.json"\nstages = 2').model.stage_layers
    assert layers[0][1] > 20


def test_whole_number_is_taken_where_a_float_is_meant(tmp_path: Path) -> None:
    manifest = _read(tmp_path, "[deadlines]\ncall_s = 5\n[optimizer]\nmax_norm = 2")
    assert type(manifest.tables.deadlines.call_s) is float
    assert manifest.tables.optimizer.max_norm == 2.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "[optimizer]\nlearning_rte = 1.0",
            ["optimizer.learning_rte = 1.0 is unknown", 'did you mean "learning_rate"?'],
        ),
        ("[optimiser]\nname = 'sgd'", ["optimiser", "unknown", 'did you mean "optimizer"?']),
        ("bananas = 3", ["bananas = 3 is unknown", "remove it, or use one of run, model"]),
        (
            "[batch]\nmicrobatch_size = '8'",
            ['batch.microbatch_size = "8" is text', "a whole number", "the default is 8"],
        ),
        ("[batch]\nmicrobatch_size = 8.5", ["batch.microbatch_size = 8.5", "give a whole number"]),
        ("[batch]\nmicrobatch_size = true", ["batch.microbatch_size = true is a truth value", "a whole number"]),
        ("[batch]\nmicrobatch_size = 0", ["batch.microbatch_size = 0", "greater than or equal to 1"]),
        ("batch = 3", ["batch = 3 is an integer; give a table"]),
        (
            "[codecs]\naveraging = 'int3'",
            ['codecs.averaging = "int3" cannot be used; give', "'int2' or 'topk'", 'the default is "int8"'],
        ),
        (
            "[codecs]\naveraging = 'int2'",
            ['codecs.averaging = "int2" is for windows', 'set codecs.averaging = "int4", or averaging.local_steps'],
        ),
        (
            "[codecs]\nactivations = 'topk'",
            ['codecs.activations = "topk" cannot be used; give', "'int4' or 'int4h'", 'the default is "int8"'],
        ),
        ("[model]\nrecompute = 1", ["model.recompute = 1 is an integer", "true or false"]),
        ("[model]\nstages = 5", ["model.stages = 5 is more than the model's 4 layers", "set it to 4"]),
        ("[model]\nstages = 0", ["model.stages = 0", "greater than or equal to 1"]),
        ("[model]\nstage_layers = [1, 1]", ["model.stage_layers = [1, 1] adds up to 2 layers", "has 4"]),
        ("[model]\nstage_layers = [4, 0]", ["model.stage_layers[1] = 0", "greater than or equal to 1"]),
        ("[model]\nstages = 2\nstage_layers = [2, 2]", ["model.stages = 2 and model.stage_layers are both given"]),
        ("[model]\npreset = 'huge'", ['model.preset = "huge" is unknown', "tiny, small, medium"]),
        (
            "[model]\npreset = 'tiny'\nconfig = 'c.json'",
            ['model.config = "c.json" and model.preset are both given; keep one'],
        ),
        (
            "[model]\nconfig = 'c.json'",
            ['model.config = "', 'c.json" cannot be read (No such file', "correct the path"],
        ),
        (
            "[model]\nsubspace = 4\ncheckpoint = 'weights'",
            ["model.subspace = 4 and model.checkpoint are both given", "trained values lie in none; keep one"],
        ),
        ("[model]\nsubspace = 4\n[adapters]\nrank = 8", ["model.subspace = 4", "set adapters.rank = 0"]),
        ("[model]\nsubspace = 5", ["model.subspace = 5", "does not divide hidden_size = 128"]),
        ("[model]\nconfig = 3", ["model.config = 3 is an integer", "give"]),
        ("[model]\ncheckpoint = 'nowhere'", ['model.checkpoint = "', "holds no safetensors", "give a local folder"]),
        (
            "[model.config]\nmodel_type = 'bloom'\nnum_hidden_layers = 2",
            ["model.config", "'bloom' is not tested", "llama"],
        ),
        (
            "[model.config]\nmodel_type = 'llama'\nnum_hidden_layers = 9999999",
            ["num_hidden_layers = 9999999", "from 1 to 1024"],
        ),
        ("[data]\ntext = 'notes.txt'", ['data.text = "notes.txt" is text; give a list']),
        ("[data]\ntext = [3]", ["data.text[0] = 3 is an integer", "give text"]),
        ("[data]\ntokenizer = 'nowhere'", ['data.tokenizer = "', "has no tokenizer.json", 'give "bytes"']),
        (
            "[data]\nsequence_length = 4096",
            ["data.sequence_length = 4096", "max_position_embeddings = 2048", "shorten"],
        ),
        ("[data]\nchunk_tokens = 100", ["data.chunk_tokens = 100 holds no microbatch of 8", "at least 1032"]),
        (
            "[batch]\ntarget_tokens = 100",
            ["batch.target_tokens = 100", "8 x data.sequence_length = 128 = 1024", "raise"],
        ),
        (
            "[optimizer]\nwarmup_steps = 300",
            ["optimizer.warmup_steps = 300", "optimizer.total_steps = 200", "lower it"],
        ),
        ("[optimizer]\nlearning_rate = nan", ["optimizer.learning_rate", "finite"]),
        ("[optimizer]\nlearning_rate = -1e-3", ["optimizer.learning_rate = -0.001", "greater than 0"]),
        ("[optimizer]\nname = 'adam'", ['optimizer.name = "adam"', "'adamw', 'muon' or 'sgd'"]),
        ("[optimizer]\nname = 'sgd'\ncorrection = 'nadamw'", ["optimizer.correction", 'optimizer.name = "adamw"']),
        ("[checkpoint]\nsnapshot_every = 7", ["checkpoint.snapshot_every = 7", "checkpoint.every_steps = 48", "= 49"]),
        ("[averaging]\ndelay = 2", ["averaging.delay = 2", "0 or 1"]),
        ("[limits]\nfounders_per_stage = 65", ["limits.founders_per_stage = 65", "max_peers_per_stage = 64"]),
        ("[deadlines]\ncall_s = 0", ["deadlines.call_s = 0", "greater than 0"]),
        ("[run]\nname = 'a/b'", ['run.name = "a/b"', "give text that matches"]),
        ("[run\nname", ["not TOML", "line 1", "swarm init"]),
    ],
)
def test_mistake_is_named_with_its_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = _refusal(tmp_path, text)
    assert message.startswith(f"{tmp_path}/run.toml: ")
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    lines = _refusal(tmp_path, "[batch]\nmicrobatch_size = 0\n[data]\nseed = 'x'\nsed = 1").splitlines()
    assert len(lines) == 3
    assert "data.seed" in "".join(lines)


def test_file_that_is_no_manifest_is_named(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "nowhere", "No such file"), (tmp_path, "directory")):
        with pytest.raises(SettingsError, match=expected):
            read_manifest(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_manifest(tmp_path / "binary")


@pytest.mark.parametrize("num_bytes", [5_000, 200_000])
def test_default_chunks_are_many_or_as_many_as_fit(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "t.txt").write_text("0123456789abcde\n" * (num_bytes // 16))
    manifest = _read(tmp_path, '[data]\ntext = ["t.txt"]\nsequence_length = 64')
    settings = freeze(manifest, prepare_data(manifest.data, tmp_path / "out"), ())
    order = DataOrder.of_run(settings)
    most = settings.data.num_train_tokens // settings.microbatch_tokens
    num_chunks = settings.data.num_train_tokens // settings.data.chunk_tokens
    assert min(MIN_CHUNKS, most) * 0.9 <= num_chunks <= most
    assert order.microbatches_per_lap >= 0.8 * most


def test_text_too_short_for_a_microbatch_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("0123456789abcde\n" * 40)
    manifest = _read(tmp_path, '[data]\ntext = ["t.txt"]\nsequence_length = 100')
    prepared = prepare_data(manifest.data, tmp_path / "out")
    with pytest.raises(SettingsError, match=r"data\.text is too short: .*no microbatch of 8 samples of 100 tokens"):
        freeze(manifest, prepared, ())


def test_what_is_asked_for_stands_in_the_written_manifest(tmp_path: Path) -> None:
    assert _read(tmp_path, default_manifest_text({"model": {"stages": 1}})).model.num_stages == 1
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(preset_config("tiny", 256)))
    some_weights(model)
    given = {"model": {"stages": 3, "preset": None, "checkpoint": str(model)}}
    read = _read(tmp_path, default_manifest_text(given))
    assert read.model.num_stages == 3
    assert read.initial_checkpoint == model


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ("[model]\nstages = 2", "model.stages = 2"),
        ('[model]\nstages = 1\n[averaging]\ndelay = 1\n[run]\ntrust = "public"', "averaging.delay = 1"),
        ('[model]\nstages = 1\n[optimizer]\nname = "sgd"', 'optimizer.name = "sgd"'),
        ('[model]\nstages = 1\n[optimizer]\nmoments = "int8"', 'optimizer.moments = "int8"'),
        ('[model]\nstages = 1\n[optimizer]\ncorrection = "nadamw"', 'optimizer.correction = "nadamw"'),
        ('[model]\nstages = 1\n[codecs]\naveraging = "topk"', 'codecs.averaging = "topk"'),
        ("[model]\nstages = 1\n[optimizer]\ntotal_steps = 1000000", "optimizer.total_steps = 1000000"),
    ],
)
def test_what_windows_do_not_go_with_is_refused_by_name(tmp_path: Path, tables: str, named: str) -> None:
    with_windows = "[averaging]\nlocal_steps = 20"
    text = tables.replace("[averaging]", with_windows) if "[averaging]" in tables else f"{tables}\n{with_windows}"
    assert f"averaging.local_steps = 20 does not go with {named}" in _refusal(tmp_path, text)


def test_tied_model_is_not_cut_anew_to_one_stage() -> None:
    config = preset_config("tiny", 256) | {"tie_word_embeddings": True}
    model = ModelSettings(config_json=canonical_config_json(config), stage_layers=((0, 2), (2, 4)))
    assert recut(model, ModelTable(stages=4)).num_stages == 4
    with pytest.raises(SettingsError, match=r"model.stages = 1: .* tied .* and 2 were"):
        recut(model, ModelTable(stages=1))
