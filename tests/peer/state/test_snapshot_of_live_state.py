"""A snapshot is written from the state itself: no step changes it meanwhile, and every snapshot is of its version."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from swarm.checkpoint.snapshots import Snapshot, SnapshotStore, kept_states
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.ids import StageIndex
from swarm.core.state.stage_chain import StageChain
from tests.swarm_in_process import manifest_of, swarm_in_process

RUN: dict[str, dict[str, Any]] = {
    "optimizer": {"total_steps": 6},
    "limits": {"founders_per_stage": 1},
    "checkpoint": {"every_steps": 6, "snapshot_every": 1},
}


def test_no_step_is_taken_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, lately = SnapshotStore._write, threading.Event()
    seen: list[tuple[int, bool]] = []

    def slowly(store: SnapshotStore, state: StageState, chain: StageChain) -> Snapshot:
        """As a slow disk does: longer than steps take here."""
        before = state_digest(state)
        lately.wait(0.3)
        seen.append((state.version, state_digest(state) == before))
        return write(store, state, chain)

    monkeypatch.setattr(SnapshotStore, "_write", slowly)

    async def train() -> None:
        async with swarm_in_process(manifest_of(**RUN), tmp_path, peers=(1, 1), evaluate_tokens=32) as swarm:
            await swarm.finished()
            for stage in (0, 1):
                peer = swarm.of_stage(stage)[0]
                layout = peer.steps.replica.layout
                (folder,) = (peer.daemon.volunteer.folder / "runs").glob("*/snapshots-*")
                found = [kept.load(layout) for kept in kept_states(folder, StageIndex(stage))]
                assert [state.version for state in found if state is not None] == [6, 5, 4]
                whole = state_digest(peer.steps.replica.state)
                assert [state_digest(state) == whole for state in found if state is not None] == [True, False, False]

    asyncio.run(train())
    assert sorted(seen) == [(version, True) for version in range(7) for _ in range(2)]
