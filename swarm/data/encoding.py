"""Documents encoded on all cores, in order: threads do, as neither kernels nor `tokenizers` hold the interpreter."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.data.tokenizer import Tokenizer

T = TypeVar("T")

BATCH_CHARACTERS = 1 << 21
"""Of documents that are encoded together."""

Ids = npt.NDArray[np.integer]


class Encoded(NamedTuple, Generic[T]):
    about: T
    """What was given with the document."""
    text: str
    ids: Ids


def encoded(documents: Iterable[tuple[T, str]], tokenizer: Tokenizer) -> Iterator[Encoded[T]]:
    """Ids of each document, in order."""
    batches = _batches(documents)
    for batch in islice(batches, 1):  # by itself: of the first texts a tokenizer finds out how it encodes the others
        yield from _together(batch, tokenizer.encode_documents(_texts(batch)))
    count = os.cpu_count() or 1
    waiting: deque[tuple[list[tuple[T, str]], Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(count) as threads:
        try:
            while True:
                for batch in islice(batches, 2 * count - len(waiting)):
                    waiting.append((batch, threads.submit(tokenizer.encode_documents, _texts(batch))))
                if not waiting:
                    return
                batch, future = waiting.popleft()
                yield from _together(batch, future.result())
        finally:
            for _, future in waiting:
                future.cancel()


def _texts(batch: list[tuple[T, str]]) -> list[str]:
    return [text for _, text in batch]


def _together(batch: list[tuple[T, str]], found: list[Ids]) -> Iterator[Encoded[T]]:
    for (about, text), ids in zip(batch, found, strict=True):
        yield Encoded(about, text, ids)


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
