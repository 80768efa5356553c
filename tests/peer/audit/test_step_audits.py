"""Members state their states and hold each other's against their own: who lies is banned, who is broken mends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.audit.steps import StepAuditCounters
from swarm.core.ids import StageIndex
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

LIAR = identity_of(5).peer_id
"""The third of stage 1."""


def watched(total_steps: int, **tables: dict[str, Any]) -> str:
    """A run of two stages with three replicas each, where nothing is audited but states, at every second version."""
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "friends"},
        "audits": {"hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 0.0},
        "optimizer": {"total_steps": total_steps},
        "batch": {"target_tokens": 12 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": total_steps, "snapshot_every": 2},
    }
    return manifest_of(**named | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def counters(swarm: InProcessSwarm) -> list[StepAuditCounters]:
    return [peer.verifying.step_auditor.counters for peer in swarm.peers]


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_who_states_another_state_is_banned_and_the_stage_is_anchored_again(tmp_path: Path, optimizer: str) -> None:
    """One of three lies, which is too many for the others to agree without it: until its lie is proved."""

    async def train() -> InProcessSwarm:
        manifest = watched(400, optimizer={"name": optimizer, "total_steps": 400})
        attacks = {(1, 2): "wrong_state@3"}
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks=attacks) as swarm:
            await swarm.until(lambda: bool(events(swarm, "banned")), timeout_s=90.0)
            justice = swarm.host.justice
            version = swarm.host.progress.done_versions()
            late = version + 4 - version % 2
            await swarm.until(lambda: justice.anchor_of(StageIndex(1), late) is not None, timeout_s=60.0)
            return swarm

    swarm = asyncio.run(train())
    (banned,) = events(swarm, "banned")
    assert (banned["peer_id"], banned["kind"]) == (LIAR, "step_fraud")
    evidence = evidence_in(Path(banned["evidence"]))
    verdict = judge(evidence, run_key=swarm.run.run_key.peer_id)
    assert verdict.guilty
    assert verdict.accused == LIAR
    assert events(swarm, "acquitted") == events(swarm, "dismissed") == events(swarm, "quarantined") == []


@pytest.mark.soak
def test_a_broken_machine_takes_its_word_back_and_mends_before_anybody_accuses_it(tmp_path: Path) -> None:
    async def train() -> InProcessSwarm:
        async with swarm_in_process(watched(400), tmp_path, peers=(3, 3)) as swarm:
            await swarm.until_version(3)
            broken = swarm.of_stage(1)[2]
            broken.steps.replica.state.moments["first"][5] += 1.0
            auditor = broken.verifying.step_auditor
            version = broken.steps.version

            def has_mended() -> bool:
                newest = broken.steps.context.snapshots.latest()
                others = [peer.steps.context.snapshots for peer in swarm.of_stage(1)[:2]]
                return (
                    auditor.counters.own_faults >= 1
                    and newest is not None
                    and newest.chain.version > version + 4
                    and any(
                        held is not None and held.digest == newest.digest
                        for held in (store.get(int(newest.chain.version)) for store in others)
                    )
                )

            await swarm.until(has_mended, timeout_s=90.0)
            return swarm

    swarm = asyncio.run(train())
    assert events(swarm, "banned") == events(swarm, "quarantined") == events(swarm, "acquitted") == []


@pytest.mark.soak
def test_nobody_is_suspected_when_all_state_what_they_have(tmp_path: Path) -> None:
    async def train() -> InProcessSwarm:
        async with swarm_in_process(watched(12), tmp_path, peers=(3, 3)) as swarm:
            await swarm.finished()
            return swarm

    swarm = asyncio.run(train())
    found = counters(swarm)
    assert len(found) == 6
    assert sum(one.chunks + one.frauds + one.own_faults for one in found) == 0
    assert swarm.host.justice.anchor_of(StageIndex(1), 10) is not None
    assert events(swarm, "banned") == []
