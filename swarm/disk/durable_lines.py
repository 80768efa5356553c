"""A small file of lines that outlives a crash: what was said to be written is on the disk."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from swarm.disk.whole_file import whole_file


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """The file holds these lines (without their ends), or still what it held before. Its folder must exist."""
    with whole_file(path) as partial, partial.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """The file ends with this line; after a crash perhaps with a part of it. If the disk is full, as it did before."""
    with path.open("ab", buffering=0) as file:
        start, left = file.tell(), memoryview(f"{line}\n".encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # else the next line would go on where this one broke off
                file.truncate(start)
            raise
