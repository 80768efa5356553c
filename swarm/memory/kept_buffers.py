"""Memory that bodies are received or encoded into, used again.

A fresh page costs its first writer some microseconds on a virtual machine, more than decryption and the copy out of the
kernel together, or than encoding what is put there; and what one round fills, a later one needs again, once nobody can
ask for it any more. So bodies of whatever size share slabs of huge pages. A body's memory comes back by itself when the
last view of it is gone, whoever held it.
"""

import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from swarm.core.plan import FLOAT_BYTES, KEPT_FOR_MESSAGES_BYTES
from swarm.memory.free_extents import FreeExtents

UNIT_BYTES = 64 << 10
"""Bodies take multiples of this; smaller ones get memory of their own."""
SLAB_BYTES = 64 << 20
"""Address space that is asked for at once; only what is written to becomes memory."""


class KeptBuffers:
    """Memory for bodies. Their last views may die in any thread, also while one of these methods runs in it."""

    def __init__(self, most_kept_bytes: int = KEPT_FOR_MESSAGES_BYTES) -> None:
        """Beyond so many free bytes memory goes back to the system."""
        self._most_kept_bytes = most_kept_bytes
        self._slabs: list[tuple[int, mmap.mmap, NDArray[np.uint8]]] = []
        """By the place of their first byte. Between two of them a byte is missing: no body lies in both."""
        self._end = 0
        self._kept, self._given_back = FreeExtents(), FreeExtents()
        self._coming_back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Free memory."""
        self._sort_in()
        return self._kept.total

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory for one body, of whatever content, which nobody else holds."""
        if num_bytes < UNIT_BYTES:
            return np.empty(num_bytes, np.uint8).data
        size = -(-num_bytes // UNIT_BYTES) * UNIT_BYTES
        with self._lock:
            self._sort()
            start = self._kept.take(size)
            if start is None:
                start = self._given_back.take(size)
            if start is None:
                start = self._new_slab(size)
            first, _, memory = self._slab_of(start)
        body = memory[start - first : start - first + num_bytes]
        weakref.finalize(body, self._comes_back, start, size).atexit = False
        return body.data

    def give_back(self) -> None:
        """All that is free goes back to the system now."""
        with self._lock:
            self._sort()
            while self._kept.total:
                start, size = self._kept.take_largest()
                self._goes_back(start, size)

    def _comes_back(self, start: int, size: int) -> None:
        self._coming_back.append((start, size))
        self._sort_in()

    def _sort_in(self) -> None:
        """What came back is free. Who cannot do it now leaves it to whoever is at it."""
        while self._coming_back and self._lock.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._lock.release()

    def _sort(self) -> None:
        while self._coming_back:
            start, size = self._coming_back.popleft()
            if self._kept.total + size <= self._most_kept_bytes:
                self._kept.add(start, size)
            else:
                self._goes_back(start, size)

    def _goes_back(self, start: int, size: int) -> None:
        """To the system, which gives other pages when these are written to again."""
        first, slab, _ = self._slab_of(start)
        if hasattr(mmap, "MADV_DONTNEED"):
            slab.madvise(mmap.MADV_DONTNEED, start - first, size)
        self._given_back.add(start, size)

    def _new_slab(self, size: int) -> int:
        """Where `size` bytes of it lie; the rest is free."""
        first, length = self._end, max(size, SLAB_BYTES)
        slab = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        self._slabs.append((first, slab, np.frombuffer(slab, np.uint8)))
        self._end = first + length + 1
        if length > size:
            self._given_back.add(first + size, length - size)
        return first

    def _slab_of(self, start: int) -> tuple[int, mmap.mmap, NDArray[np.uint8]]:
        return self._slabs[bisect_right(self._slabs, start, key=lambda slab: slab[0]) - 1]


BUFFERS = KeptBuffers()
"""The process's own."""


def empty_floats(num_values: int, buffers: KeptBuffers = BUFFERS) -> NDArray[np.float32]:
    """As `np.empty`, of `buffers`."""
    return np.frombuffer(buffers.take(FLOAT_BYTES * num_values), dtype=np.float32)
