"""Kernels that are compiled by a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

MIB = 1 << 20
PROGRAM = """
import sys, threading
import psutil
from swarm.local.compiling import rehearse_apart
from swarm.local.rehearsal import rehearse
from peer.sim import TinyRun
settings = TinyRun().settings()
{0}
print(psutil.Process().memory_full_info().uss)
"""

APART = "rehearse_apart(settings, threading.Event())"


def memory_after(rehearsal: str, kept: Path) -> int:
    """Bytes of its own that a process has after it, with compiled code in the folder `kept`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM.format(rehearsal)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return int(done.stdout)


@pytest.mark.soak
def test_who_has_kernels_compiled_elsewhere_has_no_more_memory_than_who_finds_them(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    first = memory_after(APART, kept)
    found = memory_after(APART, kept)
    assert abs(first - found) < 24 * MIB
    assert memory_after("rehearse(settings)", other) > found + 48 * MIB
