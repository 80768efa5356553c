"""Documents are encoded by threads as by one, in order."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from swarm.data import cutting, encoding
from swarm.data.encoding import encoded
from swarm.data.tokenizer import load_tokenizer
from tests.swarm.data.small_tokenizers import TEXT, small_tokenizer


def test_threads_give_the_ids_of_one_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 5000)
    name = str(small_tokenizer(tmp_path / "small"))
    documents = list(enumerate([*TEXT.split("\n\n"), "über", "中文", "<end> inside"]))
    found = list(encoded(iter(documents), load_tokenizer(name)))
    assert [(one.about, one.text) for one in found] == documents
    whole = load_tokenizer(name).encode_documents([text for _, text in documents])
    assert all(map(np.array_equal, [one.values for one in found], whole))


@pytest.mark.parametrize("most", [20, 1 << 21])
def test_what_threads_learn_and_forget_of_each_other_changes_no_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(cutting, "MAX_KNOWN", most)
    tokenizer = load_tokenizer(str(small_tokenizer(tmp_path / "small")))
    texts = TEXT.split("\n")[::3]
    whole = [tokenizer.encode_documents([text])[0].tolist() for text in texts]

    def encode(seed: int) -> bool:
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        return all(tokenizer.encode_documents([texts[at]])[0].tolist() == whole[at] for at in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(encode, range(4)))
    plain = load_tokenizer(str(_never_cut(tmp_path)))
    assert [ids.tolist() for ids in plain.encode_documents(texts)] == whole


def _never_cut(folder: Path) -> Path:
    """The same tokenizer, described so that it encodes texts whole."""
    file = small_tokenizer(folder / "whole") / "tokenizer.json"
    described = json.loads(file.read_text())
    nowhere = {"type": "Split", "pattern": {"String": "\0"}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [nowhere, described["pre_tokenizer"]]}
    file.write_text(json.dumps(described))
    return file.parent
