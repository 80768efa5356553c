"""Documents are encoded by processes as by one, in order."""

from pathlib import Path

import numpy as np
import pytest

from swarm.core.errors import LocalError
from swarm.data import encoding
from swarm.data.encoding import encoded
from swarm.data.tokenizer import load_tokenizer
from tests.swarm.data.small_tokenizers import TEXT, small_tokenizer


def test_processes_give_the_ids_of_one_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 5000)
    monkeypatch.setattr(encoding, "IN_PROCESS_CHARACTERS", 10000)
    name = str(small_tokenizer(tmp_path / "small"))
    documents = list(enumerate([*TEXT.split("\n\n"), "über", "中文", "<end> inside"]))
    found = list(encoded(iter(documents), name, load_tokenizer(name)))
    assert [(one.about, one.text) for one in found] == documents
    whole = load_tokenizer(name).encode_documents([text for _, text in documents])
    assert all(map(np.array_equal, [one.ids for one in found], whole))


def test_a_process_that_dies_is_told_of(tmp_path: Path) -> None:
    with encoding._Worker(str(tmp_path / "no tokenizer")) as worker, pytest.raises(LocalError, match="has ended"):
        worker.encode(["text"] * 100)
