"""Cut texts have the ids of whole ones, whatever is in them, for each kind of tokenizer that is cut."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from swarm.data import cutting
from swarm.data.cutting import CutTexts, can_cut
from tests.swarm.data.small_tokenizers import TEXT

ATOMS = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\u00a0", "\u200b", "\x1c", "'", "'s", "'S", "'ll", "'ſ"]
ATOMS += [
    *"abX()._!<>=-1,",
    "word",
    "im",
    "é",
    "ß",
    "ж",
    "中",
    "文字",
    "²",
    "e\u0301",
    "😀",
    "12",
    "1234",
    "__",
    "...",
    "='",
]
ATOMS += ["<end>"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLITS = {len(pattern): pattern for pattern in cutting._SPLITS}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


QWEN, LLAMA = (SPLITS[length] for length in sorted(SPLITS))
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"pre_tokenizer": BYTE_LEVEL},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
        }
    },
    "qwen": {"pre_tokenizer": _split(QWEN), "normalizer": {"type": "NFC"}},
    "llama": {"pre_tokenizer": _split(LLAMA)},
}


def _described(kind: str) -> dict[str, Any]:
    """Of a tokenizer that has learnt to join whatever its kind lets it join."""
    described = json.loads(Tokenizer(models.BPE()).to_str()) | KINDS[kind]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, *_random_texts(random.Random(1), 300)], trainer)
    tokenizer.add_special_tokens([AddedToken("<end>")])
    return dict(json.loads(tokenizer.to_str()))


def _random_texts(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        yield "".join(rng.choice(ATOMS) for _ in range(rng.randrange(1, 40)))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_texts_have_the_ids_of_whole_ones(kind: str) -> None:
    described = _described(kind)
    assert can_cut(described)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    cut = CutTexts(tokenizer)
    texts = [*_random_texts(random.Random(2), 800), *TEXT.split("\n\n")]
    found = [ids for at in range(0, len(texts), 100) for ids in cut.encode(texts[at : at + 100])]
    num_cut = 0
    for text, ids in zip(texts, found, strict=True):
        if ids is not None:
            num_cut += 1
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text
            splits = [tokenizer.pre_tokenizer.pre_tokenize_str(part) for part in (text, *cut.cuttings(text))]
            assert [word for word, _ in splits[0]] == [word for split in splits[1:] for word, _ in split], text
    assert num_cut > len(texts) // 3
    assert all(ids is None for text, ids in zip(texts, found, strict=True) if "<end>" in text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [["  ", "    "], ["[[", "(a", "'"], ["\n"], [" ", "._"]])
def test_added_tokens_are_found_wherever_they_are(kind: str, added: list[str]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(_described(kind)))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    cut = CutTexts(tokenizer)
    texts = [*_random_texts(random.Random(3), 300), *TEXT.split("\n\n"), "x  [[ (a", "b (a [[  c"]
    found = [ids for at in range(0, len(texts), 100) for ids in cut.encode(texts[at : at + 100])]
    assert any(ids is not None for ids in found)
    for text, ids in zip(texts, found, strict=True):
        assert ids is None or ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_KNOWN", 50)
    tokenizer = Tokenizer.from_str(json.dumps(_described("gpt2")))
    cut = CutTexts(tokenizer)
    texts = TEXT.split("\n\n")
    longest = max(map(len, texts))
    assert longest < len(set(TEXT.split()))
    for text in texts:
        (ids,) = cut.encode([text])
        assert ids is None or ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(cut._known) <= 50 + longest


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
        {"pre_tokenizer": _split(r"\w+| +")},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_other_tokenizers_are_not_cut(change: dict[str, Any]) -> None:
    assert not can_cut(_described("gpt2") | change)
