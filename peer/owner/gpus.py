"""Which GPU of the machine a peer computes on.

Told from the driver and from torch's files: importing torch takes seconds.
"""

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DRIVER_WAIT_S = 10.0


@dataclass(frozen=True)
class ChosenGpu:
    """What a peer computes on, and why."""

    number: int | None
    """None: the CPU."""
    is_default: bool
    """The owner has not asked for it: where the stage does not fit, the CPU will do."""
    reason: str


def chosen_gpu(wanted: str) -> ChosenGpu:
    """By what the owner wants, as `swarm.core.owner.limits` has it, and what is there."""
    if wanted == "cpu":
        return ChosenGpu(None, False, "computing on the CPU, as you asked")
    if wanted != "auto":
        return ChosenGpu(int(wanted), False, f"computing on GPU {wanted}, as you asked")
    found = gpu_names()
    if not found:
        return ChosenGpu(None, True, "computing on the CPU: no NVIDIA driver tells of a GPU")
    if torch_cuda() is None:
        return ChosenGpu(
            None, True, f"computing on the CPU: torch is built without CUDA for {found[0]}; see swarm doctor"
        )
    more = f" or one of 1 to {len(found) - 1}" if len(found) > 1 else ""
    return ChosenGpu(0, True, f"computing on GPU 0, {found[0]}; choose otherwise with --gpu cpu{more}")


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
