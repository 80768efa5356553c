"""A grinding peer in a swarm: what it writes changes no draw, and another value than its chain has keeps it out."""

import asyncio
from pathlib import Path

import pytest

from peer.adversary.strengths import GROUND_VALUE_EVERY
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.round.contribution import MAX_CHARGES, Result
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process

LAST = 2 * GROUND_VALUE_EVERY
"""It trains so long at least, and until one of the others has seen a value that is not on the chain: not in steps that
the liar leads itself, nor where its contribution comes late."""


@pytest.mark.soak
def test_a_grinding_peer_leads_and_reduces_in_its_turn_and_is_left_out_where_its_value_is_another(
    tmp_path: Path,
) -> None:
    manifest = manifest_of(
        run={"trust": "public"},
        limits={"founders_per_stage": 3},
        audits={"agreements_to_promote": 0, "hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 0.0},
        optimizer={"total_steps": 1000},
        checkpoint={"every_steps": 64, "snapshot_every": 4},
    )
    results: dict[int, Result] = {}
    leaders: dict[int, tuple[PeerId, ...]] = {}
    said: dict[int, int] = {}

    async def train() -> list[tuple[str, str]]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "grinding@0"}) as swarm:

            def keep(steps: StageSteps, applied: Applied) -> None:
                if steps.chain.stage == 1:
                    step = int(applied.result.roster.step)
                    results[step] = applied.result
                    leaders[step + 1] = applied.chain.leaders(applied.chain.version)  # type: ignore[arg-type]
                    said[step + 1] = applied.chain.basis.said.num_versions

            swarm.on_applied.append(keep)
            honest = [peer.daemon.standing for peer in swarm.of_stage(1)[:2]]

            def looks_closer() -> bool:
                now = StageIndex(1), Version(swarm.host.progress.done_versions())
                return any(one.budget_factor(identity_of(5).peer_id, *now) > 1.0 for one in honest)

            await swarm.until(lambda: swarm.host.progress.done_versions() > LAST and looks_closer(), timeout_s=90.0)
            shut_out = [event for event in swarm.events if event["event"] in ("banned", "quarantined")]
            return [(event["peer_id"], event["kind"]) for event in shut_out]

    shut_out = asyncio.run(train())
    liar = identity_of(5).peer_id
    assert {*shut_out} <= {(liar, "false_accusation")}, "three of the charges that it writes may have lapsed"
    honest = {identity_of(number).peer_id for number in (3, 4)}
    for step, result in results.items():
        roster = result.roster
        made = roster.contribution_of(liar)
        if step % GROUND_VALUE_EVERY == GROUND_VALUE_EVERY - 1:
            assert made is None, "its value is not on its chain"
            assert honest & {one.peer_id for one in roster.contributions}, "the others go on without it"
        elif made is not None:
            assert len(made.charges) == MAX_CHARGES, "it has written what it may"
    first = [order[0] for _, order in sorted(leaders.items())]
    assert first.count(liar) <= len(first) / 3 + 1, "it leads in its turn, by the work that it has done"
    assert any(roster.contribution_of(liar) for roster in (result.roster for result in results.values()))
    assert max(said.values()) >= LAST - 3, "the host's word is on the rosters, a version or two later"
