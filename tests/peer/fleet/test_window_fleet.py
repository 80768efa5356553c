"""Simulated windows: closed as the daemon closes them, the same for the same seed, and what each rule costs."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.fleet.scenario import read_scenario
from peer.fleet.window_fleet import Downloads, WindowFleet, round_bytes_of, simulate_windows, window_figures
from peer.fleet.window_scenario import WindowScenario
from swarm.averaging.parts import Parts
from swarm.cli import ExitCode, run
from swarm.core.ids import PeerId, Step
from swarm.core.plan import result_bytes, round_bytes, state_bytes
from swarm.core.round.step_progress import MemberReport, WindowProgress
from swarm.core.tables import read_table
from swarm.model.layout import ParameterLayout
from swarm.optim.factored_moments import num_means
from tests import ROOT

HOMES = ROOT / "examples" / "scenarios" / "home_windows.toml"

SMALL: dict[str, dict[str, Any]] = {
    "run": {"warm_up_s": 2000.0, "measured_s": 20_000.0},
    "windows": {"parameters": 10_000_000, "local_steps": 20, "window_s": 200.0},
    "fleet": {"peers": 40, "up_mbit": 20.0, "down_mbit": 100.0},
    "sessions": {"law": "exponential", "turnover": 0.0},
}
NOBODY_STAYS: dict[str, Any] = {"turnover": 0.3, "turnover_s": 600.0}


def small(**tables: dict[str, Any]) -> WindowScenario:
    merged = {name: {**SMALL[name], **tables.get(name, {})} for name in SMALL}
    return read_table(WindowScenario, {"name": "small", **merged})


@pytest.mark.parametrize("seed", range(5))
def test_a_window_closes_when_the_daemon_closes_it(seed: int) -> None:
    scenario = small(run={"seed": seed, "warm_up_s": 0.0, "measured_s": 900.0}, fleet={"peers": 9, "stalls": 0.3})
    fleet = WindowFleet(scenario)
    outcome = fleet.run()
    part, rng = scenario.windows, random.Random(f"windows/{seed}")
    spread = 10.0**0.5
    powers = [spread ** rng.uniform(-1, 1) for _ in range(9)]
    assert sorted(powers) == pytest.approx(sorted(peer.power for peer in fleet._members))
    full_at = sorted((part.window_s / power, PeerId(str(number))) for number, power in enumerate(powers))
    progress = WindowProgress(Step(0), part.local_steps, 1e9, part.straggler_s)
    progress.reserve([peer for _, peer in full_at], now=0.0)
    for at, peer in full_at:
        due = progress.next_deadline()
        if due is not None and due <= at and progress.closing(now=due):
            break
        progress.report(peer, MemberReport(part.local_steps), now=at)
        due = at
        if progress.closing(now=at):
            break
    assert outcome.window_s[0] == pytest.approx(due)


def test_the_same_seed_has_the_same_outcome() -> None:
    one, again = (window_figures(simulate_windows(small(sessions=NOBODY_STAYS))) for _ in range(2))
    assert {**one, "cpu_seconds": 0} == {**again, "cpu_seconds": 0}
    other = window_figures(simulate_windows(small(sessions=NOBODY_STAYS, run={"seed": 1})))
    assert other["joins"] != one["joins"]


def test_nothing_is_missing_where_all_are_alike_and_nobody_leaves() -> None:
    found = window_figures(simulate_windows(small(fleet={"power_ratio": 1.0})))
    assert found["throughput_vs_ideal"] == pytest.approx(1.0, abs=0.02)
    assert set(found["shares_of_ideal"].values()) == {0.0}


def test_quick_machines_wait_for_the_median_one_unless_windows_are_sized_by_power() -> None:
    alike = window_figures(simulate_windows(small()))
    sized = window_figures(simulate_windows(small(windows={"sized": "by_power"})))
    assert alike["throughput_vs_ideal"] < 0.75
    assert alike["shares_of_ideal"]["waited_for_half"] > 0.2
    assert alike["throughput_vs_ideal_alike"] > 0.9
    assert sized["throughput_vs_ideal"] > 0.95


def test_who_leaves_loses_its_window_and_joiners_share_the_donors_uplinks() -> None:
    calm = window_figures(simulate_windows(small(sessions={"turnover": 0.3, "turnover_s": 7200.0})))
    found = window_figures(simulate_windows(small(sessions=NOBODY_STAYS)))
    assert found["windows_lost"] > calm["windows_lost"] > 0
    assert found["shares_of_ideal"]["lost"] > calm["shares_of_ideal"]["lost"]
    heavy = small(sessions=NOBODY_STAYS, windows={"parameters": 400_000_000})
    assert window_figures(simulate_windows(heavy))["members"] < found["members"] / 2, "lines too thin"


def test_no_more_are_members_than_a_run_takes() -> None:
    found = window_figures(simulate_windows(small(fleet={"most_members": 10})))
    assert found["members"] == 10


def test_bytes_of_a_round_are_the_plan_s_and_cohorts_add_little() -> None:
    scenario = small(windows={"averaging": "int2"})
    part = scenario.windows
    planned = round_bytes("int2", 2 * part.parameters, 64)
    assert planned == pytest.approx(63 / 64 * 1.125 * part.parameters), "moments and all"
    assert round_bytes_of(scenario, 64) == pytest.approx(planned)
    assert 1.0 < round_bytes_of(scenario, 10_000) / planned < 1.15


def test_bytes_are_those_of_the_vectors_and_states_that_daemons_make() -> None:
    """But for the means of second moments: here of rows of 512."""
    layout = ParameterLayout.of({"a": (2048, 512), "b": (2048, 512)})
    part = small(windows={"averaging": "int2", "parameters": layout.num_values}).windows
    parts = Parts(layout.num_values, codec="int2", means=num_means(layout))
    assert result_bytes(part.settings, part.parameters) == pytest.approx(parts.all_result_bytes, rel=0.01)
    carried = sum(parts.result_bytes(index) for index in parts.moments)
    weights = 4 * layout.num_values
    assert state_bytes(part.settings, part.parameters) == pytest.approx(weights + carried, rel=0.01)


def test_downloads_share_what_there_is_evenly() -> None:
    downloads = Downloads()
    peers: Any = ["early", "late"]
    downloads.go_on(0.0, 0.0)
    downloads.add(peers[0], 100.0)
    downloads.go_on(0.0, 10.0)
    downloads.go_on(5.0, 5.0)
    downloads.add(peers[1], 100.0)
    assert downloads.next_at() == pytest.approx(15.0)
    downloads.go_on(15.0, 10.0)
    assert downloads.pop() == "early"
    assert downloads.next_at() == pytest.approx(20.0)


def test_the_shipped_scenario_runs_small_and_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    homes = read_scenario(HOMES)
    assert isinstance(homes, WindowScenario)
    assert homes.fleet.peers == 10_000
    few = replace(homes, fleet=replace(homes.fleet, peers=300))
    found = window_figures(simulate_windows(few))
    assert found["throughput_vs_ideal_alike"] > 0.8
    text = HOMES.read_text().replace("10_000\npower", "200\npower")
    (tmp_path / "few.toml").write_text(text)
    assert run(["simulate", str(tmp_path / "few.toml")]) is ExitCode.OK
    said = capfd.readouterr().out
    assert "200 peers, the whole model on each" in said
    assert "% of one that waits for the median machine" in said
