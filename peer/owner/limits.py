"""What the owner of a machine allows one of its peers, and what the daemon and its GPUs hold of memory now."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from swarm.invite import Invite

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class VolunteerSettings:
    """What the owner of this machine allows one of its daemon's peers; nobody else decides it. Folder, memory, disk and
    rates are those of all its peers together (`peer.program.shared`)."""

    folder: Path
    """The daemon's: downloads and snapshots."""
    threads: int
    """This peer's share of them."""
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
    return own_bytes() + started_bytes()


def held_bytes(process: psutil.Process) -> int:
    """Memory that a process has and the system cannot take: what is mapped of files, libraries and what is cold, it
    takes when it needs it. Raises psutil.Error if the process is gone."""
    info = process.memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def own_bytes() -> int:
    """Memory this process holds itself."""
    return held_bytes(psutil.Process())


def started_bytes() -> int:
    """Memory of all that this process has started."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            total += held_bytes(child)
    return total


def gpu_used_bytes(gpu: int) -> int:
    """Memory of the GPU that torch holds in this process."""
    torch: Any = sys.modules.get("torch")  # before it is imported, which takes seconds, it holds none
    return 0 if torch is None else int(torch.cuda.memory_reserved(gpu))


def limit_gpu(gpu: int, limit_bytes: int | None) -> tuple[int, int]:
    """Keep this process to its share of the GPU's memory from now on; bytes of it that are free, and all."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), gpu)
    return int(free), int(total)
