"""The comparison of subspaces: what is read off curves, and what is kept of a run that was cut."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.subspace import Cell, Trained, loss_at, manifest_of, read_runs, reference_of, steps_to, table
from swarm.core.plan import hop_bytes_per_token
from swarm.manifest.file import assumed_data, freeze, parse_manifest

CURVE = ((100, 3.0), (200, 2.0), (300, 1.5))


def trained(subspace: int, seed: int, curve: tuple[tuple[int, float], ...], exported_loss: float = 1.5) -> Trained:
    cell = Cell(subspace=subspace, seed=seed, width=128, steps=300, batch_tokens=1024, rate=1e-3)
    return Trained(cell=cell, curve=curve, bytes_a_token=100.0, plain_loss=1.5, exported_loss=exported_loss, cpu_s=1.0)


def test_steps_and_losses_are_read_off_straight_lines() -> None:
    assert reference_of(CURVE) == 3.0
    assert (steps_to(3.5, CURVE), steps_to(2.5, CURVE), steps_to(1.0, CURVE)) == (100, 150, None)
    assert (loss_at(50, CURVE), loss_at(250, CURVE), loss_at(400, CURVE)) == (3.0, 1.75, 1.5)


def test_a_share_is_held_against_the_ordinary_run_of_its_seed(tmp_path: Path) -> None:
    slow = ((100, 4.0), (200, 3.0), (300, 2.0))
    made = [trained(1, 1, CURVE), trained(8, 1, slow), trained(8, 2, slow), trained(32, 1, ((300, 9.0),), 1.6)]
    kept = tmp_path / "runs.jsonl"
    kept.write_text("".join(json.dumps(asdict(one)) + "\n" for one in made))
    rows = table(read_runs(kept), folder=tmp_path, tflops=1.0)
    assert list(rows) == ["D", "D/8", "D/32"]
    assert rows["D/8"]["held_out"] == [2.0], "seed 2 has nothing to be held against"
    assert rows["D/8"]["steps_over_dense"] == 2.0
    assert rows["D/32"]["steps_to_reference"] == [None]
    assert [row["export_equal"] for row in rows.values()] == [True, True, False]
    first = rows["D/8"]["dense_time_over"]["trained, 20 Mbit/s"]
    assert first["ratio"] == pytest.approx(first["times_dense"] / 2, rel=0.01)
    assert rows["D/8"]["dense_at_equal_time"]["20 Mbit/s"] == loss_at(300 / first["times_dense"], CURVE)


def test_bytes_that_stand_in_the_docs_are_those_of_the_plan() -> None:
    found = {}
    for share in (1, 4, 8, 16, 32):
        cell = Cell(subspace=share, seed=1, width=128, steps=900, batch_tokens=1024, rate=1.5e-3)
        manifest = parse_manifest(manifest_of(cell), Path("run.toml"))
        found[share] = sum(hop_bytes_per_token(freeze(manifest, assumed_data(manifest), ()), 128))
    assert found == {1: 300, 4: 108, 8: 72, 16: 40, 32: 24}
