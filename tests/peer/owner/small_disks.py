"""A disk of its own for a peer in a test, so small that it can be filled. Needs root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SIZE_MIB = 8
"""For the tokens, four states of a quarter of a MiB, and the logs."""


def _mount(folder: Path) -> str:
    options = ["-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
    return subprocess.run(["mount", *options], capture_output=True, text=True, check=False).stderr.strip()


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def why_not(folder: Path) -> str | None:
    """Why disks cannot be made here; None if they can. `folder` is made and used."""
    if os.geteuid() != 0:
        return "a disk of its own needs root"
    folder.mkdir()
    refused = _mount(folder)
    if refused:
        return f"a disk of its own cannot be mounted here: {refused}"
    _unmount(folder)
    return None


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    refused = _mount(folder)
    assert not refused, refused
    try:
        yield folder
    finally:
        _unmount(folder)


def fill(disk: Path) -> Path:
    """No byte is left; the file that takes them."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast
