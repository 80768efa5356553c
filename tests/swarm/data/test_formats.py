"""Files of each format, packed or not, here or at a URL, give their texts; what is missing for them is named."""

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from swarm.core.errors import SettingsError
from swarm.data.corpus import Corpus

TEXTS = ["grüße", "zwei\nZeilen", "x" * 5000]


def _parquet(column: str = "text") -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({column: [TEXTS[0], None, *TEXTS[1:]], "number": list(range(4))})
    parquet.write_table(table, file, row_group_size=2)
    return file.getvalue()


JSON_LINES = "\n".join(json.dumps({"text": text}) for text in [TEXTS[0], None, *TEXTS[1:]]).encode()
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:]),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(("name", "data"), [("a.jsonl", JSON_LINES), ("a.ndjson", JSON_LINES), ("a.txt", b"one text")])
def test_packed_files_give_what_they_give_unpacked(tmp_path: Path, name: str, data: bytes, packed: str) -> None:
    (tmp_path / (name + packed)).write_bytes(PACKED[packed](data))
    corpus = Corpus([str(tmp_path)])
    assert [document.text for document in corpus.documents()] == (["one text"] if name == "a.txt" else TEXTS)
    rows = [(one.reason, one.count) for one in corpus.skipped.found()]
    assert rows == ([] if name == "a.txt" else [("rows without text", 1)])


def test_parquet_gives_the_texts_of_its_column(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(_parquet("body"))
    corpus = Corpus([str(tmp_path)], text_field="body")
    assert [document.text for document in corpus.documents()] == TEXTS
    assert [(one.reason, one.count) for one in corpus.skipped.found()] == [("rows without text", 1)]
    with pytest.raises(SettingsError, match=r'to one of body, number; for conversations set data.kind = "chat"'):
        list(Corpus([str(tmp_path)]).documents())
    with pytest.raises(SettingsError, match="holds int64, no text"):
        list(Corpus([str(tmp_path)], text_field="number").documents())


def test_who_takes_conversations_for_text_is_told_the_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    with pytest.raises(SettingsError, match=r'line 1 is no JSON object .*; for conversations set data.kind = "chat"'):
        list(Corpus([str(tmp_path)]).documents())


def test_damaged_files_are_named_and_give_what_is_whole(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(30000))
    (tmp_path / "a.parquet").write_bytes(_parquet()[:-9])
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(lines)[:-9])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    corpus = Corpus([str(tmp_path)])
    assert len(list(corpus.documents())) > 100
    (one,) = corpus.skipped.found()
    assert (one.reason, one.count) == ("damaged", 3)
    assert [Path(name).name for name in one.named] == ["a.parquet", "b.jsonl.zst", "c.jsonl.gz"]


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"what it is does not matter")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"needs {package}, .*pip install 'homeswarm\[data\]'"):
        list(Corpus([str(tmp_path)]).documents())


def test_a_url_is_read_as_a_folder_is() -> None:
    files = fsspec.filesystem("memory")
    for name, text in (("b/c.txt", "two"), ("a.txt", "one"), ("b/.hidden", "no")):
        files.pipe(f"/corpus/{name}", text.encode())
    assert [document.text for document in Corpus(["memory://corpus"]).documents()] == ["one", "two"]
    before = [file.identity for file in Corpus(["memory://corpus"]).files()]
    files.pipe("/corpus/a.txt", b"other")
    assert [file.identity for file in Corpus(["memory://corpus"]).files()] != before
    with pytest.raises(SettingsError, match=r'data\.text = "nosuch://x".*install the package'):
        Corpus(["nosuch://x"]).files()
