"""A benchmark that waits for its swarm is told at once that one of its programs has ended, and why."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

from benchmarks.programs import Program, end_when_told, told_afterwards
from benchmarks.training_throughput import Events, running

TALKS = 'import time; print(\'{"event": "listening"}\', flush=True); time.sleep(60)'
ENDS = "import sys; sys.exit('no room:\\nthis stage needs 35 GiB of disk')"


@pytest.mark.parametrize("ending", ["host", "peer"])
def test_a_program_that_ends_is_said_at_once_with_its_last_lines(ending: str, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def start(name: str) -> Program:
            command = [sys.executable, "-c", ENDS if name == ending else TALKS]
            log = tmp_path / f"{name}.log"
            process = stack.enter_context(running(command, log, stdout=subprocess.PIPE))
            return Program(name, process, log)

        programs = [start("host"), start("peer")]
        events = Events(programs[0].process)
        began = time.monotonic()
        with pytest.raises(click.ClickException, match=rf"{ending} has ended with exit code 1:(.|\n)*needs 35 GiB"):
            events.wait_for(lambda event: event["event"] == "genesis", timeout_s=240.0, programs=programs)
        assert time.monotonic() - began < 120.0


def test_who_is_told_to_end_while_a_program_begins_knows_it_first() -> None:
    """Or nobody would end it: it was left, once in a loaded run."""
    begun: list[str] = []

    def begin() -> None:
        with told_afterwards():
            signal.raise_signal(signal.SIGTERM)
            begun.append("a program")

    before = signal.getsignal(signal.SIGTERM)
    try:
        end_when_told()
        with pytest.raises(SystemExit):
            begin()
        assert begun == ["a program"]
    finally:
        signal.signal(signal.SIGTERM, before)
