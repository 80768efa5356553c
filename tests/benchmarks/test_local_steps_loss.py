"""The comparison of windows: names of methods, what is kept of a run that was cut, and how times are read."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.local_steps_loss import Cell, curve_alone, read_losses, table, tokens_alone, train_cells
from benchmarks.windows.method import Method, parse_method

METHODS = [
    Method(local_steps=1),
    Method(local_steps=30, codec="int4"),
    Method(local_steps=10),
    Method(local_steps=100, codec="int2", rule="centered_clip"),
    Method(local_steps=10, codec="int2", overlap=7),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_is_found_by_its_name(method: Method) -> None:
    assert parse_method(method.name) == method


@pytest.mark.parametrize("name", ["", "H", "H30", "H30-topk", "H30-int5", "H30-fp32-mean", "H3-fp32-x"])
def test_a_name_that_no_method_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no method"):
        parse_method(name)


def cell(method: str, members: int, steps: int, *, rate: float = 1.0, seed: int = 1) -> Cell:
    return Cell(method=method, members=members, seed=seed, rate=rate, steps=steps, batch_tokens=128)


ALONE = {
    cell("alone", 1, 10): 3.0,
    cell("alone", 1, 20): 2.0,
    cell("alone", 1, 20, rate=2.0): 2.5,
    cell("alone", 1, 40): 1.5,
}


def test_times_are_read_off_the_curve_of_one_alone() -> None:
    curve = curve_alone(ALONE, [1], layers=2)
    assert curve == [(1280, 3.0), (2560, 2.0), (5120, 1.5)]
    assert tokens_alone(2.0, curve) == pytest.approx(2560)
    assert tokens_alone(1.75, curve) == pytest.approx(2560 * math.sqrt(2))
    assert tokens_alone(4.0, curve) == pytest.approx(640)
    assert tokens_alone(1.4, curve) is None


def test_the_best_rate_of_the_first_seed_counts_for_all_seeds() -> None:
    swarm = {
        cell("H30-int4", 4, 10): 2.5,
        cell("H30-int4", 4, 10, rate=2.0): 1.9,
        cell("H30-int4", 4, 10, rate=2.0, seed=2): 2.1,
    }
    second = {cell("alone", 1, steps, seed=2): loss for steps, loss in ((10, 3.0), (20, 2.0))}
    row = table(ALONE | second | swarm, steps=10, batch_tokens=128, layers=2)["H30-int4 x4"]
    assert (row["held_out"], row["seeds"], row["rate"], row["tokens"]) == ([1.9, 2.1], [1, 2], 2.0, 5120)
    assert row["time_to_loss_over_one"] == pytest.approx(2.0)


def test_a_cell_is_not_trained_again_when_the_file_has_it(tmp_path: Path) -> None:
    out, kept = tmp_path / "cells.jsonl", cell("H2-int2", 2, 4)
    train_cells([kept], out, tmp_path, evaluate_tokens=128)
    lines = out.read_text()
    train_cells([kept], out, tmp_path, evaluate_tokens=128)
    assert out.read_text() == lines
    assert read_losses(out) == {kept: json.loads(lines)["held_out"]}
