"""Documents encoded on all cores, in order: a process beside this one for each core, where there is enough to do.

A process of ours is given length and text of each document, and answers with count and ids of each. It ends when what
it reads from ends, however this one ends.
"""

import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue
from typing import IO, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.core.errors import LocalError
from swarm.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from swarm.local.compute_pools import bound_pools

T = TypeVar("T")

BATCH_CHARACTERS = 1 << 21
"""Of documents that are encoded together."""
IN_PROCESS_CHARACTERS = 4 * BATCH_CHARACTERS
"""As much is encoded before it is worth to begin processes."""
_COUNT = struct.Struct("<q")

Ids = npt.NDArray[np.integer]


class Encoded(NamedTuple, Generic[T]):
    about: T
    """What was given with the document."""
    text: str
    ids: Ids


def encoded(documents: Iterable[tuple[T, str]], name: str, tokenizer: Tokenizer) -> Iterator[Encoded[T]]:
    """Ids of each document, in order, by the tokenizer called `name`.

    Raises LocalError if a process of ours dies.
    """
    batches, left = _batches(documents), IN_PROCESS_CHARACTERS
    for batch in batches:
        texts = [text for _, text in batch]
        yield from _together(batch, tokenizer.encode_documents(texts))
        left -= sum(map(len, texts))
        if left <= 0 and name != BYTES:  # bytes are copied as fast as they are read
            break
    else:
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(name)) for _ in range(os.cpu_count() or 1)]
        free: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            free.put(worker)

        def encode(texts: list[str]) -> list[Ids]:
            worker = free.get()
            try:
                return worker.encode(texts)
            finally:
                free.put(worker)

        threads = stack.enter_context(ThreadPoolExecutor(len(workers)))
        yield from _in_order(batches, threads, encode, at_once=2 * len(workers))


def _in_order(
    batches: Iterator[list[tuple[T, str]]],
    threads: ThreadPoolExecutor,
    encode: Callable[[list[str]], list[Ids]],
    *,
    at_once: int,
) -> Iterator[Encoded[T]]:
    waiting: deque[tuple[list[tuple[T, str]], Future[list[Ids]]]] = deque()
    try:
        while True:
            for batch in islice(batches, at_once - len(waiting)):
                waiting.append((batch, threads.submit(encode, [text for _, text in batch])))
            if not waiting:
                return
            batch, future = waiting.popleft()
            yield from _together(batch, future.result())
    finally:
        for _, future in waiting:
            future.cancel()


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


class _Worker:
    """A process that encodes."""

    def __init__(self, name: str) -> None:
        # One core each: the tokenizer's own threads would be in each other's way.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        bound_pools(1, environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "swarm.data.encoding", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def encode(self, texts: list[str]) -> list[Ids]:
        """Blocks. Raises LocalError if the process is no more."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        try:
            asked.write(_framed([text.encode() for text in texts]))
            asked.flush()
            return [np.frombuffer(ids, "<u4") for ids in _read(answers)]
        except (OSError, EOFError) as error:
            raise LocalError(f"a process that encodes text has ended with {self._process.poll()}") from error


def _framed(parts: list[bytes]) -> bytes:
    lengths = b"".join(_COUNT.pack(len(part)) for part in parts)
    return b"".join([_COUNT.pack(len(parts)), lengths, *parts])


def _read(file: IO[bytes]) -> list[bytes]:
    (count,) = _COUNT.unpack(_exactly(file, _COUNT.size))
    lengths = np.frombuffer(_exactly(file, _COUNT.size * count), "<i8")
    return [_exactly(file, int(length)) for length in lengths]


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError
    return data


def _serve(name: str) -> None:
    """Encode what comes, until nothing does."""
    tokenizer = load_tokenizer(name)
    while True:
        try:
            texts = [text.decode() for text in _read(sys.stdin.buffer)]
        except EOFError:
            return
        found = tokenizer.encode_documents(texts)
        sys.stdout.buffer.write(_framed([ids.astype("<u4").tobytes() for ids in found]))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
