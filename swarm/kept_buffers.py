"""This is where the memory that bodies are received or encoded into is used again.

A fresh page costs its first writer some microseconds on a virtual machine, more than decryption and the copy out of the
kernel together, or than encoding what is put there; and what one round fills, the next one needs again. A buffer comes
back by itself when the last view of it is gone, whoever held it.
"""

import threading
import weakref
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from swarm.core.plan import KEPT_FOR_MESSAGES_BYTES

CLASS_BYTES = 64 << 10
"""Buffers are multiples of this; smaller bodies get memory of their own."""


class KeptBuffers:
    """Free buffers by size. Views may die in any thread."""

    def __init__(self, most_kept_bytes: int = KEPT_FOR_MESSAGES_BYTES) -> None:
        """Beyond so many free bytes memory goes back."""
        self._most_kept_bytes = most_kept_bytes
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory for one body, of whatever content, which nobody else holds."""
        if num_bytes < CLASS_BYTES:
            return np.empty(num_bytes, np.uint8).data
        size = -(-num_bytes // CLASS_BYTES) * CLASS_BYTES
        with self._lock:
            whole = self._free[size].pop() if self._free.get(size) else None
            self._kept_bytes -= size if whole is not None else 0
        if whole is None:
            # Not a bytearray: its zeroing takes longer than the transfer, and makes announced bytes cost memory now.
            whole = np.empty(size, np.uint8)
        body = whole[:num_bytes]
        weakref.finalize(body, self._give_back, whole).atexit = False
        return body.data

    def _give_back(self, whole: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._kept_bytes + whole.size <= self._most_kept_bytes:
                self._free[whole.size].append(whole)
                self._kept_bytes += whole.size


BUFFERS = KeptBuffers()
"""The process's own."""


def empty_floats(num_values: int) -> NDArray[np.float32]:
    """As `np.empty`, from `BUFFERS`."""
    return np.frombuffer(BUFFERS.take(4 * num_values), dtype=np.float32)
