"""The benchmarks of speed on few cores say which of their goals hold, and in a soak run, small."""

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.owner.shared_machine import goals
from tests import ROOT

TIMEOUT_S = 240.0
"""Of one that takes half a minute on a quiet machine."""


def answer(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *arguments, "--smoke", "--json"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = started.communicate(timeout=TIMEOUT_S)
    finally:
        started.terminate()  # told to end, it ends its programs too
        started.wait(timeout=60)
    assert started.returncode == 0, errors
    said: dict[str, Any] = json.loads(out)
    return said


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(TIMEOUT_S + 70)
def test_a_shared_machine_is_measured() -> None:
    assert answer("benchmarks.owner.shared_machine")["tokens_per_s"]["defaults"] > 0


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(TIMEOUT_S + 70)
def test_the_owners_loss_is_measured() -> None:
    said = answer("benchmarks.owner.shared_machine", "--case", "beside_two_busy_threads")
    assert said["tokens_per_s"]["beside_two_busy_threads"] > 0
    assert said["owner_slowdown"] > -1
    assert [goal["what"] for goal in said["goals"]] == ["the busy program's loss"]


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(TIMEOUT_S + 70)
def test_a_swarm_is_measured_against_one_process() -> None:
    said = answer("benchmarks.training_throughput")
    assert said["settings"] == "defaults"
    assert said["swarm_tokens_per_s"] > 0
    assert said["ratio"] == pytest.approx(said["swarm_tokens_per_s"] / said["single_tokens_per_s"])


def test_goals_are_held_against_the_best_setting_on_the_quiet_machine() -> None:
    rates = {"one_thread_each": 100.0, "defaults": 90.0, "three_daemons": 70.0, "beside_two_busy_threads": 45.0}
    found = goals({**rates, "alone": 90.0}, 0.2)
    assert [(goal["measured"], goal["holds"]) for goal in found] == [
        (0.9, True),
        (0.7, False),
        (0.5, True),
        (0.2, False),
    ]
    assert goals({"one_thread_each": 100.0}, None) == []
