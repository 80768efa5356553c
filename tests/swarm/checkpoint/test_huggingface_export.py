"""An exported model serves people who have never heard of us."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm.checkpoint.archive import CheckpointMeta, CheckpointWriter, read_checkpoint
from swarm.checkpoint.huggingface import copy_tokenizer, export_huggingface, generate
from swarm.checkpoint.model_card import model_card
from swarm.checkpoint.parent import PARENT
from swarm.checkpoint.record import TOKENIZER
from swarm.checkpoint.state import StageState
from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.log_format import harmless
from swarm.model.families import canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel
from swarm.model.subspace import StageInput, given_on
from tests.swarm.model.tiny_models import CONFIGS, CUTS

TEXT = 'Grüße,\n\tNaïve 🎉 \x00 <s> "quoted"  spaces '


def byte_model(config: str) -> ModelSettings:
    fields = CONFIGS[config] | {"vocab_size": 256, "dtype": "float32"}
    return ModelSettings(config_json=canonical_config_json(fields), stage_layers=CUTS[3])


def untied(config_json: str) -> str:
    return canonical_config_json(json.loads(config_json) | {"tie_word_embeddings": False})


def write_checkpoint(folder: Path, model: ModelSettings, tokenizer: str = "bytes") -> Path:
    writer = CheckpointWriter(folder, 1)
    for stage, flat in enumerate(initial_weights(model, 4, None)):
        # A trained head is no longer a copy of the embedding.
        flat += 0.01
        writer.add_stage(stage, StageState(1, stage_layout(model, stage), flat))
    return writer.commit(CheckpointMeta(model=model, tokenizer=tokenizer, run={}, data_position={}))


def staged_loss(model: ModelSettings, text: str) -> float:
    """Mean loss in nats of the bytes of `text` in our own stages."""
    ids = torch.tensor([list(text.encode())])
    given = ids[:, :-1].contiguous()
    hidden: StageInput = given
    for stage_index, flat in enumerate(initial_weights(model, 4, None)):
        stage = StageModel(model, stage_index)
        weights = stage.weights(flat + flat.dtype.type(0.01))
        if stage.is_last:
            loss_sum, num_tokens, _ = stage.loss(weights, hidden, ids[:, 1:].contiguous(), keep=False)
            return loss_sum / num_tokens
        values, _ = stage.forward(weights, hidden, keep=False)
        hidden = given_on(model, values, given)
    raise AssertionError("no stage is the last")


LOADED_ELSEWHERE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
text, *folders = json.loads(sys.argv[1])
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    decoded = tokenizer.decode(ids[0])
    print(json.dumps({"ids": ids[0].tolist(), "text": decoded, "loss": loss, "size": len(tokenizer)}))
assert not [name for name in sys.modules if name.split(".")[0] in ("swarm", "tests")]
"""


@pytest.mark.soak
def test_export_gives_the_same_loss_in_plain_transformers(tmp_path: Path) -> None:
    shard_bytes = {"qwen3-tied": 2 << 30, "llama": 100_000}
    for config, max_shard_bytes in shard_bytes.items():
        checkpoint = write_checkpoint(tmp_path / "checkpoints" / config, byte_model(config))
        out = tmp_path / config
        export_huggingface(checkpoint, out, max_shard_bytes=max_shard_bytes)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        shards = list(out.glob("model-*.safetensors"))
        assert (len(shards) > 1) == (config == "llama")
        assert (out / "model.safetensors").exists() == (config != "llama")
        assert all(path.stat().st_size < 2 * max_shard_bytes for path in shards)
    folders = [str(tmp_path / config) for config in shard_bytes]
    result = subprocess.run(
        [sys.executable, "-I", "-c", LOADED_ELSEWHERE, json.dumps([TEXT, *folders])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for config, line in zip(shard_bytes, result.stdout.splitlines(), strict=True):
        loaded = json.loads(line)
        assert loaded["ids"] == list(TEXT.encode())
        assert loaded["text"] == TEXT
        assert loaded["size"] == 256
        assert loaded["loss"] == pytest.approx(staged_loss(byte_model(config), TEXT), abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "llama", "qwen3-tied"]


@pytest.mark.parametrize("config", ["llama", "gpt2", "gpt_neox"])
def test_a_model_within_a_subspace_is_an_ordinary_one_once_exported(config: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = byte_model(config)
    model = replace(plain, subspace=4, subspace_seed=9, config_json=untied(plain.config_json))
    export_huggingface(write_checkpoint(tmp_path / "checkpoints", model), tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    ids = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        loss = float(loaded(input_ids=ids, labels=ids).loss)
    assert loss == pytest.approx(staged_loss(model, TEXT), abs=1e-5)


def test_every_byte_has_its_own_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export_huggingface(write_checkpoint(tmp_path, byte_model("llama")), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    every_character = "".join(chr(code) for code in [*range(0x800), 0x20AC, 0xFFFD, 0x1F389])
    assert tokenizer(every_character).input_ids == list(every_character.encode())
    assert tokenizer.decode(list(every_character.encode())) == every_character
    assert tokenizer("").input_ids == []


def test_generation_repeats_with_its_seed_and_gives_whole_characters(tmp_path: Path) -> None:
    export_huggingface(write_checkpoint(tmp_path, byte_model("llama")), tmp_path / "out")

    def text(temperature: float, seed: int) -> list[str]:
        return list(generate(tmp_path / "out", "né", max_new_tokens=12, temperature=temperature, seed=seed))

    assert text(1.0, 1) == text(1.0, 1)
    assert text(1.0, 1) != text(1.0, 2)
    assert text(0.0, 1) == text(0.0, 2)
    assert "".join(text(0.0, 1))


def test_greedy_generation_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    export_huggingface(write_checkpoint(tmp_path, byte_model("llama")), out)
    model = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"hello")])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    pieces = generate(out, "hello", max_new_tokens=12, temperature=0, seed=0)
    assert "".join(pieces) == bytes(expected[0, 5:].tolist()).decode(errors="replace")


def test_runs_own_tokenizer_is_copied(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"version": "1.0"}')
    (tokenizer / "notes.txt").write_text("private")
    checkpoint = write_checkpoint(tmp_path / "checkpoints", byte_model("llama"), tokenizer="own")
    with pytest.raises(SettingsError, match="tokenizer is 'own', and the checkpoint holds none; give its folder"):
        export_huggingface(checkpoint, tmp_path / "out")
    with pytest.raises(SettingsError, match="holds no tokenizer"):
        export_huggingface(checkpoint, tmp_path / "out", tokenizer_dir=tmp_path / "checkpoints")
    assert not (tmp_path / "out").exists()
    export_huggingface(checkpoint, tmp_path / "out", tokenizer_dir=tokenizer)
    (checkpoint / TOKENIZER).mkdir()
    copy_tokenizer(tokenizer, checkpoint / TOKENIZER)
    export_huggingface(checkpoint, tmp_path / "archived")
    for out in ("out", "archived"):
        assert (tmp_path / out / "tokenizer.json").read_text() == '{"version": "1.0"}'
        assert not (tmp_path / out / "notes.txt").exists()


def test_export_overwrites_nothing_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoints", byte_model("llama"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(SettingsError, match="not an empty folder"):
        export_huggingface(checkpoint, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    damaged = checkpoint / "stage-2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(SettingsError, match="damaged"):
        export_huggingface(checkpoint, out)
    assert list(out.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_question_is_put_into_the_folders_chat_template(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_huggingface(write_checkpoint(tmp_path, byte_model("llama")), out)

    def text(prompt: str, *, chat: bool = False) -> str:
        return "".join(generate(out, prompt, max_new_tokens=12, temperature=0, seed=0, chat=chat))

    with pytest.raises(SettingsError, match="has no chat template; leave --chat out"):
        text("hello", chat=True)
    (out / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}it: {% endif %}"
    )
    assert text("hello", chat=True) == text("user: hello\nit: ")


def test_a_card_says_at_which_step_its_loss_was_measured(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, byte_model("llama"))
    info = read_checkpoint(checkpoint)
    meta = replace(info.meta, lineage={"held_out_loss": 2.5, "held_out_version": 16})
    assert "| held-out loss at step 16, the last measured before | 2.5 |" in model_card(replace(info, meta=meta), [])


def test_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no Hugging Face model folder"):
        list(generate(tmp_path, "a", max_new_tokens=1, temperature=0, seed=0))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"holds adapters, no model; .* with --base MODEL"):
        list(generate(tmp_path, "a", max_new_tokens=1, temperature=0, seed=0))
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        list(generate(tmp_path, "a", max_new_tokens=1, temperature=0, seed=0))


def test_a_hosts_checkpoint_brings_no_program_into_the_export(tmp_path: Path) -> None:
    """What it called a tokenizer had a file of Python and said so: whoever loads it and trusts it runs that."""
    checkpoint = write_checkpoint(tmp_path / "checkpoints", byte_model("llama"), tokenizer="own")
    (checkpoint / TOKENIZER).mkdir()
    (checkpoint / PARENT).mkdir()
    for name in ("tokenizer_evil.py", "vocab.pkl", "tokenizer.so", "evil.model.py", "vocab.json"):
        (checkpoint / TOKENIZER / name).write_text("print()")
    says = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "tokenizer_evil.Evil"]}}
    (checkpoint / TOKENIZER / "tokenizer_config.json").write_text(json.dumps(says))
    (checkpoint / PARENT / "generation_config.json").write_text(json.dumps({"do_sample": True, "auto_map": {}}))
    export_huggingface(checkpoint, tmp_path / "out")
    weights = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*weights, "tokenizer_config.json", "vocab.json"}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"tokenizer_class": "Evil"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"do_sample": True}


def test_what_a_host_calls_things_is_text_in_the_card(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoints", byte_model("llama"))
    info = read_checkpoint(path)
    lineage = {"parent": {"name": "[free](http://x)<img src=x>|\x1b[2J\n# other", "digest": "00"}}
    card = model_card(replace(info, meta=replace(info.meta, lineage=lineage, run={"name": "a\n\n<script>"})), [])
    assert r"| began from | \[free\](http://x)&lt;img src=x&gt;\|\\x1b\[2J\\n# other (SHA-256 00) |" in card
    assert "\n# a\\\\n\\\\n&lt;script&gt;\n" in card


def test_what_a_model_says_acts_on_no_terminal() -> None:
    assert harmless("a\tb\n\N{ZERO WIDTH NON-JOINER}\x1b]52;c;aGk=\x07\r\x9b2J") == (
        "a\tb\n\N{ZERO WIDTH NON-JOINER}\\x1b]52;c;aGk=\\x07\\r\\x9b2J"
    )
