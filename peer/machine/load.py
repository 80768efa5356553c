"""The owner's machine as it is now: its battery, its time of day, and how busy others keep it."""

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from swarm.core.owner.guest import Reading

GPU_EVERY_S = 10.0
GPU_WAIT_S = 5.0
FOLDER_EVERY_S = 30.0
SMOOTHING_S = 10.0
"""Others' processor use is told as an average over about this long."""


@dataclass
class _Cpu:
    at: float
    busy_s: float
    own_s: float
    own_user_s: float
    nice_s: float
    """Of all programs of lower priority than usual, outside the kernel."""


class Machine:
    """Reads what a `Reading` holds; the GPU and the folder are looked at less often than the rest."""

    def __init__(self, folder: Path, *, gpus: Sequence[int] = ()) -> None:
        self._folder = folder
        self._gpus = gpus
        self._cpu = _cpu()
        self._others_percent: float | None = None
        self.own_cores = 0.0
        """Cores this daemon and its p2pd use now."""
        self.others_cores = 0.0
        """Cores that all other programs use, as an average over `SMOOTHING_S`."""
        self.foreground_cores = 0.0
        """Of these, by programs of usual or higher priority: the owner's, and not other daemons."""
        self._gpu_percent: float | None = None
        self._gpu_at = float("-inf")
        self._folder_bytes = 0
        self._folder_at = float("-inf")
        self._written_bytes = written_bytes()

    async def read(
        self, *, month_bytes: int, written_today_bytes: int, asked_to_pause: bool, watch_gpu: bool
    ) -> Reading:
        """The machine as it is now."""
        self._look_at_cpu()
        now = time.monotonic()
        if watch_gpu and self._gpus and now - self._gpu_at >= GPU_EVERY_S:
            self._gpu_at = now
            self._gpu_percent = await others_gpu_percent(self._gpus)
        if now - self._folder_at >= FOLDER_EVERY_S:
            self._folder_at = now
            self._folder_bytes = await asyncio.to_thread(folder_bytes, self._folder)
        battery = _battery()
        local = datetime.now()
        return Reading(
            minute_of_day=local.hour * 60 + local.minute,
            on_battery=battery,
            others_cpu_percent=self._others_percent,
            others_gpu_percent=self._gpu_percent if watch_gpu else None,
            month_bytes=month_bytes,
            disk_bytes=self._folder_bytes,
            written_today_bytes=written_today_bytes,
            asked_to_pause=asked_to_pause,
        )

    def written_since_last(self) -> int:
        """Bytes this process has sent to the disk since the last call."""
        total = written_bytes()
        new, self._written_bytes = total - self._written_bytes, total
        return max(0, new)

    def _look_at_cpu(self) -> None:
        before, now = self._cpu, _cpu()
        elapsed_s = now.at - before.at
        if elapsed_s < 0.2:  # too short for a clock of 10 ms
            return
        self._cpu = now
        own = max(0.0, now.own_s - before.own_s)
        others = max(0.0, now.busy_s - before.busy_s - own)
        percent = min(100.0, 100.0 * others / (elapsed_s * (os.cpu_count() or 1)))
        weight = min(1.0, elapsed_s / SMOOTHING_S) if self._others_percent is not None else 1.0
        self._others_percent = (1 - weight) * (self._others_percent or 0.0) + weight * percent
        own_is_nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
        nice = now.nice_s - before.nice_s - (now.own_user_s - before.own_user_s if own_is_nice else 0.0)
        foreground = max(0.0, others - max(0.0, nice))
        self.others_cores += weight * (others / elapsed_s - self.others_cores)
        self.foreground_cores += weight * (foreground / elapsed_s - self.foreground_cores)
        self.own_cores = own / elapsed_s


def _cpu() -> _Cpu:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    own = own_user = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            used = one.cpu_times()
            own += used.user + used.system
            own_user += used.user
    return _Cpu(time.monotonic(), sum(times) - idle - guests, own, own_user, getattr(times, "nice", 0.0))


def _battery() -> bool | None:
    sensors = getattr(psutil, "sensors_battery", None)
    battery = sensors() if sensors is not None else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def written_bytes() -> int:
    """What this process has caused to be written to disk so far; 0 where that cannot be told (macOS)."""
    try:
        return int(psutil.Process().io_counters().write_bytes)
    except (AttributeError, psutil.Error):
        return 0


def folder_bytes(folder: Path) -> int:
    """Disk space of all files below, as allocated."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # gone meanwhile
                status = os.lstat(os.path.join(path, name))
                total += getattr(status, "st_blocks", -(-status.st_size // 512)) * 512
    return total


async def others_gpu_percent(gpus: Sequence[int]) -> float | None:
    """How busy other processes keep the busiest of the GPUs, by `nvidia-smi pmon`; None where it is not there or does
    not say."""
    said = await nvidia_smi("pmon", "-c", "1", "-s", "u", "-i", ",".join(map(str, gpus)))
    return parse_pmon(said, own_pid=os.getpid()) if said is not None else None


async def nvidia_smi(*arguments: str) -> str | None:
    """What NVIDIA's tool says; None where it is not there, fails, or says nothing in time."""
    if shutil.which("nvidia-smi") is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *("nvidia-smi", *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(GPU_WAIT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    return said.decode(errors="replace") if process.returncode == 0 else None


def parse_pmon(said: str, *, own_pid: int) -> float | None:
    """Of the busiest GPU: the sum of its `sm` column over the processes that are not ours; None if there is no such
    column."""
    columns: list[str] = []
    totals = Counter[str]()
    for line in said.splitlines():
        cells = line.split()
        if line.startswith("#"):
            columns = columns or [cell.strip("#") for cell in cells if cell != "#"]
            continue
        if not {"pid", "sm"} <= set(columns) or len(cells) < len(columns) - 1:
            continue
        row = dict(zip(columns, cells, strict=False))
        if row["pid"].isdecimal() and int(row["pid"]) != own_pid and row["sm"].isdecimal():
            totals[row.get("gpu", "")] += int(row["sm"])
    return min(100.0, float(max(totals.values(), default=0))) if columns else None
