"""What memory this process could still take: of the machine, or of what a container or a service leaves it."""

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
    return min([int(psutil.virtual_memory().available), *_left_by_groups(own_groups, groups)])


def _left_by_groups(own_groups: Path, groups: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                yield from _left(groups, place, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield from _left(groups / "memory", place, *names)


def _left(root: Path, place: str, limit: str, used: str, of_files: str) -> Iterator[int]:
    """By the group at the place and each above it; in a container its own is the root."""
    own = root / place.strip("/")
    for group in (own, *own.parents) if own.is_dir() else (root,):
        with contextlib.suppress(OSError, ValueError):  # the root has no limit, "max" is none
            most = int((group / limit).read_text())
            given_back = re.search(rf"^{of_files} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            held = int((group / used).read_text()) - (int(given_back[1]) if given_back else 0)
            yield max(0, most - held)
        if group == root:
            return
