"""Compute libraries are told in one place how to wait, before they are loaded, and what the owner says stays."""

import os
import re
import subprocess
import sys

import pytest

from swarm.local.compute_pools import ASLEEP, POOLS, bound_pools, pools_bound_by_owner, wait_asleep
from tests.test_architecture import ROOT, modules


def test_threads_that_wait_sleep_unless_the_owner_has_a_say() -> None:
    ours: dict[str, str] = {"PATH": "/bin"}
    wait_asleep(ours)
    assert ours == {"PATH": "/bin", **ASLEEP}
    owners = {"OMP_WAIT_POLICY": "ACTIVE"}
    wait_asleep(owners)
    assert owners == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_pools_are_bound_and_asleep() -> None:
    ours: dict[str, str] = {}
    bound_pools(3, ours)
    assert ours == {**ASLEEP, **dict.fromkeys(POOLS, "3")}


@pytest.mark.parametrize(
    ("said", "most"), [({}, None), ({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "2,1"}, None)]
)
def test_the_owners_own_bound_is_read(said: dict[str, str], most: int | None) -> None:
    assert pools_bound_by_owner(said) == most


@pytest.mark.parametrize("package", ["benchmarks", "tests"])
def test_a_package_of_programs_says_so_before_any_of_its_modules_loads_torch(package: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ASLEEP}
    program = f"import sys, os, {package}; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "PASSIVE\n", done.stderr


def test_no_other_module_sets_what_libraries_read() -> None:
    allowed = {"swarm/local/compute_pools.py", "tests/swarm/local/test_compute_pools.py"}
    for path in set(modules()) - allowed:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in (*POOLS, *ASLEEP):
            assert not re.search(rf'"{name}"(: |\] = |, ")', text), f"{path} sets {name}"
