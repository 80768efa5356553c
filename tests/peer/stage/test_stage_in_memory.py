"""What a stage's work holds in memory is what its plan says, but for the program's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.core.plan import total_bytes
from tests import ROOT

OWN = ("host.libraries", "host.p2pd")


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped files are told apart on Linux alone")
def test_two_steps_hold_what_the_plan_says(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.peer.stage.stage_in_memory", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for case, found in json.loads(done.stdout).items():
        items = {name: size for name, size in found["items"].items() if name not in OWN}
        share = found["held"] / total_bytes(items, "host")
        a_parameter = found["held"] / found["parameters"]
        assert 0.8 < share < 1.2, f"{case}: {share:.2f}, {a_parameter:.1f} bytes a parameter: {items}"
