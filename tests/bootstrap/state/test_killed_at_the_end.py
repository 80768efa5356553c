"""A host that was killed when its run's last checkpoint was on disk, or whose disk was full then, ends the run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootstrap.state.archivist import Archivist
from swarm.checkpoint.record import CheckpointRecord, files_below
from tests.swarm_in_process import manifest_of, swarm_in_process

LAST = 8


def test_the_last_checkpoint_is_signed_and_evaluated_and_peers_are_told_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could pull the model of a run of weeks, and its peers waited for ever."""
    every = {"every_steps": 4, "snapshot_every": 4}
    manifest = manifest_of(optimizer={"total_steps": LAST}, checkpoint=every, limits={"founders_per_stage": 1})
    signs = Archivist._signed

    async def scenario() -> None:
        killed = asyncio.Event()

        async def held_up(
            archivist: Archivist, path: Path, version: int, anchored: bool, digests: Sequence[bytes]
        ) -> Path:
            if version == LAST:
                killed.set()
                await asyncio.get_running_loop().create_future()
            return await signs(archivist, path, version, anchored, digests)

        monkeypatch.setattr(Archivist, "_signed", held_up)
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1)) as swarm:
            await asyncio.wait_for(killed.wait(), 60.0)
            await swarm.kill_host()
            monkeypatch.setattr(Archivist, "_signed", signs)
            await swarm.restart_host()
            assert swarm.run.version == LAST
            report = await swarm.finished()
            assert report["held_out_loss"]["end"] is not None
            assert all(peer.task.done() for peer in swarm.peers)
            record = CheckpointRecord.from_value(swarm.host.books.checkpoints[LAST])
            record.check(run_id=swarm.run.run_id, run_key=swarm.run.run_key.peer_id)
            assert record.anchored
            assert record.files == files_below(Path(report["checkpoint"]))

    asyncio.run(scenario())


def test_a_disk_that_is_full_when_a_checkpoint_is_signed_has_it_written_once_and_signed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was visible already, and written once more the disk's error ended the host."""
    manifest = manifest_of(optimizer={"total_steps": LAST}, limits={"founders_per_stage": 1})
    signs, failures = Archivist._signed, ["no space left on device"] * 2

    async def full(archivist: Archivist, path: Path, version: int, anchored: bool, digests: Sequence[bytes]) -> Path:
        if failures:
            raise OSError(failures.pop())
        return await signs(archivist, path, version, anchored, digests)

    monkeypatch.setattr(Archivist, "_signed", full)
    monkeypatch.setattr("bootstrap.state.archivist.TRY_AGAIN_S", 0.05)

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1)) as swarm:
            report = await swarm.finished()
            assert not failures
            assert report["steps"] == LAST
            assert CheckpointRecord.from_value(swarm.host.books.checkpoints[LAST]).version == LAST

    asyncio.run(scenario())
