"""A checkpoint goes through a swarm and back to transformers, in the form in which it came."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.families import finetuning
from benchmarks.families.__main__ import SMOKE, main


def test_a_checkpoint_is_trained_and_taken_home() -> None:
    """One in bf16 that is cut, one that is tied and whole at one peer."""
    found = CliRunner().invoke(main, ["--smoke", "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout.splitlines()[-1])
    assert sorted(rows) == sorted(SMOKE)
    for row in rows.values():
        assert row["gradient_error"] <= 1e-5
        assert row["logits_equal"]
        assert row["export_equal"]
        assert row["resumed_equal"]


@pytest.mark.soak
def test_adapters_are_trained_as_by_peft_alone() -> None:
    found = CliRunner().invoke(finetuning.main, ["--smoke", "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout.splitlines()[-1])
    assert said["round_share"] < 0.02
    row = said["plain"]
    assert row["loss"] < row["loss_before"]
    assert abs(row["off"]) < 0.02
    assert row["loads_with_peft"]
    assert row["base_unchanged"]
