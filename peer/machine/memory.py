"""What memory this process could take: of the machine, or of what a container or a service leaves it."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

OWN_GROUPS = Path("/proc/self/cgroup")
"""Of each hierarchy of control groups, which one this process is in: `number:controllers:/path`, the second version's
without controllers."""
GROUPS = Path("/sys/fs/cgroup")


def free_bytes(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """Without what is held of files and can be given back. Control groups of both versions are heeded, and those above
    them; where there are none, or they say nothing, the machine alone."""
    left = (max(0, most - held) for most, held in _of_groups(own_groups, groups))
    return min([int(psutil.virtual_memory().available), *left])


def most_bytes(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """If nobody else held any."""
    return min([int(psutil.virtual_memory().total), *(most for most, _ in _of_groups(own_groups, groups))])


def _of_groups(own_groups: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """The most that each may hold, and what it holds."""
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                yield from _most_and_held(groups, place, "memory.max", "memory.current", "(in)?active_file")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_(in)?active_file"
                yield from _most_and_held(groups / "memory", place, *names)


def _most_and_held(root: Path, place: str, limit: str, used: str, of_files: str) -> Iterator[tuple[int, int]]:
    """By the group at the place and each above it; in a container its own is the root.

    `of_files`: names in its statistics. Files that were read twice are active, and given back all the same, as the
    system counts what is available: a peer that has mapped a base, and comes back, would never fit in again.
    """
    own = root / place.strip("/")
    for group in (own, *own.parents) if own.is_dir() else (root,):
        with contextlib.suppress(OSError, ValueError):  # the root has no limit, "max" is none
            most = int((group / limit).read_text())
            given_back = re.finditer(rf"^{of_files} (?P<size>\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            held = int((group / used).read_text()) - sum(int(found["size"]) for found in given_back)
            yield most, held
        if group == root:
            return
