"""A file read as memory: what is used of it comes from disk then, and it may be larger than memory."""

from mmap import ACCESS_READ, mmap
from pathlib import Path


def mapped(path: Path) -> memoryview:
    """Its bytes, also after it is removed. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ) if path.stat().st_size else b"")
