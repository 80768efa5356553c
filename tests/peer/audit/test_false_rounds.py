"""Rounds with a false reducer, leader or voter: what it signs against itself bans it, what it leaves out is bounded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.round.contribution import Result
from swarm.core.round.words import Reduction
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.audit.evidence import Evidence
from verification.kinds.equivocation import CastVote, Equivocation
from verification.kinds.protocol_violation import ProtocolViolation
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

STEPS = 16
LIAR = identity_of(5).peer_id
"""The third of stage 1, where stage 0 has three peers."""


def unaudited(total_steps: int, **tables: dict[str, Any]) -> str:
    """A run of two stages with three replicas each, in which nobody audits: what is found, messages show."""
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "friends"},
        "audits": {"hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 0.0},
        "optimizer": {"total_steps": total_steps},
        "batch": {"target_tokens": 12 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": total_steps, "snapshot_every": total_steps},
        "deadlines": {"call_s": 1.0},
    }
    return manifest_of(**named | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def bans(folder: Path, peers: tuple[int, int], attacks: dict[tuple[int, int], str]) -> dict[str, Evidence]:
    """Evidence against each of the attackers, all of which are banned, and nobody else."""
    checkpoint, batch = {"every_steps": 400, "snapshot_every": 2}, {"target_tokens": 6 * 32}
    manifest = unaudited(400, checkpoint=checkpoint, batch=batch)

    async def train() -> InProcessSwarm:
        async with swarm_in_process(manifest, folder, peers=peers, attacks=attacks) as swarm:
            await swarm.until(lambda: len(events(swarm, "banned")) == len(attacks), timeout_s=90.0)
            await swarm.until_version(swarm.host.progress.done_versions() + 2, timeout_s=60.0)
            return swarm

    swarm = asyncio.run(train())
    assert events(swarm, "acquitted") == events(swarm, "dismissed") == events(swarm, "quarantined") == []
    found = {}
    for banned in events(swarm, "banned"):
        evidence = evidence_in(Path(banned["evidence"]))
        verdict = judge(evidence, run_key=swarm.run.run_key.peer_id)
        assert verdict.guilty
        assert verdict.accused == banned["peer_id"]
        found[banned["peer_id"]] = evidence
    return found


def test_two_words_for_one_part_two_votes_in_one_phase_and_another_state_are_bans(tmp_path: Path) -> None:
    attacks = {(0, 2): "equivocating_reducer@2", (0, 3): "wrong_state@3", (1, 2): "two_votes@2"}
    found = bans(tmp_path, (4, 3), attacks)
    kinds = {peer: made.kind for peer, made in found.items()}
    reducer, stating, voter = (identity_of(number).peer_id for number in (2, 3, 6))
    assert kinds == {reducer: "equivocation", stating: "step_fraud", voter: "equivocation"}
    said = {peer: Equivocation.from_evidence(found[peer]).one for peer in (reducer, voter)}
    assert isinstance(said[reducer], Reduction)
    assert isinstance(said[voter], CastVote)


def rounds_of(
    folder: Path, attack: str, *, steps: int = STEPS, num_peers: int = 3
) -> tuple[list[Result], dict[str, Any]]:
    """All results of stage 1, of so many peers, whose third attacks, and the host's report; nobody is punished."""
    results: dict[int, Result] = {}

    async def train() -> dict[str, Any]:
        async with swarm_in_process(unaudited(steps), folder, peers=(3, num_peers), attacks={(1, 2): attack}) as swarm:
            await swarm.until_version(1)

            def keep(steps: StageSteps, applied: Applied) -> None:
                if steps.chain.stage == 1:
                    results[int(applied.result.roster.step)] = applied.result

            swarm.on_applied.append(keep)
            report = await swarm.finished(timeout_s=280.0)
            punished = [events(swarm, kind) for kind in ("banned", "quarantined", "acquitted", "dismissed")]
            assert punished == [[], [], [], []]
            return report

    report = asyncio.run(train())
    assert report["steps"] == steps
    (digests,) = [set(replicas.values()) for replicas in [report["state_digests"]["1"]]]
    assert len(digests) == 1
    return [results[step] for step in sorted(results)], report


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_reducer_that_omits_a_contributor_is_banned_by_the_victims_own_bytes(tmp_path: Path) -> None:
    (evidence,) = bans(tmp_path, (3, 3), {(1, 2): "omitting_reducer@2"}).values()
    case = ProtocolViolation.from_evidence(evidence)
    assert isinstance(case.message, Reduction)
    assert case.message.malformed[case.part - 1].peer_id != LIAR


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_leader_that_omits_a_member_leaves_out_nobody_and_its_turn_is_over(tmp_path: Path) -> None:
    results, _ = rounds_of(tmp_path, "omitting_leader@2", steps=2 * STEPS, num_peers=4)
    assert any(result.roster.view > 0 for result in results), "it led nothing: the test shows nothing"
    assert not any(result.roster.leaves for result in results)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_leader_with_two_rosters_in_one_view_delays_its_own_rounds_alone(tmp_path: Path) -> None:
    """Whom the other roster is without votes for none but the first, and says so."""
    results, _ = rounds_of(tmp_path, "equivocating_leader@2")
    assert all(len(result.roster.contributions) >= 1 for result in results)
    later = [result for result in results if result.roster.view > 0]
    led = [result for result in results[2:] if result.roster.leader == LIAR]
    assert later or led, "it led nothing: the test shows nothing"
    assert len(later) <= STEPS * 3 // 4, "it leads a third of them: 13 of 16 by chance are one run in 8000"
