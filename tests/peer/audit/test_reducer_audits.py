"""Reducers are audited to the bit in a running swarm: who reduces wrongly is banned, and nobody else is."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.audit.inquiry import AuditCounters
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

STEPS = 6
LIAR = identity_of(5).peer_id
"""The third of stage 1."""


def audited(**tables: dict[str, Any]) -> str:
    """A run of two stages with three replicas each, in which every reduced part is audited, and nothing else."""
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "friends"},
        "audits": {"hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 8.0},
        "optimizer": {"total_steps": STEPS},
        "batch": {"target_tokens": 12 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": 4, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


def run(manifest: str, folder: Path, attacks: dict[tuple[int, int], str]) -> tuple[InProcessSwarm, dict[str, Any]]:
    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        async with swarm_in_process(manifest, folder, peers=(3, 3), attacks=attacks) as swarm:
            return swarm, await swarm.finished()

    return asyncio.run(train())


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def auditors(swarm: InProcessSwarm, stage: int) -> list[AuditCounters]:
    return [peer.verifying.reducer_auditor.counters for peer in swarm.peers if peer.stage == stage]


@pytest.mark.parametrize("trust", [pytest.param("friends", marks=pytest.mark.soak), "public"])
def test_a_wrong_reducer_is_banned_and_the_others_go_on(tmp_path: Path, trust: str) -> None:
    manifest = audited(
        run={"trust": trust}, optimizer={"total_steps": 60}
    )  # who reduces is drawn: it takes what it takes

    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "wrong_reducer@2"}) as swarm:
            await swarm.until(lambda: bool(events(swarm, "banned")), timeout_s=90.0)
            await swarm.until_version(swarm.host.progress.done_versions() + 2, timeout_s=60.0)
            return swarm, events(swarm, "banned")[0]

    swarm, banned = asyncio.run(train())
    assert (banned["peer_id"], banned["kind"]) == (LIAR, "reducer_fraud")
    assert banned["step"] >= 2
    evidence = evidence_in(Path(banned["evidence"]))
    verdict = judge(evidence, run_key=swarm.run.run_key.peer_id)
    assert verdict.guilty
    assert verdict.accused == LIAR
    assert len(events(swarm, "banned")) == 1
    assert events(swarm, "acquitted") == events(swarm, "dismissed") == []


def test_an_input_that_its_contributor_does_not_show_comes_from_the_reducer(tmp_path: Path) -> None:
    swarm, _ = run(audited(), tmp_path, {(1, 2): "withholding@0"})
    honest = auditors(swarm, 1)[:2]
    assert sum(one.parts for one in honest) >= 1, "parts that the other one reduced from the silent one's input too"
    assert sum(one.debts for one in auditors(swarm, 0)) == 0
    assert events(swarm, "banned") == []


@pytest.mark.soak
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_nobody_is_accused_when_all_reduce_rightly_and_every_part_is_audited(tmp_path: Path, codec: str) -> None:
    swarm, report = run(audited(codecs={"averaging": codec}), tmp_path, {})
    assert report["steps"] == STEPS
    assert events(swarm, "banned") == events(swarm, "acquitted") == events(swarm, "dismissed") == []
    counters = auditors(swarm, 0) + auditors(swarm, 1)
    assert len(counters) == len(swarm.peers)
    assert sum(one.frauds + one.debts for one in counters) == 0
    assert sum(one.parts for one in counters) >= 2 * 2 * (STEPS - 3), "both others audit each part"
