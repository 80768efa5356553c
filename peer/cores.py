"""This is where a daemon keeps to its number of cores: it runs on so many and no others, whatever its threads do.

A core is claimed by a lock on its own folder in sysfs, so daemons of one machine take different cores, and a claim ends
with its process.
"""

import contextlib
import fcntl
import logging
import os
import random
from pathlib import Path

log = logging.getLogger(__name__)

CPUS = Path("/sys/devices/system/cpu")
LAYERS = ("", "topology", "cache", "power")
"""Folders of each core; once all cores are claimed in one, the next daemons claim them in the next."""

_claims: list[int] = []
"""Descriptors of the locks, held until this process ends."""


def claim_cores(count: int) -> tuple[int, ...]:
    """Bind this process, and those it starts, to `count` cores; none where the system cannot (macOS, Windows)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    if count >= len(allowed):
        return tuple(allowed)
    chosen: list[int] = []
    for layer in LAYERS:
        for core in allowed:
            if len(chosen) < count and core not in chosen and _claim(CPUS / f"cpu{core}" / layer):
                chosen.append(core)
    rest = [core for core in allowed if core not in chosen]
    chosen += random.SystemRandom().sample(rest, count - len(chosen))
    os.sched_setaffinity(0, chosen)
    log.info("running on cores %s of %s", sorted(chosen), allowed)
    return tuple(sorted(chosen))


def _claim(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            _claims.append(descriptor)
            return True
    return False
