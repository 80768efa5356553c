"""The run of docs/data.md is prepared as the page has it."""

import io
import re
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

from swarm.data.prepare import prepare_data
from swarm.manifest.file import freeze, parse_manifest
from tests import ROOT
from tests.swarm.data.small_tokenizers import TEXT, small_tokenizer


def test_the_manifest_of_the_page_makes_a_mixture_of_what_it_names(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^    (\[data\]\n(?:    .*\n)+)", page, re.MULTILINE)
    small_tokenizer(tmp_path / "qwen")
    (tmp_path / "web").mkdir()
    texts = TEXT.split("\n\n") * 3
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), file)
    (tmp_path / "web" / "a.parquet").write_bytes(file.getvalue())
    (tmp_path / "web" / "b.zip").write_bytes(b"PK")
    lines = "".join(f'{{"body": "line {number} of a chat, and what is said in it"}}\n' for number in range(900))
    (tmp_path / "chat.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    manifest = parse_manifest(block.replace("\n    ", "\n"), tmp_path / "run.toml")
    said: list[str] = []
    prepared = prepare_data(manifest.data, tmp_path / "data", said.append)
    assert any("b.zip" in line for line in said)
    settings = freeze(manifest, prepared, ())
    assert [weight for _, _, weight in settings.data.mixture] == [3, 1]
    assert settings.data.tokenizer == "qwen"
    assert (settings.data.token_bytes, prepared.end_of_document) == (2, 0)
