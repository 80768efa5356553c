"""Preparing data: two disjoint token files of all the text, reused while nothing changed."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from swarm.core.errors import SettingsError
from swarm.core.tables import read_table
from swarm.data import prepare
from swarm.data.documents.chat import NO_ANSWER
from swarm.data.pieces import PIECE_BYTES, list_pieces
from swarm.data.prepare import PreparedData, prepare_data, read_pieces
from swarm.manifest.tables import DataTable
from tests.swarm.data.small_tokenizers import small_chat_tokenizer


def _folder(root: Path, num_files: int) -> Path:
    root.mkdir()
    for number in range(num_files):
        (root / f"{number:04d}.txt").write_text(f"file {number}\n" * (number % 7 + 1))
    return root


def _table(path: Path, **fields: object) -> DataTable:
    return read_table(DataTable, {"text": [str(path)], "sequence_length": 16, **fields})


def _check_record(prepared: PreparedData) -> None:
    for path, digest, count in (
        (prepared.train_path, prepared.train_digest, prepared.num_train_tokens),
        (prepared.held_out_path, prepared.held_out_digest, prepared.num_held_out_tokens),
    ):
        assert list_pieces(path).digest == digest
        assert read_pieces(path) == list_pieces(path)
        assert path.stat().st_size == count * prepared.token_bytes


def test_each_document_is_on_one_side(tmp_path: Path) -> None:
    text = _folder(tmp_path / "text", 600)
    said = list[str]()
    prepared = prepare_data(_table(text), tmp_path / "out", said.append)
    _check_record(prepared)
    assert said == [f"{prepared.num_train_tokens:,} tokens to train on; {prepared.num_held_out_tokens:,} held out"]
    assert (prepared.tokenizer, prepared.vocab_size, prepared.token_bytes) == ("bytes", 256, 1)
    train, held_out = (path.read_bytes().split(b"\0")[:-1] for path in (prepared.train_path, prepared.held_out_path))
    assert sorted(train + held_out) == sorted(path.read_bytes() for path in text.iterdir())
    assert 10 <= len(held_out) <= 60  # 5 % of 600


def test_copies_of_a_file_fall_on_the_same_side(tmp_path: Path) -> None:
    text = _folder(tmp_path / "text", 200)
    for path in list(text.iterdir()):
        (text / ("copy of " + path.name)).write_bytes(path.read_bytes())
    prepared = prepare_data(_table(text, held_out_share=0.2), tmp_path / "out")
    train, held_out = (path.read_bytes().split(b"\0")[:-1] for path in (prepared.train_path, prepared.held_out_path))
    assert held_out
    assert not set(train) & set(held_out)


def test_end_of_the_text_is_held_out_where_documents_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("0123456789" * 100)
    prepared = prepare_data(_table(tmp_path / "one.txt"), tmp_path / "out")
    _check_record(prepared)
    assert prepared.num_held_out_tokens == 50
    whole = prepared.train_path.read_bytes() + prepared.held_out_path.read_bytes()
    assert whole == b"0123456789" * 100 + b"\0"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "train.tokens",
        "train.pieces",
        "held_out.tokens",
        "held_out.pieces",
        "prepared.json",
    }


def test_equal_inputs_are_reused_and_others_are_not(tmp_path: Path) -> None:
    text, out = _folder(tmp_path / "text", 50), tmp_path / "out"
    first = prepare_data(_table(text), out)
    written_ns = first.train_path.stat().st_mtime_ns
    assert prepare_data(_table(text), out) == first
    assert first.train_path.stat().st_mtime_ns == written_ns

    first.train_path.write_bytes(b"damage" + first.train_path.read_bytes()[6:])
    assert prepare_data(_table(text), out) == first
    _check_record(first)

    (text / "0000.txt").write_text("changed")
    changed = prepare_data(_table(text), out)
    assert changed != first
    _check_record(changed)
    assert prepare_data(_table(text, held_out_share=0.3), out) != changed


def test_standard_library_is_enough_for_the_default_run(tmp_path: Path) -> None:
    prepared = prepare_data(DataTable(), tmp_path)
    _check_record(prepared)
    assert prepared.num_train_tokens > 5e6
    assert 0.02 < prepared.num_held_out_tokens / prepared.num_train_tokens < 0.1


@pytest.mark.parametrize("text", [b"", b"short", b"\0" * 100], ids=["empty", "short", "binary"])
def test_text_too_short_is_refused_and_leaves_no_tokens(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "t.txt").write_bytes(text)
    with pytest.raises(SettingsError, match=r"data\.text is too short: \d tokens .* text need 17"):
        prepare_data(_table(tmp_path / "t.txt"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 1000)
    with pytest.raises(SettingsError, match=r'data folder ".*t\.txt/out" cannot be written'):
        prepare_data(_table(tmp_path / "t.txt"), tmp_path / "t.txt" / "out")


def test_text_that_is_not_there_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r'data\.text = ".*nowhere" is neither a file nor a folder; correct the path'
    ):
        prepare_data(_table(tmp_path / "nowhere"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_record_of_another_shape_is_written_anew(tmp_path: Path) -> None:
    text = _folder(tmp_path / "text", 20)
    first = prepare_data(_table(text), tmp_path / "out")
    for record in ("", "[]", "{}", '{"inputs": 3}'):
        (tmp_path / "out" / "prepared.json").write_text(record)
        assert prepare_data(_table(text), tmp_path / "out") == first
    os.remove(first.held_out_path)
    assert prepare_data(_table(text), tmp_path / "out") == first
    _check_record(first)


@pytest.mark.parametrize("break_at", [3, 40, 77])
def test_an_interrupted_call_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_at: int) -> None:
    sources = []
    for name in "ab":
        text = _folder(tmp_path / name, 30)
        (text / "0005.bin").write_bytes(b"\0")
        (text / "0010.jsonl").write_text("".join(json.dumps({"text": f"row {row}\n" * 9}) + "\n" for row in range(20)))
        sources.append({"text": [str(text)], "weight": 1})
    table = read_table(DataTable, {"mixture": sources, "sequence_length": 16, "held_out_share": 0.2})
    whole = prepare_data(table, tmp_path / "whole")
    assert [(one.reason, one.count) for one in whole.skipped] == [("binary", 2)]
    first, second = whole.mixture
    assert (first.first_token, second.first_token) == (0, PIECE_BYTES)
    assert second.first_token + second.num_tokens == whole.num_train_tokens

    monkeypatch.setattr(prepare, "CHECKPOINT_CHARACTERS", 100)
    left = break_at

    def breaking(text: str, share: float) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return is_held_out(text, share)

    is_held_out = prepare._is_held_out
    monkeypatch.setattr(prepare, "_is_held_out", breaking)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(table, tmp_path / "out")
    read, left = break_at, 10**6
    again = prepare_data(table, tmp_path / "out")
    assert 10**6 - left < 98 - read + 12  # what was written is not read again, but for the last file
    assert (again.train_digest, again.held_out_digest) == (whole.train_digest, whole.held_out_digest)
    assert (again.mixture, [one.count for one in again.skipped]) == (whole.mixture, [2])
    assert not (tmp_path / "out" / "prepared.partial.json").exists()


def _chats(folder: Path, count: int) -> Path:
    lines = []
    for number in range(count):
        asked = [{"role": "user", "content": f"What is {number} and {turn}?"} for turn in range(number % 3 + 1)]
        said = [{"role": "assistant", "content": f"It is {number + turn}, " * (1 + number % 11)} for turn in range(9)]
        lines.append({"messages": [one for pair in zip(asked, said, strict=False) for one in pair]})
    lines[5] = {"messages": [{"role": "user", "content": "nobody answers"}]}
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_conversations_lie_whole_in_samples_and_what_is_cut_or_left_out_is_named(tmp_path: Path) -> None:
    tokenizer, path = small_chat_tokenizer(tmp_path / "t"), _chats(tmp_path, 400)
    table = _table(path, kind="chat", tokenizer=str(tokenizer), sequence_length=96)
    said = list[str]()
    prepared = prepare_data(table, tmp_path / "out", said.append)
    assert f"to train on, {prepared.num_train_targets:,} of which are learnt; " in said[-1]
    _check_record(prepared)
    marks = prepare.marks_of(table)
    assert (marks.documents, marks.answers, prepared.token_bytes) == (True, True, 2)
    reasons = {one.reason: (one.count, one.named) for one in prepared.skipped}
    assert reasons[NO_ANSWER] == (1, (str(path),))
    assert reasons[prepare.CUT][0] > 20
    values_BL = prepared.train().read(0, prepared.num_train_tokens).reshape(-1, 96)
    tokens_BL, targets_BL = marks.batch(values_BL)
    assert prepared.num_train_targets == (targets_BL >= 0).sum()
    assert (targets_BL >= 0).any(axis=1).all()
    assert tokens_BL.max() < prepared.vocab_size


def test_samples_of_an_interrupted_call_are_those_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "CHECKPOINT_CHARACTERS", 9000)
    tokenizer, path = small_chat_tokenizer(tmp_path / "t"), _chats(tmp_path, 400)
    table = _table(path, kind="chat", tokenizer=str(tokenizer), sequence_length=96)
    whole = prepare_data(table, tmp_path / "whole")
    saves = []

    def break_off(self: prepare._Preparing, *args: Any) -> None:
        saved(self, *args)
        saves.append(args)
        if len(saves) == 3:
            raise KeyboardInterrupt

    saved = prepare._Preparing._save
    with monkeypatch.context() as broken:
        broken.setattr(prepare._Preparing, "_save", break_off)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(table, tmp_path / "out")
    found = prepare_data(table, tmp_path / "out")
    assert asdict(found) | {"train_path": 0, "held_out_path": 0} == asdict(whole) | {
        "train_path": 0,
        "held_out_path": 0,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "chat"}, "has no chat template"),
        ({"kind": "chat", "tokenizer": "t", "documents": "packed"}, "would cut conversations"),
        ({"loss_on": "answers"}, "no source has kind"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _table(tmp_path, **fields)
