"""A full disk, told apart from a broken one: it is waited for, since others fill and empty it too."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from swarm.core.errors import DiskFullError, LocalError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def full_disk(of: Path) -> DiskFullError:
    """What is raised where the disk of a file or folder took no more."""
    return DiskFullError(f"the disk of {of} is full: make room there")


@contextlib.contextmanager
def disk_room(folder: Path) -> Iterator[None]:
    """Raises DiskFullError where the disk of `folder` took no more, LocalError where it failed otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise full_disk(folder) from error
        if error.errno is None:  # a deadline's TimeoutError
            raise
        raise LocalError(f"{folder}: the disk, or something else of this machine, failed: {error}") from error
