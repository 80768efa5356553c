"""Calibration: honest ways to compute lie close together, a small lie does not, and the command says so."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from swarm.cli import ExitCode
from swarm.cli import run as run_command
from swarm.core.errors import LocalError
from verification.audit.tolerance import bounds_for
from verification.replay import calibration
from verification.replay.calibration import NATIVE, Plan, has_answered, measure
from verification.replay.spread import Bench, Material, Row, Setting, Spread, Tally, drawn_outcomes

SETTINGS = (Setting(NATIVE, 1, 1), Setting(NATIVE, 2, 1), Setting(NATIVE, 1, 2))


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.make(scenes=("fresh", "outliers"))


def rows_of(material: Material, *, planted: float = 0.0, subspace: int = 1) -> list[Row]:
    """Of two microbatches; with an error planted in the last setting's outcome of each."""
    bench, spread = Bench("fp32", subspace), Spread(("fp32",))
    rng = np.random.default_rng(0)
    for number in range(2):
        work = material.work(number, ("fresh", "outliers"))
        made = [bench.compute(material.weights[work.scene], work, setting) for setting in SETTINGS]
        for array in made[-1].arrays:
            noise = rng.standard_normal(array.shape, np.float32)
            array += np.float32(planted) * noise * (np.linalg.norm(array) / np.linalg.norm(noise))
        drawn = drawn_outcomes(bench, material.weights[work.scene], work)
        spread.add("fp32", made, drawn, stage=number)
    assert spread.audits == 2 * 3
    return spread.rows()


@pytest.mark.parametrize("subspace", [1, 8])
def test_honest_results_are_far_from_the_fraud_bound(material: Material, subspace: int) -> None:
    made = material if subspace == 1 else Material.make(scenes=("fresh", "outliers"), subspace=subspace)
    rows = rows_of(made, subspace=subspace)
    assert {(row.codec, row.kind) for row in rows} >= {("fp32", "gradient"), ("int8", "contribution")}
    assert any(row.differing for row in rows), "a batch that is cut in two is computed with other bits"
    for row in rows:
        assert row.share <= 0.3, row
        assert row.false_alarm == 3.0 / row.comparisons


def test_an_error_of_five_percent_is_past_the_bound(material: Material) -> None:
    """Over bf16, 8e-2 are allowed in gradients."""
    for row in rows_of(material, planted=0.05):
        assert row.largest > 0.01
        if row.codec != "bf16":
            assert row.exceeded == 4, row  # the last setting against both others, twice
            assert row.false_alarm is None


def test_comparisons_are_counted_by_pairs_and_equal_ones_have_no_error() -> None:
    tally = Tally("fp32", "fp32", "gradient", bounds_for("fp32", "fp32", "gradient"))
    ones = np.ones(10, np.float32)
    tally.add([ones, ones.copy(), ones * np.float32(2.0)], codec=None, own_error=0.0)
    row = tally.row()
    assert (row.comparisons, row.differing, row.exceeded) == (3, 2, 2)
    assert row.largest == row.high == 0.5
    assert row.share == 500.0, "half of the larger, which comes last"


@pytest.mark.soak
def test_a_process_of_its_own_computes_with_each_instruction_set() -> None:
    done: list[int] = []
    plan = Plan(
        audits=1, dtypes=("fp32",), scenes=("fresh",), instruction_sets=("baseline",), threads=(1, 2), splits=(1, 2)
    )
    rows = measure(plan, done.append)
    assert done == [1, 2]
    assert {row.comparisons for row in rows} == {2 * 6}
    assert any(row.differing for row in rows)
    assert all(row.share <= 0.3 for row in rows)


def test_a_process_that_ends_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.sys, "executable", "false")
    with pytest.raises(LocalError, match="native instructions ended"):
        measure(Plan(audits=1, dtypes=("fp32",), scenes=("fresh",)))


def test_the_command_prints_each_row_and_fails_past_a_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Plan] = []

    def measured(plan: Plan, on_progress: object) -> list[Row]:
        asked.append(plan)
        return [Row("fp32", "int8", "gradient", 1000, 10, 0.001, 0.0, 0.01, 0, False, 0.1), *wrong]

    wrong: list[Row] = []
    monkeypatch.setattr(calibration, "measure", measured)
    assert run_command(["calibrate", "--audits", "1000", "--subspace", "3"]) is ExitCode.BAD_INPUT
    assert not asked
    assert run_command(["calibrate", "--audits", "1000"]) is ExitCode.OK
    assert "under 3.0e-03" in capsys.readouterr().out
    assert asked[0].num_microbatches * len(asked[0].settings) * (len(asked[0].settings) - 1) // 2 >= 1000
    wrong.append(Row("fp32", "fp32", "gradient", 1000, 10, 0.1, 0.0, 0.001, 2, False, 100.0))
    assert run_command(["calibrate", "--json"]) is ExitCode.FAILED
    out, err = capsys.readouterr()
    assert [row["share"] for row in json.loads(out)["rows"]] == [0.1, 100.0]
    assert "2 of 1000 honest gradients in fp32 over fp32 are past the fraud bound of 0.001" in err


def test_threads_are_given_back(material: Material) -> None:
    before = torch.get_num_threads()
    work = material.work(0, ("fresh",))
    Bench("bf16").compute(material.weights["fresh"], work, Setting(NATIVE, 2, 1))
    assert torch.get_num_threads() == before


def test_a_process_is_heard_where_many_files_are_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    open_files = []
    try:
        open_files += [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        with subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.fileno() > 1024
            assert has_answered(process.stdout, within_s=60.0)
    finally:
        for number in open_files:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
