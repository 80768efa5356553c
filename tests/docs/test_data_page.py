"""The run of docs/data.md is prepared as the page has it."""

import io
import json
import re
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

from swarm.data.prepare import prepare_data
from swarm.manifest.file import freeze, parse_manifest
from tests import ROOT
from tests.swarm.data.small_tokenizers import TEXT, small_chat_tokenizer, small_tokenizer


def _blocks() -> list[str]:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    found = re.findall(r"^    (\[data\]\n(?:    .*\n)+)", page, re.MULTILINE)
    return [block.replace("\n    ", "\n") for block in found]


def test_the_manifest_of_the_page_makes_a_mixture_of_what_it_names(tmp_path: Path) -> None:
    block, _ = _blocks()
    small_tokenizer(tmp_path / "qwen")
    (tmp_path / "web").mkdir()
    texts = TEXT.split("\n\n") * 3
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), file)
    (tmp_path / "web" / "a.parquet").write_bytes(file.getvalue())
    (tmp_path / "web" / "b.zip").write_bytes(b"PK")
    lines = "".join(f'{{"body": "line {number} of a chat, and what is said in it"}}\n' for number in range(900))
    (tmp_path / "notes.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    manifest = parse_manifest(block, tmp_path / "run.toml")
    said: list[str] = []
    prepared = prepare_data(manifest.data, tmp_path / "data", said.append)
    assert any("b.zip" in line for line in said)
    settings = freeze(manifest, prepared, ())
    assert [weight for _, _, weight in settings.data.mixture] == [3, 1]
    assert settings.data.tokenizer == "qwen"
    assert (settings.data.token_bytes, prepared.end_of_document) == (2, 0)


def test_the_manifest_for_conversations_makes_samples_of_which_answers_are_learnt(tmp_path: Path) -> None:
    _, block = _blocks()
    small_chat_tokenizer(tmp_path / "model")
    lines = [
        {"messages": [{"role": role, "content": f"{role} says so {number}, " * 5} for role in ("user", "assistant")]}
        for number in range(200)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = block + 'tokenizer = "model"\n[batch]\nmicrobatch_size = 2\n'
    manifest = parse_manifest(text, tmp_path / "run.toml")
    prepared = prepare_data(manifest.data, tmp_path / "data")
    settings = freeze(manifest, prepared, ())
    assert (settings.data.documents, settings.data.loss_on) == ("masked", "answers")
    assert 0.3 < prepared.num_train_targets / prepared.num_train_tokens < 0.6
