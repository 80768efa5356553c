"""What a daemon's peers take of memory and disk, all of them together: each is fitted in beside the others."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peer.machine.load import folder_bytes
from peer.machine.memory import free_bytes, most_bytes
from peer.owner.limits import GIB, VolunteerSettings, limit_gpu, own_bytes, started_bytes, used_bytes
from swarm.core.errors import NotFreeError, SettingsError
from swarm.core.ids import PeerId
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.plan import ONCE_A_MACHINE

log = logging.getLogger(__name__)

SETTLE_S = 10.0
"""After one peer has gone for the memory that it held, no other is asked to for so long."""

Items = Mapping[str, int]
"""Bytes by what they are for; names are those of `swarm.core.plan`."""


@dataclass(frozen=True)
class _Taken:
    stage: int
    by_place: dict[str, dict[str, int]]
    """At the host, but for libraries and p2pd, on the device and on disk."""


class Room:
    """Of one daemon. Its methods are for any thread."""

    def __init__(self, folder: Path, *, memory_bytes: int | None, disk_bytes: int | None, num_p2pd: int = 1) -> None:
        """`memory_bytes`, `disk_bytes`: the most that all may take; None: what is free when one comes. `num_p2pd`: of
        all peers, and of a relay."""
        self._folder = folder
        self._memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        """May be replaced at any time."""
        self._num_p2pd = num_p2pd
        self._taken: dict[PeerId, _Taken] = {}
        """In the order in which they came."""
        self._libraries_bytes = 0
        """What the process held before any peer was there: the least that was seen while there was none, or one alone
        that may have held some of its last stage yet."""
        self._settled_at = float("-inf")
        self._lock = threading.Lock()

    def first_that_fits(
        self,
        who: PeerId,
        stage: int,
        choices: Iterable[ComputeMode],
        items: Callable[[ComputeMode], Items],
        volunteer: VolunteerSettings,
        *,
        held_bytes: int = 0,
    ) -> ComputeMode:
        """Of the ways to compute, of which each next one needs less memory. Raises SettingsError as `take` if none."""
        refusal: SettingsError | None = None
        for mode in choices:
            try:
                self.take(who, stage, items(mode), volunteer, held_bytes=held_bytes)
            except SettingsError as error:
                refusal = error
            else:
                return mode
        assert refusal is not None, "no way to compute was named"
        raise refusal

    def take(self, who: PeerId, stage: int, items: Items, volunteer: VolunteerSettings, *, held_bytes: int = 0) -> None:
        """A peer's place at a stage, instead of any that it had. Raises SettingsError, item by item, unless it fits:
        NotFreeError if it would without what others hold of the machine.

        All libraries must be loaded: what they take here counts in the place of what `items` suppose. `held_bytes`:
        what the disk items take of the disk already. What else is in the folder counts for the owner's limit too.
        """
        by_place: dict[str, dict[str, int]] = {"host": {}, "device": {}, "disk": {}}
        for name, size in items.items():
            place, _, what = name.partition(".")
            by_place[place][what] = size
        by_place["host"].pop("libraries", None)
        p2pd = self._num_p2pd * by_place["host"].pop("p2pd", 0)
        taken = _Taken(stage, by_place)
        with self._lock:
            self._check_memory(by_place["host"], p2pd, self._others(who, "host", taken))
            self._folder.mkdir(parents=True, exist_ok=True)
            on_disk, limit = shutil.disk_usage(self._folder), self.disk_bytes
            elsewhere = 0 if limit is None else max(0, folder_bytes(self._folder) - held_bytes)
            disk = by_place["disk"] | _named("the other peers", self._others(who, "disk", taken))
            disk |= _named(f"what else is in {self._folder}, where you may delete other runs,", elsewhere)
            _check("disk", "--disk-gib", disk, limit, on_disk.free + held_bytes + elsewhere, on_disk.total)
            if volunteer.gpu is not None:
                limit, device = volunteer.gpu_memory_bytes, by_place["device"]
                _check("GPU memory", "--gpu-memory-gib", device, limit, *limit_gpu(volunteer.gpu, limit))
            self._taken[who] = taken

    def leave(self, who: PeerId) -> None:
        """The peer is gone, or never came."""
        with self._lock:
            if self._taken.pop(who, None) is not None:
                self._settled_at = time.monotonic() + SETTLE_S

    def asks_to_leave(self, who: PeerId) -> str:
        """Why the peer has to go: of all that hold more memory than they may together, the one that came last. Empty
        if it may stay."""
        with self._lock:
            limit = self._memory_bytes
            if limit is None or next(reversed(self._taken), None) != who or time.monotonic() < self._settled_at:
                return ""
            used = used_bytes()
            holds = f"this daemon holds {used / GIB:.2f} GiB, more than --memory {limit / GIB:.2f}"
            return f"{holds}: this peer leaves" if used > limit else ""

    def _others(self, who: PeerId, place: str, own: _Taken) -> int:
        """Bytes that the other peers may come to need there, besides what all of a stage have once."""
        total, counted = 0, {(name, own.stage) for name in own.by_place[place]}
        for peer, taken in self._taken.items():
            for name, size in taken.by_place[place].items() if peer != who else ():
                if name in ONCE_A_MACHINE:
                    if (name, taken.stage) in counted:
                        continue
                    counted.add((name, taken.stage))
                total += size
        return total

    def _check_memory(self, items: Items, p2pd_bytes: int, others_bytes: int) -> None:
        own = own_bytes()
        if not others_bytes:
            self._libraries_bytes = min(own, self._libraries_bytes or own)
        libraries = max(self._libraries_bytes, own - others_bytes)
        p2pd = max(p2pd_bytes, started_bytes())
        items = {"libraries": libraries, "p2pd": p2pd, **items, **_named("the other peers", others_bytes)}
        _check("memory", "--memory", items, self._memory_bytes, free_bytes() + used_bytes(), most_bytes())
        log.info("at most %.3f GiB of memory: %s", sum(items.values()) / GIB, _table(items))


def _named(name: str, size: int) -> dict[str, int]:
    return {name: size} if size else {}


def _table(items: Items) -> str:
    return "; ".join(f"{name} {size / GIB:.2f} GiB" for name, size in items.items())


def _check(what: str, option: str, items: Items, limit_bytes: int | None, free_bytes: int, most_bytes: int) -> None:
    """`free_bytes`: what is, or is this daemon's own, of the machine's `most_bytes`."""
    needed = sum(items.values())
    limit = most_bytes if limit_bytes is None else limit_bytes
    if needed <= min(limit, free_bytes):
        return
    held, allowed = (f"free {what}", free_bytes) if limit_bytes is None or limit > free_bytes else (option, limit)
    refusal = (
        f"this stage needs {needed / GIB:.2f} GiB of {what} and {held} is {allowed / GIB:.2f} GiB ({_table(items)}); "
    )
    others = "choose another --stage, or join a run with smaller stages"
    if needed <= min(limit, most_bytes):
        raise NotFreeError(f"{refusal}end what else takes it, {others}")
    raise SettingsError(f"{refusal}allow more, {others}")
