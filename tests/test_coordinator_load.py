"""The benchmark of many volunteers measures what it says, in a small run."""

import json
import subprocess
import sys

import pytest


@pytest.mark.soak
def test_volunteers_poll_without_errors() -> None:
    command = [sys.executable, "-m", "benchmarks.coordinator_load", "--json", "--volunteers", "8", "--seconds", "5"]
    done = subprocess.run([*command, "--steps", "20"], capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == 0
    assert found["calls"] >= 8 * 3
    assert set(found["methods_median_ms"]) == {"Admit", "GetCredit", "GetStatus", "ListPeers"}
