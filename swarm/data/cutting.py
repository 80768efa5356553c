"""Byte-level BPE many times faster: a text is cut where no token can reach across, and each cutting is encoded once.

A tokenizer of this family first splits a text by a regular expression and then encodes each split by itself. In all
the expressions below a split ends

* after a letter or digit before an ASCII character that is none, and begins no contraction,
* before the last space of white space before something visible that is no digit,
* between two characters that are no letters, digits or apostrophes, or one after a space, and a letter.

Nothing in them looks back, and what looks ahead does so behind white space only, where it finds the same. So a text's
ids are those of its cuttings, end to end; and as few cuttings make up most of a language, most are known already.

References: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for the expression of GPT-2;
the others are those of Llama 3, Qwen 2 and GPT-4.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_KNOWN = 1 << 21
"""Cuttings that are remembered; then all are forgotten. Some hundreds of MB."""
ENCODED_TOGETHER = 1 << 12
"""Characters of cuttings that are new, in one call."""

_WORD = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-ΡΣ-Ωα-ωЀ-ҁ"  # Of those that are letters in every version of Unicode.
_LETTER = _WORD.removeprefix("0-9")
_MARK = r"!-&(-/:-@\[-`{-~"
_ASCII = r"\x00-/:-@\[-`{-\x7f"
_GOES_ON = rf"(?:'[stmdrvlSTMDRVL\x80-\U0010ffff]|'\Z|[^{_WORD}{_ASCII}])"
_AT_WORDS = (
    rf"[{_ASCII}]*(?:[ {_MARK}][{_MARK}](?=[{_LETTER}])"
    rf"|(?>(?:[{_WORD}]*{_GOES_ON}[{_ASCII}]*)*)[{_WORD}]++(?!{_GOES_ON}))"
)
_AT_SPACES = rf"[{_ASCII}]*[ \n\t](?= [!-/:-~])"
_CUTTING = re.compile(rf"{_AT_WORDS}|[\s\S]+")
_CUTTING_AT_SPACES = re.compile(rf"{_AT_SPACES}|{_AT_WORDS}|[\s\S]+")
_ENDS_IN_WORD = re.compile(rf"[{_WORD}]\Z")
_ENDS_IN_MARKS = re.compile(rf"[ {_MARK}][{_MARK}]\Z")
_BEGINS_OTHERWISE = re.compile(r"[\x00-&(-/:-@\[-`{-\x7f]")
_BEGINS_WITH_LETTER = re.compile(rf"[{_LETTER}]")
SHORT = 32
"""Characters of a text's cuttings, on the average, above which they are not worth remembering."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = frozenset(
    _CONTRACTIONS + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)
"""Of Qwen and Llama 3."""

Ids = npt.NDArray[np.integer]


def can_cut(described: dict[str, Any]) -> bool:
    """Whether a tokenizer.json describes a tokenizer that this is right for."""
    model, normalizer = described.get("model") or {}, described.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("byte_fallback")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _splits_so(described.get("pre_tokenizer") or {})
    )


def _splits_so(described: dict[str, Any]) -> bool:
    steps = described.get("pretokenizers") if described.get("type") == "Sequence" else [described]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if last.get("use_regex", True):
        return all(step.get("type") == "Digits" for step in before)
    return len(before) == 1 and before[0].get("type") == "Split" and _is_known(before[0])


def _is_known(split: dict[str, Any]) -> bool:
    pattern = (split.get("pattern") or {}).get("Regex")
    return pattern in _SPLITS and split.get("behavior") == "Isolated" and not split.get("invert")


class CutTexts:
    """Ids of texts by a tokenizer that `can_cut` allows."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._normal_form_only = tokenizer.normalizer is not None
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        self._num_bytes = np.zeros(max([*vocabulary.values(), *added], default=0) + 1, np.int64)
        for token, number in vocabulary.items():
            self._num_bytes[number] = len(token)  # a byte of text is one character of a byte-level token
        for number, token in added.items():
            self._num_bytes[number] = len(token.content.encode())
        contents = [token.content for token in added.values()]
        ends_in_space = any(content[-1:].isspace() for content in contents)
        self._cutting = _CUTTING if ends_in_space else _CUTTING_AT_SPACES
        self._across = [
            token.content
            for token in added.values()
            if len(self._cutting.findall(token.content)) > 1 or token.lstrip or token.rstrip or token.single_word
        ]
        """Tokens that a cut may go through, or what is beside them."""
        self._known: dict[str, int] = {}
        self._ids: npt.NDArray[np.int32]
        self._starts: npt.NDArray[np.int64]
        self._counts: npt.NDArray[np.int64]
        self._forget()

    def encode(self, texts: Sequence[str]) -> list[Ids | None]:
        """Of each text; None where it is to be encoded whole."""
        if len(self._known) > MAX_KNOWN:
            self._forget()
        cut = [self.cuttings(text) for text in texts]
        new = dict.fromkeys(cutting for cuttings in cut for cutting in cuttings if cutting not in self._known)
        if new and not self._learn(list(new)):
            return [None] * len(texts)
        return [self._ids_of(cuttings) if cuttings else None for cuttings in cut]

    def cuttings(self, text: str) -> list[str]:
        """None of them where it is to be encoded whole."""
        if any(token in text for token in self._across):
            return []
        if self._normal_form_only and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return []
        cuttings = self._cutting.findall(text)
        return cuttings if len(text) <= SHORT * len(cuttings) else []

    def _ids_of(self, cuttings: Sequence[str]) -> Ids:
        which = np.fromiter(map(self._known.__getitem__, cuttings), np.int64, len(cuttings))
        counts = self._counts[which]
        ends = np.cumsum(counts)
        places: npt.NDArray[np.int64] = np.repeat(self._starts[which] - ends + counts, counts) + np.arange(ends[-1])
        return self._ids[places]

    def _learn(self, cuttings: Sequence[str]) -> bool:
        """False, and nothing is learnt, where tokens do not say how many bytes they stand for."""
        texts, joined = [""], list[str]()
        is_new = list[bool]()
        for cutting in cuttings:
            between = _between(joined[-1], cutting) if joined and len(texts[-1]) < ENCODED_TOGETHER else None
            if between is None:
                texts.append("")
            for part in (*(between or ()), cutting):
                texts[-1] += part
                joined.append(part)
                is_new.append(part is cutting)
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable(one.ids for one in found), np.int32)
        ends = np.cumsum(self._num_bytes[ids])
        wanted = np.cumsum([len(part.encode()) for part in joined])
        last = np.searchsorted(ends, wanted)
        if not len(ids) or last[-1] >= len(ids) or not np.array_equal(ends[last], wanted):
            return False
        starts, last = np.concatenate([[0], last[:-1] + 1])[is_new], last[is_new]
        first = len(self._known)
        self._known.update(zip(cuttings, range(first, first + len(cuttings)), strict=True))
        self._starts = np.concatenate([self._starts, starts + len(self._ids)])
        self._counts = np.concatenate([self._counts, last + 1 - starts])
        self._ids = np.concatenate([self._ids, ids])
        return True

    def _forget(self) -> None:
        self._known = {}
        self._ids = np.zeros(0, np.int32)
        self._starts = self._counts = np.zeros(0, np.int64)


def _between(before: str, after: str) -> tuple[str, ...] | None:
    """What to put between two cuttings so that they are encoded as if they stood alone; None where nothing serves."""
    put: tuple[str, ...] = ()
    if _ENDS_IN_MARKS.search(before[-2:]):
        put = ("x",)
    elif before[-1] in " \n\t":
        put = (" x",)
    elif not _ENDS_IN_WORD.search(before[-1:]):
        return None
    if _BEGINS_OTHERWISE.match(after):
        return put
    return (*put, "._") if _BEGINS_WITH_LETTER.match(after) else None
