"""A test that hangs is ended, whichever event loop it hangs in, and leaves in good order."""

import subprocess
import sys
from pathlib import Path

from tests import ROOT

HANGING = """
import asyncio

import pytest

from swarm.network.loop import new_event_loop


async def hang() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        print("has left")


@pytest.mark.timeout(1)
@pytest.mark.parametrize("factory", [None, new_event_loop])
def test_hangs(factory) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(hang())
"""


def test_a_test_that_hangs_is_ended(tmp_path: Path) -> None:
    """uvloop went on for ever: it lets nothing through of what pytest-timeout raises."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "2 failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("has left\n") == 2
    assert done.stdout.count("TimedOut: Timeout (>1.0s)") >= 2
