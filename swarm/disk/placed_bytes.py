"""Bytes at a place in a file."""

import os


def write_at(descriptor: int, at: int, body: bytes | bytearray | memoryview) -> int:
    """All of them; where they end. Raises OSError: a full disk is told of here, and not to whoever reads the hole."""
    left = memoryview(body).cast("B")
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written
    return at
