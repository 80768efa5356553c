"""Documents packed whole into samples, as they lie in a token file.

Each goes into the open sample that it fits best (Ding et al., "Fewer Truncations Improve Language Modeling",
arXiv 2404.10830); one that is longer than a sample is cut after each sample's length. So no sample begins within what
another one's attention sees, and few tokens are padding. It is a function of the documents and their order alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from swarm.core.pipeline.targets import most_documents
from swarm.data.documents.marks import Marks, Values
from swarm.data.token_file import TokenWriter

OPEN_TOKENS = 1 << 18
"""Of samples that wait for more documents; at most MOST_OPEN of them."""
MOST_OPEN = 256


class DocumentWriter:
    """Writes documents, marked as the run wants them: one after another, or packed into samples."""

    def __init__(self, file: TokenWriter, marks: Marks, sequence_length: int, *, padding: int) -> None:
        self.file = file
        self._marks = marks
        self._length = sequence_length
        self._padding = padding
        self._most_open = max(1, min(MOST_OPEN, OPEN_TOKENS // sequence_length))
        self._most_documents = most_documents(sequence_length) - 1  # the padding is one
        self._open: list[tuple[int, int]] = []
        """Samples by the room that is left in them, least first, and then by number."""
        self._samples: dict[int, list[Values]] = {}
        self._number = 0

    def write(self, values: Values) -> int:
        """A document. Returns how many targets it has: what has none is left out."""
        if not self._marks.documents:
            self.file.write(values)
            return len(values)
        count = 0
        for piece in self._pieces(values):
            targets = int(self._marks.learnt(piece).sum())
            if targets:
                self._place(piece)
            count += targets
        return count

    def flush(self) -> None:
        """Write the samples that wait for more."""
        while self._open:
            self._finish(self._open.pop(0)[1])

    def _pieces(self, values: Values) -> Iterator[Values]:
        for start in range(0, len(values), self._length):
            piece = values[start : start + self._length].copy()
            piece[0] |= 1
            yield piece

    def _place(self, piece: Values) -> None:
        at = bisect_left(self._open, (len(piece), -1))
        if at < len(self._open):
            room, number = self._open.pop(at)
        else:
            room, number = self._length, self._number
            self._number += 1
            self._samples[number] = []
        self._samples[number].append(piece)
        room -= len(piece)
        if room < 2 or len(self._samples[number]) >= self._most_documents:
            self._finish(number)
            return
        insort(self._open, (room, number))
        if len(self._open) > self._most_open:
            self._finish(self._open.pop(0)[1])

    def _finish(self, number: int) -> None:
        pieces = self._samples.pop(number)
        missing = self._length - sum(map(len, pieces))
        self.file.write(np.concatenate([*pieces, self._marks.padding(missing, self._padding)]))
