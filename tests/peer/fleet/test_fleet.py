"""Simulated fleets: the same for the same seed, near the ideal if nothing happens, and back after what befalls them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.fleet.figures import figures, plot_png, summary
from peer.fleet.fleet import simulate
from peer.fleet.scenario import Scenario, read_scenario
from swarm.cli import ExitCode, run
from swarm.core.errors import SettingsError
from swarm.core.tables import read_table
from tests import ROOT

SCENARIOS = ROOT / "examples" / "scenarios"

SMALL: dict[str, dict[str, Any]] = {
    "run": {"warm_up_s": 200.0, "measured_s": 900.0},
    "model": {
        "stages": 4,
        "microbatch_compute_s": 8.0,
        "activation_mbytes": 0.8,
        "state_mbytes": 60.0,
        "round_mbytes": 20.0,
        "step_s": 90.0,
    },
    "fleet": {"peers": 48, "up_mbit": 20.0, "down_mbit": 100.0, "round_trip_ms": 80.0},
    "sessions": {"law": "weibull", "turnover": 0.0},
}


def small(events: tuple[dict[str, Any], ...] = (), **tables: dict[str, Any]) -> Scenario:
    merged = {name: {**SMALL.get(name, {}), **tables.get(name, {})} for name in {**SMALL, **tables}}
    return read_table(Scenario, {"name": "small", "events": events, **merged})


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_read(path: Path) -> None:
    assert read_scenario(path).fleet.peers >= 200


def test_same_seed_has_the_same_outcome() -> None:
    churn = {"turnover": 0.3, "law": "weibull"}
    one, again = (figures(simulate(small(sessions=churn))) for _ in range(2))
    other = figures(simulate(small(sessions=churn, run={"seed": 1})))
    timed = ("wall_seconds", "cpu_seconds", "decisions_per_second", "seconds_per_plan")
    assert {key: value for key, value in one.items() if key not in timed} == {
        key: value for key, value in again.items() if key not in timed
    }
    assert other["redone_hops"] != one["redone_hops"]


def test_undisturbed_fleet_is_near_the_ideal() -> None:
    outcome = simulate(small(fleet={"power_spread": 0.0}))
    found = figures(outcome)
    assert 0.85 < found["throughput_vs_ideal"] <= 1.0
    assert found["lost_microbatches"] == found["moves"] == found["redone_hops"] == 0


def test_five_and_one_become_even_by_themselves() -> None:
    scenario = small(
        model={"stages": 2},
        fleet={"peers": 6, "first_stages": (5, 1), "power_spread": 0.0},
        run={"min_replicas": 1, "warm_up_s": 0.0, "payback_s": 600.0, "measured_s": 3600.0},
        trust={"audits": 0.0},
    )
    outcome = simulate(scenario)
    assert figures(outcome)["moves"] == 2
    early = [sample[1] for sample in outcome.series if 100 < sample[0] < 300]
    late = [sample[1] for sample in outcome.series if sample[0] > 1800]
    assert sum(late) / len(late) > 2 * sum(early) / len(early)


def test_stage_that_lost_all_but_one_replica_comes_back() -> None:
    event = {"kind": "stage_loss", "at_s": 200.0, "stage": 1, "leaves": 1}
    outcome = simulate(small((event,), run={"measured_s": 3000.0}))
    (disturbance,) = outcome.disturbances
    assert figures(outcome)["moves"] >= 5
    assert disturbance["recovered_s"] is not None


def test_liars_are_banned_and_their_work_counts_for_nothing() -> None:
    found = figures(simulate(small(trust={"liars": 0.15}, run={"measured_s": 1800.0})))
    assert found["bans"] >= 3
    assert found["refuted_share"] > 0


def test_nothing_of_the_simulator_imports_torch() -> None:
    code = "import sys, peer.fleet.command, peer.fleet.fleet, peer.fleet.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[fleet]\npeers = 1", "fleet.peers"),
        ("[fleet]\npears = 100", "fleet.pears = 100 is unknown"),
        ("[fleet]\nfirst_stages = [1, 2]", "fleet.first_stages = [1, 2] must be 4 numbers"),
        ("[sessions]\nlaw = 'normal'", "sessions.law"),
        ("[model]\nstages = 'four'", "model.stages"),
        ("[model]\nstage_costs = [1.0]", "model.stage_costs has 1 costs for 4 stages"),
        ("[run]\nmeasured_s = -1.0", "run.measured_s"),
        ("[[events]]\nkind = 'outage'\nat_s = 1e9", "events[0].at_s"),
        ("not toml", "is not TOML"),
    ],
)
def test_wrong_scenario_is_refused_by_the_name_of_its_field(change: str, said: str, tmp_path: Path) -> None:
    tables = {name: dict(fields) for name, fields in SMALL.items()}
    head, _, line = change.partition("\n")
    key = line.partition(" = ")[0]
    name = head.strip("[]")
    tables.get(name, {}).pop(key, None)
    text = 'name = "wrong"\n'
    for table, fields in tables.items():
        text += f"[{table}]\n" + (line + "\n" if table == name else "")
        text += "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())
    path = tmp_path / "wrong.toml"
    path.write_text(text if name in tables else text + change + "\n")
    with pytest.raises(SettingsError) as raised:
        read_scenario(path)
    assert said in str(raised.value)


def test_command_writes_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "small.toml", tmp_path / "plot.png"
    text = 'name = "small"\n'
    for table, fields in SMALL.items():
        text += f"[{table}]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())
    path.write_text(text)
    assert run(["simulate", str(path), "--json", "--seed", "3", "--plot", str(plot)]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    wanted = "peers stages virtual_seconds wall_seconds throughput_vs_ideal lost_microbatches recovery_seconds moves"
    assert set(wanted.split()) | {"decisions_per_second"} <= set(found)
    assert found["seed"] == 3
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert run(["simulate", str(tmp_path / "missing.toml")]) == ExitCode.BAD_INPUT


def test_summary_tells_what_befell_the_fleet() -> None:
    event = {"kind": "crowd", "at_s": 100.0, "share": 0.5, "lasts_s": 60.0}
    outcome = simulate(small((event,)))
    assert "crowd         at 100 s" in summary(figures(outcome))
    assert outcome.series[-1][3] > 60
    assert plot_png(outcome)
