"""The benchmarks of devices run, small, and say what the docs take from them."""

import json

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.stage import SMOKE
from benchmarks.verification import device_spread
from tests.pretend_device import PRETEND


@pytest.mark.soak
def test_a_stage_is_measured_beside_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--smoke", "--json", "--device", "cpu"])
    said = json.loads(capsys.readouterr().out)
    cases = said["stages"]
    assert [case["case"] for case in cases] == [case.name for case in SMOKE]
    assert [row["equal"] for row in said["inner_steps"]] == [True]
    assert all(set(case["mfu"]) == {"ours", "plain", "autocast", "with rounds"} for case in cases)
    assert all(case["of_plain"] > 0 for case in cases)


@pytest.mark.soak
def test_the_spread_between_devices_is_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    device_spread.main(["--device", PRETEND, "--depths", "1", "--width", "64", "--steps", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["compute"], row["weights"]) for row in rows} == {
        (compute, weights) for compute in ("fp32", "bf16") for weights in ("fresh", "learnt")
    }
    for row in rows:
        assert 0 < row["gradient of x"] < (1e-5 if row["compute"] == "fp32" else 5e-2)
