"""A run computed in one process: the swarm's mathematics, its bytes, and the liars that benchmarks plant in it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet.simulated_run import SimulatedRun, Tamper, run_steps
from benchmarks.single_process import WholeRun
from benchmarks.verification import attacks
from swarm.core.plan import round_bytes
from swarm.core.settings import AveragingCodecName, CodecSettings
from tests.reference import train_reference
from tests.swarm_in_process import manifest_of, prepare

STEPS = 3
EXACT = CodecSettings(activations="fp32", activation_gradients="fp32", averaging="fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def simulated(
    folder: Path, num_replicas: int, *, averaging: AveragingCodecName = "fp32", tamper: Tamper | None = None
) -> SimulatedRun:
    prepared = prepare(manifest_of(optimizer={"total_steps": STEPS}, averaging={"rule": "mean"}), folder)
    run = WholeRun(
        prepared.settings, [state.weights for state in prepared.states], prepared.data.train(), prepared.data.held_out()
    )
    settings = replace(prepared.settings, codecs=replace(EXACT, averaging=averaging))
    return SimulatedRun(run, settings, num_replicas, tamper=tamper)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_run_is_that_of_one_process_when_codecs_are_exact(num_replicas: int, folder: Path) -> None:
    run = simulated(folder, num_replicas)
    last = run_steps(run, STEPS)
    prepared = prepare(manifest_of(optimizer={"total_steps": STEPS}, averaging={"rule": "mean"}), folder)
    each = run.settings.microbatches_per_step
    ids = {str(step): list(range(step * each, (step + 1) * each)) for step in range(STEPS)}
    reference = train_reference(prepared, ids, evaluate_tokens=512)
    assert last == pytest.approx(reference.steps[-1].loss, rel=1e-4)
    assert run.held_out_loss(512) == pytest.approx(reference.held_out_loss, rel=1e-4)


@pytest.mark.parametrize("averaging", ["fp32", "int8", "int4", "topk"])
def test_bytes_of_rounds_are_those_of_the_plan(averaging: AveragingCodecName, folder: Path) -> None:
    run = simulated(folder, 4, averaging=averaging)
    run_steps(run, STEPS)
    num_values = max(replicas[0].layout.num_values for replicas in run.stages)
    assert run.upload_bytes / STEPS == pytest.approx(round_bytes(averaging, num_values, 4), rel=0.01)


def test_replicas_owe_different_things_and_hold_the_same_weights(folder: Path) -> None:
    run = simulated(folder, 2, averaging="topk")
    run_steps(run, STEPS)
    for replicas in run.stages:
        owed = [replica.residual.digest() for replica in replicas if replica.residual is not None]
        assert len(set(owed)) == 2
        assert replicas[0].state.weights is replicas[1].state.weights


def test_liars_change_what_is_learned_only_through_their_own_contributions(folder: Path) -> None:
    seen: list[int] = []

    def honest(stage: int, step: int, means: list[attacks.Floats]) -> list[attacks.Floats]:
        seen.append(len(means))
        return means

    def silent(stage: int, step: int, means: list[attacks.Floats]) -> list[attacks.Floats]:
        return [*means[:-1], np.zeros_like(means[-1])]

    calm, watched, robbed = (simulated(folder, 4, tamper=tamper) for tamper in (None, honest, silent))
    losses = [run_steps(run, STEPS) for run in (calm, watched, robbed)]
    assert seen == [4] * 2 * STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-4


def test_lies_are_those_of_the_papers() -> None:
    honest = [np.array([1.0, 4.0], dtype=np.float32), np.array([3.0, 4.0], dtype=np.float32)]
    own = [np.array([2.0, -1.0], dtype=np.float32)] * 2
    assert [lie.tolist() for lie in attacks.lies("sign flip x1000", honest, own)] == [[-2000.0, 1000.0]] * 2
    assert [lie.tolist() for lie in attacks.lies("sign flip x1", honest, own)] == [[-2.0, 1.0]] * 2
    assert [lie.tolist() for lie in attacks.lies("ALIE", honest, own)] == [[0.5, 4.0]] * 2
    assert [lie.tolist() for lie in attacks.lies("inner product", honest, own)] == [[-1.0, -2.0]] * 2


def test_table_of_attacks_says_what_diverged() -> None:
    chosen = attacks.cases(attacks.NUM_LIARS)
    outcomes = [
        attacks.Outcome(
            rule=rule,
            attack=attack,
            num_liars=liars,
            seed=0,
            steps=1,
            held_out_loss=None if rule == "mean" and liars else 2.0 + (rule == "median"),
            seconds=1.0,
        )
        for rule, attack, liars in chosen
    ]
    rows = attacks.table(outcomes, chosen)["rows"]
    assert len(rows) == 4 + 2 * 4 * 4
    assert {(row["rule"], row["resists"]) for row in rows if row["num_liars"]} == {
        ("mean", False),
        ("centered_clip", True),
        ("trimmed_mean", True),
        ("median", False),
    }
