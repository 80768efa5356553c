"""A swarm whose peers send less than a byte a value: replicas stay one, and each peer keeps what it owes to itself."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.round.work import ContributionEncoder
from peer.state.replica import StageReplica
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.ids import MicrobatchId, Step
from swarm.core.round.contribution import Work
from swarm.core.settings import AveragingCodecName
from swarm.model.stage import StageModel
from swarm.optim.exact import ExactOptimizer
from tests.swarm_in_process import manifest_of, prepare, swarm_in_process

STEPS = 4


def trained(
    folder: Path, codecs: dict[str, str], *, delay: int = 0, subspace: int = 1
) -> tuple[list[list[StageReplica]], dict[str, Any]]:
    """The replicas of each stage of a finished run, and the host's report."""
    manifest = manifest_of(
        model={"subspace": subspace},
        codecs=codecs,
        averaging={"delay": delay, "sync_steps": 1},
        optimizer={"total_steps": STEPS},
        checkpoint={"every_steps": STEPS, "snapshot_every": STEPS},
        limits={"founders_per_stage": 2},
    )

    async def train() -> tuple[list[list[StageReplica]], dict[str, Any]]:
        async with swarm_in_process(manifest, folder, peers=(2, 2)) as swarm:
            report = await swarm.finished()
            stages = [[peer.steps.replica for peer in swarm.of_stage(stage)] for stage in range(2)]
            return stages, report

    return asyncio.run(train())


@pytest.mark.parametrize(
    ("averaging", "delay", "subspace"),
    [("topk", 0, 4), *(pytest.param(*case, marks=pytest.mark.soak) for case in (("int4", 0, 1), ("topk", 1, 1)))],
)
def test_replicas_are_byte_identical_when_contributions_are_low_bit(
    averaging: AveragingCodecName, delay: int, subspace: int, tmp_path: Path
) -> None:
    codecs = {"averaging": averaging, "activations": "int4", "activation_gradients": "int4"}
    stages, report = trained(tmp_path, codecs, delay=delay, subspace=subspace)
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
    for replicas in stages:
        assert [replica.version for replica in replicas] == [STEPS, STEPS]
        assert len({state_digest(replica.state) for replica in replicas}) == 1
        residuals = [replica.residual for replica in replicas if replica.residual is not None]
        assert len({residual.digest() for residual in residuals}) == 2, "each peer owes what it left unsaid itself"
        assert any(residual.values.any() for residual in residuals)


def test_residual_waits_while_there_is_no_work_and_goes_with_a_state_from_elsewhere(tmp_path: Path) -> None:
    run = prepare(manifest_of(codecs={"averaging": "topk"}), tmp_path)
    model = StageModel(run.settings.model, 0)
    layout = model.layout
    optimizer = ExactOptimizer.of(run.settings.optimizer, layout)
    weights = np.full(layout.num_values, 0.5, dtype=np.float32)
    state = StageState(0, layout, weights, dict(optimizer.state_arrays()), optimizer.scalars)
    replica = StageReplica(run.settings, model, state, clip_norm=1.0)
    assert replica.residual is not None
    seeds = [bytes([part]) * 32 for part in range(replica.num_parts)]
    held = replica.sum_of(Step(0))
    held.gradient.flat[::3] = 2.0
    held.gradient.flat[1::3] = 1.0
    replica.record(Step(0), Work(MicrobatchId(0), 0, replica.version, 32, bytes(32), bytes(32)))
    parts, _ = ContributionEncoder(replica).encode(Step(0), replica.close(Step(0)), seeds)
    assert len(parts) == replica.num_parts
    owed = replica.residual.digest()
    assert replica.residual.values.any()

    assert ContributionEncoder(replica).encode(Step(1), replica.close(Step(1)), seeds) == ([], [])
    assert replica.residual.digest() == owed
    replica.restore(state, era=0)
    assert replica.residual is not None
    assert not replica.residual.values.any()
