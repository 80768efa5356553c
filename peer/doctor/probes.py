"""Single questions put to a machine for `swarm doctor`: to py-libp2p, the driver, the installed."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from packaging.requirements import InvalidRequirement, Requirement

from peer.machine.load import nvidia_smi

DIAL_S = 6.0


class DialCheck:
    """`swarm.network.p2pd.dial_check` in its process; started at once, for its imports take seconds."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm.network.p2pd.dial_check", str(DIAL_S)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._told: dict[str, dict[str, Any]] = {}
        self._came = asyncio.Condition()
        self._reading = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def dial(self, addresses: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What came of each address; those whose process died are left out."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{address}\n" for address in addresses).encode())
        wanted = set(addresses)
        async with self._came:
            await self._came.wait_for(lambda: wanted <= set(self._told) or self._reading.done())
        return {address: self._told[address] for address in addresses if address in self._told}

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            async with self._came:
                self._told[told["address"]] = told
                self._came.notify_all()


async def driver_gpus() -> list[str] | None:
    """GPUs as NVIDIA's driver names them; None without a driver."""
    said = await nvidia_smi("--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader")
    return said.splitlines() if said is not None else None


def lacking_compiler() -> str:
    """What is not there of a C compiler and Python's headers, with which Triton makes what starts its kernels."""
    lacking = []
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        lacking.append("a C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking.append("Python's headers")
    return " and ".join(lacking)


def congestion_control() -> str | None:
    """The default of TCP connections; None where the system does not tell it."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None


def unmet_requirements(distribution: str) -> list[str]:
    """Requirements of an installed distribution that are missing or of a version outside their range."""
    wrong = []
    try:
        texts = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return [f"{distribution} is not installed, only found on the path"]
    for text in texts:
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{wanted.name} is missing ({wanted.specifier} is needed)")
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                wrong.append(f"{wanted.name} {version} is installed, {wanted.specifier} is needed")
    return wrong
