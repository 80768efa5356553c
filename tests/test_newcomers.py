"""Newcomers in a public swarm: whoever replays what it drew becomes a member, and nobody else comes near."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process

pytestmark = pytest.mark.processes


def public(**tables: dict[str, Any]) -> str:
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "public"},
        "audits": {"agreements_to_promote": 4},
        "optimizer": {"total_steps": 400},
        "limits": {"founders_per_stage": 2},
        "checkpoint": {"every_steps": 400, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_newcomer_trains_once_its_replays_agree(tmp_path: Path, stage: int) -> None:
    async def train() -> None:
        async with swarm_in_process(public(), tmp_path, peers=(2, 2)) as swarm:
            await swarm.until_version(2)
            newcomer = await swarm.add_peer(stage)
            await swarm.until(lambda: bool(events(swarm, "promoted")))
            promoted = events(swarm, "promoted")
            assert [event["peer_id"] for event in promoted] == [newcomer.peer_id]
            joined = events(swarm, "joined")
            assert [event["peer_id"] for event in joined if event["peer_id"] == newcomer.peer_id] == []
            await swarm.until(lambda: newcomer.peer_id in [event["peer_id"] for event in events(swarm, "joined")])
            version = swarm.coordinator.progress.done_versions()
            await swarm.until_version(version + 3)
            assert newcomer.peer_id in newcomer.rounds.chain.members

    asyncio.run(train())
