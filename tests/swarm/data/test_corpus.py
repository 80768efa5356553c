"""Reading text: sorted, cut at lines, with what is no text left out and counted."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.core.errors import SettingsError
from swarm.data.corpus import OVER_THE_BOUND, Corpus
from swarm.data.formats import DOCUMENT_BYTES


def texts(*paths: Path, **options: Any) -> list[str]:
    return [document.text for document in Corpus([*map(str, paths)], **options).documents()]


def skipped(corpus: Corpus) -> dict[str, tuple[int, list[str]]]:
    return {one.reason: (one.count, [Path(name).name for name in one.named]) for one in corpus.skipped.found()}


def test_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/z.py", "b.py", "a/2.txt", "a/10.txt", "b/a/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/10.txt", "a/2.txt", "b/a/c.py", "b/z.py", "b.py"]


def test_paths_are_read_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("first")
    (tmp_path / "a").write_text("second")
    assert texts(tmp_path / "b", tmp_path / "a") == ["first", "second"]


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("grüße")
    (tmp_path / "zero.bin").write_bytes(b"text\0more")
    (tmp_path / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "link.txt").symlink_to(tmp_path / "good.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "packed.zip").write_bytes(b"PK")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"short")[:-4])
    corpus = Corpus([str(tmp_path)])
    assert [document.text for document in corpus.documents()] == ["grüße"]
    assert skipped(corpus) == {
        "a format that is not read": (1, ["packed.zip"]),
        "binary": (2, ["latin.txt", "zero.bin"]),
        "damaged": (1, ["cut.txt.gz"]),
        "empty": (1, ["empty.txt"]),
    }


def test_unreadable_file_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    documents = (corpus := Corpus([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])).documents()
    assert next(documents).text == "a"
    (tmp_path / "b.txt").unlink()  # gone between being found and being read; also fails for root, unlike a mode
    assert list(documents) == []
    assert skipped(corpus) == {"unreadable": (1, ["b.txt"])}


@pytest.mark.parametrize("text", ["x" * 39 + "\n", "ü", "\n", "€"], ids=["lines", "two bytes", "line feeds", "three"])
def test_large_file_is_cut_into_bounded_documents(tmp_path: Path, text: str) -> None:
    whole = "." + text * (2 * DOCUMENT_BYTES // len(text.encode()) + 7)
    (tmp_path / "large.txt").write_text(whole)
    pieces = texts(tmp_path)
    assert "".join(pieces) == whole
    assert len(pieces) == 3
    assert all(len(piece.encode()) <= DOCUMENT_BYTES for piece in pieces)
    if "\n" in text:
        assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_reading_stops_at_the_size_bound(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 100)
    corpus = Corpus([str(tmp_path)], max_bytes=250)
    assert [document.text for document in corpus.documents()] == ["a" * 100, "b" * 100]
    assert skipped(corpus) == {OVER_THE_BOUND: (1, ["c and what follows"])}


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one"}), "", json.dumps({"body": "t\0wo", "other": 1})]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    assert texts(tmp_path, text_field="body") == ["one", "two"]


def test_half_a_surrogate_pair_of_json_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text(r'{"text": "a\ud800b \ud83d\ude00 \u00e9"}' + "\n")
    assert [one.text for one in Corpus([str(tmp_path)]).documents()] == ["a\ufffdb \U0001f600 é"]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"content": "x"}', '{"text": 3}'])
def test_json_line_without_the_field_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(SettingsError, match=r'data\.text = .*d\.jsonl": line 2 .*data\.text_field'):
        texts(tmp_path)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r'data\.text = ".*nowhere" is neither'):
        Corpus([str(tmp_path / "nowhere")]).files()


def test_default_text_is_the_standard_library() -> None:
    files = Corpus([]).files()
    paths = [Path(file.name) for file in files]
    assert all(path.suffix == ".py" for path in paths)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in paths)
    assert {"dataclasses.py", "argparse.py"} <= {path.name for path in paths}
    assert 5e6 < sum(file.size_bytes for file in files) < 30e6
