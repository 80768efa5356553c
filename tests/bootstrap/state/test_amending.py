"""A run's settings are changed while it goes on: an amended run is what a run of these settings would be from there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.whole_model import WholeModel, host_windows
from bootstrap.program.ledger import Ledger
from bootstrap.state.amending import Amending
from bootstrap.state.run_folder import PreparedRun, archived
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.checkpoint.archive import checkpoint_path, read_checkpoint
from swarm.checkpoint.state import StageState, arrays_of
from swarm.core.errors import SettingsError
from swarm.core.ids import MicrobatchId
from swarm.data.batches import BatchReader
from tests.branches import Branches
from tests.swarm_in_process import InProcessSwarm, manifest_of, prepare, swarm_in_process
from verification.audit.tolerance import bounds_for, bounds_in_force

AT = 4
BAR = 1e-4
"""Relative L2 error of each parameter, and error of the loss."""
EXACT: dict[str, dict[str, Any]] = {
    "codecs": {"activations": "fp32", "activation_gradients": "fp32", "averaging": "fp32"},
    "averaging": {"rule": "mean"},
    "checkpoint": {"every_steps": 40, "snapshot_every": 4},
}


def trained_states(run: PreparedRun, version: int) -> list[StageState]:
    """As the host archived them, cut as the run is now."""
    return archived(read_checkpoint(checkpoint_path(run.folder.checkpoints, version)), run.settings)


def reference_of(first: PreparedRun, now: PreparedRun, *, steps: int) -> WholeModel:
    """The same microbatches trained in one process, under the first settings up to `AT` and the present ones since."""
    ledger = Ledger(now.folder.ledger)
    results: list[Any] = [event.facts for event in ledger.events("result")]
    ledger.close()
    ids = {facts["step"]: facts["ids"] for facts in results if facts["stage"] == 0}
    assert sorted(ids) == list(range(steps)), "a step was taken twice, or not at all"
    reader, whole = (
        BatchReader(first.settings, first.data.train()),
        WholeModel(first.settings, [state.weights for state in first.states]),
    )
    for step in range(steps):
        whole.settings = first.settings if step < AT else now.settings
        whole.train_step(step, (reader.batch(MicrobatchId(number)) for number in ids[step]))
    return whole


@contextlib.asynccontextmanager
async def paused_at(swarm: InProcessSwarm, version: int) -> AsyncIterator[None]:
    """Its owners pause the peers at that version, or one later."""
    await swarm.until_version(version)
    for peer in swarm.peers:
        peer.daemon.shared.permit.withhold("the test")
    yield
    for peer in swarm.peers:
        peer.daemon.shared.permit.give()


def has_happened(swarm: InProcessSwarm, event: str) -> bool:
    return any(one["event"] == event for one in swarm.events)


REFUSED = (
    (["optimizer.total_steps=2"], str(AT), "total_steps = 2 is not beyond version 4"),
    (["optimizer.total_steps=50"], "1", "--at 1: the stages are at version"),
    (["optimizer.total_steps=50"], "9", "the run ends at 8"),
    (["optimizer.total_steps=50"], "later", "--at later: give a version"),
    (["limits.max_peers_per_stage=127", "batch.target_tokens=1000000"], str(AT), "fits into a message"),
)


async def check_refusals(amending: Amending) -> None:
    """What cannot be is refused before anything is signed."""
    for changes, at, said in REFUSED:
        with pytest.raises(SettingsError, match=said):
            await amending.ask(changes, at)
    assert amending.pending is None


def test_an_amended_run_ends_as_one_process_does_that_changes_the_same_settings(tmp_path: Path) -> None:
    manifest = manifest_of(**EXACT, optimizer={"total_steps": 8, "max_norm": 1e6, "learning_rate": 0.01})
    first = prepare(manifest, tmp_path)

    async def scenario() -> dict[str, Any]:
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1)) as swarm:
            changes = ["optimizer.total_steps=10", "optimizer.learning_rate=0.005", "batch.target_tokens=64"]
            changes.append("audits.gradient_bounds=1.5")
            with pytest.raises(SettingsError, match="the stages have not begun"):
                await swarm.host.amending.offer(changes, "soonest")
            async with paused_at(swarm, 1):
                await check_refusals(swarm.host.amending)
                lines = await swarm.host.amending.offer([*changes, "model.stages=3"], str(AT))
                said = await swarm.host.amending.ask([*changes, "model.stages=3"], str(AT))
            assert lines[0] == "audits.gradient_bounds: 1.0 -> 1.5"
            assert lines[2] == "model.stage_layers: [2, 2] -> [1, 2, 1]"
            for words, line in zip(("from version 4 on", "are cut anew", "machine alone"), lines[5:], strict=False):
                assert words in line
            assert said == "the run is amended at version 4; 2 of 2 peers have heard it"
            with pytest.raises(SettingsError, match="being amended already"):
                await swarm.host.amending.offer(["optimizer.total_steps=20"], "soonest")
            await swarm.until(lambda: has_happened(swarm, "amended"))
            await swarm.add_peer(2)
            report = await swarm.finished()
            run = swarm.run
        assert (run.settings.model.stage_layers, len(run.signed.amendments)) == (((0, 1), (1, 3), (3, 4)), 1)
        assert (
            bounds_in_force(run.settings, "fp32", "gradient").fraud
            == 1.5 * bounds_for("fp32", "fp32", "gradient").fraud
        )
        whole = reference_of(first, run, steps=10)
        for state in trained_states(run, 10):
            for name, trained in state.layout.views(state.weights).items():
                wanted = whole.parameters[name].detach().numpy()
                assert np.linalg.norm(trained - wanted) <= BAR * np.linalg.norm(wanted), name
        held_out = host_windows(run.settings, run.data.held_out(), evaluate_tokens=2048)
        assert abs(report["held_out_loss"]["end"] - whole.held_out_loss(held_out)) < BAR
        return report

    report = asyncio.run(scenario())
    assert report["steps"] == 10


@pytest.mark.soak
def test_a_run_that_is_lengthened_while_its_host_dies_is_byte_for_byte_the_longer_run(tmp_path: Path) -> None:
    schedule = {"warmup_steps": 0, "final_learning_rate_share": 1.0, "learning_rate": 0.01}
    batch = {"microbatch_size": 2, "target_tokens": 32}

    async def trained(folder: Path, total_steps: int, *, amended: bool) -> list[StageState]:
        manifest = manifest_of(**EXACT, batch=batch, optimizer={**schedule, "total_steps": total_steps})
        async with swarm_in_process(manifest, folder, peers=(1, 1)) as swarm:
            if amended:
                stand, reached = set[int](), asyncio.Event()

                def look(steps: StageSteps, applied: Applied) -> None:
                    stand.update({applied.chain.stage} if applied.chain.version == AT else ())
                    if len(stand) == 2:
                        reached.set()

                swarm.on_applied.append(look)
                async with paused_at(swarm, 1):
                    await swarm.host.amending.ask(["optimizer.total_steps=8"], str(AT))
                    await swarm.kill_host()
                async with asyncio.timeout(30):
                    await reached.wait()
                await swarm.restart_host()
            await swarm.finished()
            return trained_states(swarm.run, 8)

    one = asyncio.run(trained(tmp_path / "amended", 6, amended=True))
    other = asyncio.run(trained(tmp_path / "longer", 8, amended=False))
    assert Branches.read(tmp_path / "amended" / "host" / "ledger.sqlite").breaches() == []
    for amended, longer in zip(one, other, strict=True):
        assert amended.scalars == longer.scalars
        assert amended.certified_norms == longer.certified_norms
        for (name, found), (_, wanted) in zip(arrays_of(amended), arrays_of(longer), strict=True):
            assert found.tobytes() == wanted.tobytes(), name
