"""Byte-level BPE many times faster: a text is cut where no token can reach across, and each cutting is encoded once.

A tokenizer of this family first splits a text by a regular expression and then encodes each split by itself. In all
the expressions below a split ends

* after a letter or digit before an ASCII character that is none, and begins no contraction,
* before the last space of white space before something visible that is no digit,
* between two characters that are no letters, digits or apostrophes, or one after a space, and a letter

(`kernels/cuttings.py` cuts there).

Nothing in them looks back, and what looks ahead does so behind white space only, where it finds the same. So a text's
ids are those of its cuttings, end to end; and as few cuttings make up most of a language, most are known already.

References: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for the expression of GPT-2;
the others are those of Llama 3, Qwen 2 and GPT-4.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import cuttings as kernel
from swarm.data.known_cuttings import CutText, KnownCuttings

MAX_KNOWN = 1 << 21
"""Cuttings that are remembered; then all are forgotten. Some hundreds of MB."""
ENCODED_TOGETHER = 1 << 12
"""Characters of cuttings that are new, in one call."""
SHORT = 32
"""Bytes of a text's cuttings, on the average, above which they are not worth remembering."""
MAX_TEXT_BYTES = 1 << 26
"""Of a text that is cut: cutting takes 12 bytes of memory for each."""

_WORD = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-ΡΣ-Ωα-ωЀ-ҁ"  # Of those that are letters in every version of Unicode.
_LETTER = _WORD.removeprefix("0-9")
_MARK = r"!-&(-/:-@\[-`{-~"
_ASCII = r"\x00-/:-@\[-`{-\x7f"
_ENDS_IN_WORD = re.compile(rf"[{_WORD}]\Z")
_ENDS_IN_MARKS = re.compile(rf"[ {_MARK}][{_MARK}]\Z")
_BEGINS_OTHERWISE = re.compile(r"[\x00-&(-/:-@\[-`{-\x7f]")
_BEGINS_WITH_LETTER = re.compile(rf"[{_LETTER}]")
_OF_CLASS = {
    kernel.WORD: _WORD,
    kernel.LETTER: _LETTER,
    kernel.ASCII: _ASCII,
    kernel.MARK: _MARK,
    kernel.SPACE: " ",
    kernel.BLANK: r" \n\t",
    kernel.CONTRACTION: "stmdrvlSTMDRVL",
}
_BESIDE_SPACE = kernel.SPACE | kernel.BLANK
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
        self._classes = _classes()
        self._across: dict[str, list[str]] = {}
        """Tokens that are no white space, by their first two characters: texts with one are encoded whole."""
        self._cuts_at_spaces = True
        for number, token in added.items():
            self._num_bytes[number] = len(token.content.encode())
            if token.content.isspace() and not (token.lstrip or token.rstrip or token.single_word):
                self._cuts_at_spaces = False
            else:
                self._across.setdefault(token.content[:2], []).append(token.content)
        if not self._cuts_at_spaces:
            self._classes &= ~_BESIDE_SPACE
        self._known = KnownCuttings()
        self._learning = Lock()

    def encode(self, texts: Sequence[str]) -> list[Ids | None]:
        """Of each text; None where it is to be encoded whole. Several threads may call it."""
        known = self._known
        while True:
            cut = [self._cut(text, known) for text in texts]
            new = [[] if one is None else one.unknown() for one in cut]
            if not any(new):
                break
            learnt = self._learn(known, list(dict.fromkeys(cutting for of_text in new for cutting in of_text)))
            if learnt is None:
                return [None] * len(texts)
            known, numbers = learnt
            if numbers:
                for one, of_text in zip(cut, new, strict=True):
                    if one is not None and of_text:
                        one.which[one.which < 0] = [numbers[cutting] for cutting in of_text]
                break
        return [None if one is None else known.ids_of(one.which) for one in cut]

    def cuttings(self, text: str) -> list[str]:
        """None of them where it is to be encoded whole."""
        found = self._cut(text, self._known)
        return [] if found is None else [cutting.decode() for cutting in found.cuttings()]

    def _cut(self, text: str, known: KnownCuttings) -> CutText | None:
        if any(first in text and any(token in text for token in tokens) for first, tokens in self._across.items()):
            return None
        if self._normal_form_only and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return None
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:
            return None
        found = known.cut(data, self._classes)
        return found if len(data) <= SHORT * len(found.ends) else None

    def _learn(self, known: KnownCuttings, cuttings: list[bytes]) -> tuple[KnownCuttings, dict[bytes, int]] | None:
        """What knows them all, and their numbers there; no numbers where those of `known` were forgotten meanwhile.

        None, and nothing is learnt, where tokens do not say how many bytes they stand for.
        """
        with self._learning:
            if len(self._known) > MAX_KNOWN:
                self._known = KnownCuttings()
            if self._known.forebear is not known.forebear:
                return self._known, {}
            numbers = dict(zip(cuttings, self._known.numbers_of(cuttings).tolist(), strict=True))
            new = [cutting for cutting, number in numbers.items() if number < 0]
            if new:
                found = self._encoded(new)
                if found is None:
                    return None
                numbers |= zip(new, range(len(self._known), len(self._known) + len(new)), strict=True)
                self._known = self._known.more(new, *found)
            return self._known, numbers

    def _encoded(self, cuttings: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
        """How many ids each has, and all ids end to end."""
        texts, joined = [""], list[str]()
        is_new = list[bool]()
        for cutting in (one.decode() for one in cuttings):
            between = self._between(joined[-1], cutting) if joined and len(texts[-1]) < ENCODED_TOGETHER else None
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
            return None
        counts = np.diff(last, prepend=-1)
        return counts[is_new], ids[np.repeat(is_new, counts)]

    def _between(self, before: str, after: str) -> tuple[str, ...] | None:
        """What to put between two cuttings so that each is encoded as if alone; None where nothing serves."""
        put: tuple[str, ...] = ()
        if _ENDS_IN_MARKS.search(before[-2:]):
            put = ("x",)
        elif before[-1] in " \n\t":
            if not self._cuts_at_spaces:
                return None
            put = (" x",)
        elif not _ENDS_IN_WORD.search(before[-1:]):
            return None
        if _BEGINS_OTHERWISE.match(after):
            return put
        return (*put, "._") if _BEGINS_WITH_LETTER.match(after) else None


def _classes() -> npt.NDArray[np.uint8]:
    """Of the code points up to the last that has one."""
    patterns = {bit: re.compile(f"[{characters}]") for bit, characters in _OF_CLASS.items()}
    last = max(map(ord, _WORD))
    return np.array(
        [sum(int(bit) for bit, of_class in patterns.items() if of_class.match(chr(code))) for code in range(last + 1)],
        np.uint8,
    )
