"""Which GPUs of the machine are computed on: one peer on each.

Told from the driver and from torch's files: importing torch takes seconds.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.core.errors import SettingsError, TransientError

DRIVER_WAIT_S = 10.0


@dataclass(frozen=True)
class ChosenGpu:
    """What a peer computes on, and why."""

    number: int | None
    """None: the CPU."""
    is_default: bool
    """The owner has not asked for it: where the stage does not fit, the CPU will do."""
    reason: str


def chosen_gpus(wanted: str) -> tuple[ChosenGpu, ...]:
    """One for each peer, by what the owner wants, as `swarm.core.owner.limits` has it, and what is there.

    Raises SettingsError where GPUs are asked for that are not there, as far as the driver tells, and TransientError
    where it is here but does not tell yet, as while a machine starts.
    """
    if wanted == "cpu":
        return (ChosenGpu(None, False, "computing on the CPU, as you asked"),)
    found = gpu_names()
    if wanted == "auto":
        return (_default(found),)
    if wanted == "all" and not found:
        refusal = "--gpu all: no NVIDIA driver tells of a GPU; see `swarm doctor`, or give --gpu cpu"
        raise SettingsError(refusal) if shutil.which("nvidia-smi") is None else TransientError(refusal)
    numbers = range(len(found)) if wanted == "all" else [int(number) for number in wanted.split(",")]
    if found and (missing := [number for number in numbers if number >= len(found)]):
        have = "; ".join(f"{number}: {name}" for number, name in enumerate(found))
        raise SettingsError(f"--gpu {wanted}: there is no GPU {missing[0]}; there are {have}")
    return tuple(
        ChosenGpu(number, False, f"computing on GPU {number}{f', {found[number]}' if found else ''}, as you asked")
        for number in numbers
    )


def _default(found: Sequence[str]) -> ChosenGpu:
    """The first that torch can use."""
    if not found:
        return ChosenGpu(None, True, "computing on the CPU: no NVIDIA driver tells of a GPU")
    if torch_cuda() is None:
        return ChosenGpu(
            None, True, f"computing on the CPU: torch is built without CUDA for {found[0]}; see swarm doctor"
        )
    others = "; ".join(f"GPU {number}, {name}" for number, name in enumerate(found[1:], 1))
    more = f"; there are also {others}: --gpu all for a peer on each, or --gpu with numbers" if others else ""
    return ChosenGpu(0, True, f"computing on GPU 0, {found[0]}; choose otherwise with --gpu cpu{more}")


def number_as_the_driver_does() -> None:
    """Torch, once it is loaded, has the GPUs by the driver's numbers: by itself it would have the quickest first."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def gpu_names() -> list[str]:
    """As NVIDIA's driver names them, in its order; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=DRIVER_WAIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [name.strip() for name in said.stdout.splitlines() if name.strip()]


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None if for none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
        match = re.search(r"^cuda.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return match.group(1) if match else None
    return None
