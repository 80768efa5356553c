"""Tokenizers: bytes by default, or a tokenizer.json that is on disk."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from swarm.core.errors import SettingsError
from swarm.data.prepare import prepare_data
from swarm.data.tokenizer import load_tokenizer
from swarm.manifest.tables import DataTable

VOCABULARY = {"<unk>": 0, "the": 1, "swarm": 2, "trains": 3, "<end>": 400}


def _folder(folder: Path) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)  # what a user left on must not cut documents
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_are_the_bytes_of_utf8() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_documents(["aü€"])[0].tolist() == [97, 0xC3, 0xBC, 0xE2, 0x82, 0xAC, 0]
    assert (tokenizer.name, tokenizer.vocab_size) == ("bytes", 256)


def test_file_and_folder_give_the_same_ids(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "words")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode_documents(["the swarm trains the moon"])[0].tolist() == [1, 2, 3, 1, 0]
    assert (tokenizer.name, tokenizer.vocab_size) == ("words", 401)
    from_file = load_tokenizer(str(folder / "tokenizer.json"))
    assert (from_file.name, from_file.identity) == (tokenizer.name, tokenizer.identity)


@pytest.mark.parametrize("token", ["<end>", {"content": "<end>"}])
def test_documents_end_with_the_end_token_of_the_folder(tmp_path: Path, token: object) -> None:
    folder = _folder(tmp_path / "words")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert load_tokenizer(str(folder)).encode_documents(["the swarm"])[0].tolist() == [1, 2, 400]


def test_tokens_of_a_larger_vocabulary_take_two_bytes(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "words")
    (tmp_path / "t.txt").write_text("the swarm trains " * 100)
    table = DataTable(text=(str(tmp_path / "t.txt"),), tokenizer=str(folder), sequence_length=4)
    prepared = prepare_data(table, tmp_path / "out")
    assert (prepared.token_bytes, prepared.num_train_tokens + prepared.num_held_out_tokens) == (2, 300)
    assert prepared.train().read(0, 6).tolist() == [1, 2, 3, 1, 2, 3]


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, expected in ((tmp_path, "cannot be read"), (tmp_path / "nowhere", "has no tokenizer.json")):
        with pytest.raises(SettingsError, match=rf'data\.tokenizer = "{path}" {expected}'):
            load_tokenizer(str(path))
