"""A grinding peer in a swarm: what it writes changes no draw, and another value than its chain has keeps it out."""

import asyncio
from pathlib import Path

from peer.adversary.strengths import GROUND_VALUE_EVERY
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.ids import PeerId
from swarm.core.round.contribution import MAX_CHARGES, Result
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process


def test_a_grinding_peer_leads_and_reduces_in_its_turn_and_is_left_out_where_its_value_is_another(
    tmp_path: Path,
) -> None:
    manifest = manifest_of(
        run={"trust": "public"},
        limits={"founders_per_stage": 3},
        audits={"agreements_to_promote": 0, "hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 0.0},
        optimizer={"total_steps": GROUND_VALUE_EVERY + 2},
        checkpoint={"every_steps": 64, "snapshot_every": 4},
    )
    results: dict[int, Result] = {}
    leaders: dict[int, tuple[PeerId, ...]] = {}
    said: dict[int, int] = {}

    async def train() -> list[str]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "grinding@0"}) as swarm:

            def keep(steps: StageSteps, applied: Applied) -> None:
                if steps.chain.stage == 1:
                    step = int(applied.result.roster.step)
                    results[step] = applied.result
                    leaders[step + 1] = applied.chain.leaders(applied.chain.version)  # type: ignore[arg-type]
                    said[step + 1] = applied.chain.basis.said.num_versions

            swarm.on_applied.append(keep)
            await swarm.finished(timeout_s=90.0)
            return [event["event"] for event in swarm.events]

    events = asyncio.run(train())
    liar = identity_of(5).peer_id
    honest = {identity_of(number).peer_id for number in (3, 4)}
    assert not {"banned", "quarantined"} & {*events}
    ground = GROUND_VALUE_EVERY - 1
    for step, result in results.items():
        roster = result.roster
        made = roster.contribution_of(liar)
        if step == ground:
            assert made is None, "its value is not on its chain"
            assert liar in [left.peer_id for left in roster.leaves]
            assert honest & {one.peer_id for one in roster.contributions}, "the others go on without it"
        elif made is not None:
            assert len(made.charges) == MAX_CHARGES, "it has written what it may"
        if step > 0 and step in leaders:
            order = [*results[step - 1].roster.members]
            first = step % len(order)
            assert leaders[step][: len(order)] == (*order[first:], *order[:first])
    assert any(roster.contribution_of(liar) for roster in (result.roster for result in results.values()))
    assert max(said.values()) >= ground - 2, "the host's word is on the rosters, a version or two later"
