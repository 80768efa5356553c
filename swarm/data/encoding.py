"""Documents encoded on all cores, in order: threads do, as neither kernels nor `tokenizers` hold the interpreter."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from swarm.data.documents.marks import Marks, Values
from swarm.data.tokenizer import Tokenizer

T = TypeVar("T")

BATCH_CHARACTERS = 1 << 21
"""Of documents that are encoded together."""


class Encoder(Protocol):
    """Documents to tokens as they stand in a run's files."""

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Values | str]:
        """Of each; a text is why one is left out."""


class TextEncoder:
    """Every token is to be learnt."""

    def __init__(self, tokenizer: Tokenizer, marks: Marks) -> None:
        self._tokenizer = tokenizer
        self._marks = marks

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Values | str]:
        return [self._marks.values(ids) for ids in self._tokenizer.encode_documents(texts)]


class Encoded(NamedTuple, Generic[T]):
    about: T
    """What was given with the document."""
    text: str
    values: Values | str
    """Why it is left out, if it is a text."""


def encoded(documents: Iterable[tuple[T, str]], encoder: Encoder) -> Iterator[Encoded[T]]:
    """Tokens of each document, in order."""
    batches = _batches(documents)
    for batch in islice(batches, 1):  # by itself: of the first texts a tokenizer finds out how it encodes the others
        yield from _together(batch, encoder.encode_documents(_texts(batch)))
    count = os.cpu_count() or 1
    waiting: deque[tuple[list[tuple[T, str]], Future[Sequence[Values | str]]]] = deque()
    with ThreadPoolExecutor(count) as threads:
        try:
            while True:
                for batch in islice(batches, 2 * count - len(waiting)):
                    waiting.append((batch, threads.submit(encoder.encode_documents, _texts(batch))))
                if not waiting:
                    return
                batch, future = waiting.popleft()
                yield from _together(batch, future.result())
        finally:
            for _, future in waiting:
                future.cancel()


def _texts(batch: list[tuple[T, str]]) -> list[str]:
    return [text for _, text in batch]


def _together(batch: list[tuple[T, str]], found: Sequence[Values | str]) -> Iterator[Encoded[T]]:
    for (about, text), values in zip(batch, found, strict=True):
        yield Encoded(about, text, values)


def _batches(documents: Iterable[tuple[T, str]]) -> Iterator[list[tuple[T, str]]]:
    batch, size = list[tuple[T, str]](), 0
    for about, text in documents:
        batch.append((about, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
