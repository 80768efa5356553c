"""What is counted of a run in windows, from what was seen of it, and its run file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.outer_steps import LOCAL_STEPS, Watched, figures, write_manifest
from benchmarks.windows.audits import lies_beside
from swarm.manifest.file import read_manifest
from swarm.manifest.model import stage_num_parameters
from tests.swarm.core.round.round_members import result_of, roster_of
from tests.swarm.core.round.round_world import facts_of

FACTS = facts_of(4)
FIRST = int(FACTS.step)
WINDOW_S = 10.0


def passes(*began: float) -> list[dict[str, Any]]:
    """Windows from each of these times on."""
    each_s = WINDOW_S / LOCAL_STEPS
    return [
        {"began": at + number * each_s, "ended": at + (number + 1) * each_s, "cpu_s": at / 10, "of": "loss"}
        for at in began
        for number in range(LOCAL_STEPS)
    ]


def watched() -> Watched:
    """One window of four, of which the round takes as long; its line is full for 8 of those 10 seconds."""
    peers = [f"peer{number}" for number in range(4)]
    lines = [
        {"at": at, "up_bytes": dict.fromkeys(peers, round(up))}
        for at, up in ((10.0, 0), (10.1, 0), (19.9, 1e6), (20.0, 1e6))
    ]
    steps = [{"event": "step", "step": FIRST, "round_s": 9.5}]
    roster = roster_of(FACTS)
    result = result_of(FACTS, roster)
    return Watched(
        {peer: passes(0.0, 20.0) for peer in peers},
        lines,
        steps,
        0.0,
        20.0,
        FIRST,
        FIRST + 1,
        [result],
        True,
        {one: one for one in peers},
    )


def test_what_is_not_computed_is_told_apart_from_what_the_line_carries() -> None:
    seen = watched()
    found = figures(seen, 1_000_000, uplink_mbit=1.0, window_s=WINDOW_S, is_ahead=False)
    num_microbatches = sum(len(one.work) for one in seen.results[0].roster.contributions)
    assert found["utilisation"] == pytest.approx(num_microbatches * WINDOW_S / LOCAL_STEPS / (4 * 20.0))
    assert found["tokens_per_s_over_one"] == pytest.approx(4 * found["utilisation"])
    assert found["speedup_over_one"] == pytest.approx(2.5 * found["utilisation"])
    assert (found["pause_seconds"], found["line_seconds"]) == (pytest.approx(10.0), pytest.approx(8.0))
    assert found["pause_cpu_seconds"] == pytest.approx(2.0)
    assert found["utilisation_of_line"] == pytest.approx(10 / 18)
    assert found["bytes_up_per_parameter_per_window"] == pytest.approx(1.0)
    assert found["round_seconds"] == 9.5
    ahead = figures(replace(seen, replicas_equal=False), 1, uplink_mbit=1.0, window_s=1.0, is_ahead=True)
    assert not ahead["replicas_equal"]
    assert ahead["computed_beside_rounds"] == pytest.approx(9.5 / 20)
    assert 0.5 < ahead["worth_of_token"] < found["worth_of_token"]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_its_manifest_is_of_about_so_many_parameters(is_ahead: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_manifest(path, params=10_000_000, peers=4, rule="mean", snapshot_every=2, is_ahead=is_ahead)
    manifest = read_manifest(path)
    (size,) = stage_num_parameters(manifest.model)
    assert 0.98e7 < size < 1.02e7
    assert manifest.tables.averaging.delay == is_ahead


def test_lies_about_a_window_show_in_its_replay_and_the_bent_row_does_not_always() -> None:
    names = ("lazy_refilled_10", "stale_start", "copied_result", "bent_row_0.3")
    found = {name: one["grade"] for name, one in lies_beside(0, names).items()}
    assert found.pop("bent_row_0.3") == "suspicious"
    assert set(found.values()) == {"fraud"}
