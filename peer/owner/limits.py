"""The owner's limits that a peer is fitted to before it starts: memory and disk, of the machine and of its GPU."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from swarm.core.errors import SettingsError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.invite import Invite

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class VolunteerSettings:
    """What the owner of this machine allows; nobody else decides it."""

    folder: Path
    """Identity, downloads and snapshots."""
    threads: int
    memory_bytes: int | None = None
    """Most memory the daemon may use; None: what is free at the start."""
    upload_mbit: float | None = None
    download_mbit: float | None = None
    gpu: int | None = None
    """Number of the GPU to use; None: none."""
    gpu_is_default: bool = False
    """The owner has not asked for that GPU: where a stage does not fit it, the CPU will do."""
    computes_on: str = ""
    """What it computes on and why, in words for the owner."""
    gpu_memory_bytes: int | None = None
    """None: what is free at the start."""
    disk_bytes: int | None = None
    """None: what is free at the start."""
    stage: int | None = None
    """The stage asked for; None: wherever the run needs a peer most."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    asks_router: bool = False
    """To forward the ports, when nobody can dial this peer."""
    relay_listen: tuple[str, ...] = ()
    """Where to relay for peers that cannot be dialled; empty: nowhere."""
    invite: Invite | None = None
    """The invite that led here; None: a host's bare address, whose run is taken as it is."""

    @property
    def devices(self) -> tuple[str, ...]:
        """What a stage may be computed on, the first that it fits."""
        if self.gpu is None:
            return ("cpu",)
        return (f"cuda:{self.gpu}", "cpu") if self.gpu_is_default else (f"cuda:{self.gpu}",)


def used_bytes() -> int:
    """Memory this daemon holds now, with all that it has started."""
    return _own_bytes() + _started_bytes()


def held_bytes(process: psutil.Process) -> int:
    """Memory that a process has and the system cannot take: what is mapped of files, libraries and what is cold, it
    takes when it needs it. Raises psutil.Error if the process is gone."""
    info = process.memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def _own_bytes() -> int:
    return held_bytes(psutil.Process())


def _started_bytes() -> int:
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            total += held_bytes(child)
    return total


def check_memory(items: Mapping[str, int], limit_bytes: int | None, *, num_p2pd: int = 1) -> None:
    """Raises SettingsError, with the sum item by item, if the stage does not fit.

    All libraries must be loaded: what they take here counts in the place of what `items` suppose. `num_p2pd`: this
    peer's own, and its relay's if it has one.
    """
    items = dict(items) | {
        "libraries": _own_bytes(),
        "p2pd": max(num_p2pd * items.get("p2pd", 0), _started_bytes()),
    }
    needed = sum(items.values())
    available = psutil.virtual_memory().available + used_bytes()
    allowed = available if limit_bytes is None else min(limit_bytes, available)
    table = "; ".join(f"{name} {size / GIB:.2f} GiB" for name, size in items.items())
    if needed > allowed:
        what = "--memory" if limit_bytes is not None and limit_bytes <= available else "free memory"
        raise SettingsError(
            f"this stage needs {needed / GIB:.2f} GiB and {what} is {allowed / GIB:.2f} GiB ({table}); "
            "allow more, choose another --stage, or join a run with smaller stages"
        )
    log.info("at most %.3f GiB of memory: %s", needed / GIB, table)


def first_that_fits(
    choices: Iterable[ComputeMode],
    items: Callable[[ComputeMode], Mapping[str, int]],
    volunteer: VolunteerSettings,
    *,
    held_bytes: int = 0,
) -> ComputeMode:
    """Of the ways to compute, of which each next one needs less memory. Raises SettingsError as `check_fit` if none."""
    refusal: SettingsError | None = None
    for mode in choices:
        try:
            check_fit(items(mode), volunteer, held_bytes=held_bytes)
        except SettingsError as error:
            refusal = error
        else:
            return mode
    assert refusal is not None, "no way to compute was named"
    raise refusal


def check_fit(items: Mapping[str, int], volunteer: VolunteerSettings, *, held_bytes: int = 0) -> None:
    """Raises SettingsError, item by item, unless a stage fits; names are those of `swarm.core.plan`.

    `held_bytes`: what the disk items take of the disk already.
    """
    by_place: dict[str, dict[str, int]] = {"host": {}, "device": {}, "disk": {}}
    for name, size in items.items():
        place, _, what = name.partition(".")
        by_place[place][what] = size
    check_memory(by_place["host"], volunteer.memory_bytes, num_p2pd=2 if volunteer.relay_listen else 1)
    disk = by_place["disk"]
    volunteer.folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(volunteer.folder).free + held_bytes
    _check_place("disk", "--disk-gib", disk, volunteer.disk_bytes, room)
    if volunteer.gpu is not None:
        free = limit_gpu(volunteer.gpu, volunteer.gpu_memory_bytes)
        _check_place("GPU memory", "--gpu-memory-gib", by_place["device"], volunteer.gpu_memory_bytes, free)


def _check_place(what: str, option: str, items: Mapping[str, int], limit_bytes: int | None, free_bytes: int) -> None:
    needed, allowed = sum(items.values()), free_bytes if limit_bytes is None else min(limit_bytes, free_bytes)
    if needed > allowed:
        table = "; ".join(f"{name} {size / GIB:.2f} GiB" for name, size in items.items())
        held = option if limit_bytes is not None and limit_bytes <= free_bytes else f"free {what}"
        raise SettingsError(
            f"this stage needs {needed / GIB:.2f} GiB of {what} and {held} is {allowed / GIB:.2f} GiB ({table}); "
            "allow more, choose another --stage, or join a run with smaller stages"
        )


def gpu_used_bytes(gpu: int) -> int:
    """Memory of the GPU that torch holds in this process."""
    torch: Any = sys.modules.get("torch")  # before it is imported, which takes seconds, it holds none
    return 0 if torch is None else int(torch.cuda.memory_reserved(gpu))


def limit_gpu(gpu: int, limit_bytes: int | None) -> int:
    """Keep this process to its share of the GPU's memory from now on; bytes of it that are free."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), gpu)
    return int(free)
