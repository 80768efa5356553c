"""This is where a small file of lines outlives a crash: what was said to be written is on the disk."""

import os
from collections.abc import Iterable
from pathlib import Path


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """The file holds these lines (without their ends), or still what it held before. Its folder must exist."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_line(path: Path, line: str) -> None:
    """The file ends with this line, whole or, after a crash, in part."""
    with path.open("a") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())
