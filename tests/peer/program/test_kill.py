"""A real peer is killed at a named moment: the run ends normally, loses what it may, and leaves nothing behind."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.peer.state.dying import MOMENTS
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes

IN_ROUND = ("closing", "closed", "committed", "ballot", "vote", "roster", "part", "aggregated", "result", "step")
IN_EACH_STAGE = {
    0: ("forward", "backward", *IN_ROUND),
    1: ("loss", "loss_backward", *IN_ROUND),
}
EXPORT = ("snapshot", "donating")
STEPS = 12
MICROBATCHES = 8  # target_tokens / (microbatch_size * sequence_length)
IN_FLIGHT = 2


def check_losses(report: dict[str, Any], *, kills: int, delay: int) -> None:
    """Invariant 8: a kill costs at most the peer's own ids in flight (stage 0), its own unaveraged sum, and no round.

    With `delay` = 1 two steps are open at a time, so there are sums of two.
    """
    assert report["steps"] == STEPS
    ids = [number for step in report["microbatches"].values() for number in step]
    assert len(ids) == len(set(ids)), "a sample was used twice"
    short = [step for step, numbers in report["microbatches"].items() if len(numbers) < MICROBATCHES]
    assert len(short) <= kills * (1 + delay), f"steps {short} are short of microbatches"
    # What the dead peer had counted or had in flight was done for nothing elsewhere, at most one step's worth.
    assert report["lost_microbatches"] <= kills * (1 + delay) * (MICROBATCHES + IN_FLIGHT)
    assert report["lost_contributions"] <= kills
    for stage, digests in report["state_digests"].items():
        assert len(set(digests.values())) == 1, f"replicas of stage {stage} differ"


def run_and_kill(zygote: Zygote, root: Path, *, stage: int, moment: str, count: int, delay: int) -> None:
    victim = f"p{stage}a"
    with ProcessSwarm(zygote, root, steps=STEPS, delay=delay) as swarm:
        swarm.start_host()
        swarm.start_founders(**{victim: {"moment": moment, "count": count}})
        report = swarm.finish()
        died = zygote.has_ended(swarm.peers[victim]) and zygote.exit_code(swarm.peers[victim], timeout_s=1) == -9
        for name, pid in swarm.peers.items():
            if name != victim:
                assert zygote.exit_code(pid, timeout_s=30) == 0, f"{name} did not end well"
        check_losses(report, kills=int(died), delay=delay)
        assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
    assert zygote.leftovers() == []


@pytest.mark.parametrize(
    ("stage", "moment", "count", "delay"),
    [
        pytest.param(0, "forward", 9, 0, marks=pytest.mark.soak),
        pytest.param(0, "backward", 7, 1, marks=pytest.mark.soak),
        pytest.param(1, "loss", 9, 0, marks=pytest.mark.soak),
        pytest.param(1, "part", 2, 0, marks=pytest.mark.soak),
        (0, "result", 2, 1),
        pytest.param(1, "snapshot", 1, 0, marks=pytest.mark.soak),
    ],
)
def test_a_run_survives_a_peer_killed(
    zygote: Zygote, tmp_path: Path, stage: int, moment: str, count: int, delay: int
) -> None:
    run_and_kill(zygote, tmp_path, stage=stage, moment=moment, count=count, delay=delay)


@pytest.mark.soak
def test_a_run_goes_on_when_so_many_die_at_once_that_nothing_can_be_certified(zygote: Zygote, tmp_path: Path) -> None:
    """One of two peers of each stage: three of five voters are left, and four certify. The run key lets them go on."""
    with ProcessSwarm(zygote, tmp_path, steps=STEPS) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=3)
        for name in ("p0a", "p1a"):
            swarm.kill(name)
        changed = swarm.wait_for("reconfigured", timeout_s=60)
        assert len(changed["voters"]) == 3
        check_losses(swarm.finish(), kills=2, delay=0)
    assert zygote.leftovers() == []


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_told_to_leave_finishes_its_work_first(zygote: Zygote, tmp_path: Path, stage: int) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=60, every=20, founders=2) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=4)
        os.kill(swarm.peers[f"p{stage}a"], signal.SIGTERM)
        assert zygote.exit_code(swarm.peers[f"p{stage}a"], timeout_s=30) == 0
        report = swarm.finish()
        assert report["steps"] == 60
        assert {len(ids) for ids in report["microbatches"].values()} == {MICROBATCHES}
        assert report["lost_microbatches"] == 0
        assert report["lost_contributions"] <= 1
    assert zygote.leftovers() == []


@pytest.mark.soak
@pytest.mark.drawn(16)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("phase", ["forward", "backward", "round", "export"])
def test_a_run_survives_any_kill(zygote: Zygote, tmp_path: Path, phase: str, seed: int) -> None:
    """Twenty seeds for each phase choose stage, exact moment, how often it passes first, and the delay."""
    rng = random.Random(f"{phase}/{seed}")
    stage = rng.randrange(2)
    moments = {
        "forward": ("forward", "loss")[stage : stage + 1],
        "backward": ("backward", "loss_backward")[stage : stage + 1],
        "round": IN_EACH_STAGE[stage][2:],
        "export": EXPORT,
    }[phase]
    assert set(moments) <= set(MOMENTS)
    count = rng.randint(1, 2) if phase == "export" else rng.randint(1, 5 if phase == "round" else 20)
    run_and_kill(zygote, tmp_path, stage=stage, moment=rng.choice(moments), count=count, delay=rng.randrange(2))
