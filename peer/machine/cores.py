"""The cores of a machine as its daemons share them: some keep to a number of their own, the others count each other.

A core is claimed by a lock on its own folder in sysfs, so daemons of one machine take different cores, and a claim ends
with its process. A seat, by which those without a number of their own are counted, is a lock on another folder there.
"""

import contextlib
import fcntl
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

CPUS = Path("/sys/devices/system/cpu")
LAYERS = ("", "topology", "cache")
"""Folders of each core; once all cores are claimed in one, the next daemons claim them in the next."""

SEATS = "power"
"""The folder of each core that is a seat."""

_claims: list[int] = []
"""Descriptors of the locks, held until this process ends."""


def claim_cores(count: int) -> tuple[int, ...]:
    """Bind this process, and those it starts, to `count` cores; none where the system cannot (macOS, Windows).

    Those that are free, from any on: who has a /sys of its own, as in a container, sees no others' claims.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = usable_cores()
    if count >= len(allowed):
        for core in allowed:
            _claim(CPUS / f"cpu{core}")
        return allowed
    chosen: list[int] = []
    start = random.SystemRandom().randrange(len(allowed))
    from_any_on = allowed[start:] + allowed[:start]  # neighbours in number are seldom one core's two threads
    for layer in LAYERS:
        for core in from_any_on:
            if len(chosen) < count and core not in chosen and _claim(CPUS / f"cpu{core}" / layer):
                chosen.append(core)
    chosen += [core for core in from_any_on if core not in chosen][: count - len(chosen)]
    os.sched_setaffinity(0, chosen)
    log.info("running on cores %s of %s", sorted(chosen), allowed)
    return tuple(sorted(chosen))


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Seen:
    """Who shares the cores of a machine with a daemon."""

    claimed: int
    """Cores that daemons with a number of their own keep to."""
    daemons: int
    """Without one: this daemon, and others who have a seat."""
    rank: int
    """Of this daemon among them."""


class Seat:
    """One daemon's place among those that share `cores`; there are as many seats as cores.

    Who finds none knows that there are more daemons than cores, and may get one when another ends.
    """

    def __init__(self, cores: Sequence[int], *, cpus: Path = CPUS) -> None:
        self._folders = [cpus / f"cpu{core}" for core in cores]
        self._mine: int | None = None
        self._descriptor = -1

    def look(self) -> Seen | None:
        """Sit down if this daemon has no seat, and count; None where cores have no such folders (macOS, Windows)."""
        if not all((folder / SEATS).is_dir() for folder in self._folders):
            return None
        for place, folder in enumerate(self._folders):
            if self._mine is None and (descriptor := _locked(folder / SEATS, fcntl.LOCK_EX)) is not None:
                self._mine, self._descriptor = place, descriptor
        taken = [
            place for place, folder in enumerate(self._folders) if self._mine != place and _is_held(folder / SEATS)
        ]
        rank = len(taken) if self._mine is None else sum(1 for place in taken if place < self._mine)
        return Seen(sum(1 for folder in self._folders if _is_held(folder)), len(taken) + 1, rank)

    def close(self) -> None:
        """Stand up; the end of the process does as much."""
        if self._mine is not None:
            os.close(self._descriptor)
            self._mine = None


def _claim(folder: Path) -> bool:
    descriptor = _locked(folder, fcntl.LOCK_EX)
    if descriptor is None:
        return False
    _claims.append(descriptor)
    return True


def _is_held(folder: Path) -> bool:
    """Whether somebody has locked it for himself."""
    descriptor = _locked(folder, fcntl.LOCK_SH)  # two who look at once do not see each other
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None and folder.is_dir()


def _locked(folder: Path, how: int) -> int | None:
    """A descriptor that holds the lock, unless somebody else does or there is no such folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None
