"""A swarm is cut into equal halves, in one process: the half with the run key goes on, the other pauses and follows."""

import asyncio
from pathlib import Path
from typing import Any

from tests.swarm_in_process import manifest_of, swarm_in_process

MANIFEST = manifest_of(
    optimizer={"total_steps": 16},
    checkpoint={"every_steps": 16, "snapshot_every": 8},
    limits={"founders_per_stage": 2},
    deadlines={"call_s": 1.0, "hop_s": 10.0, "step_s": 10.0, "straggler_s": 0.5, "lease_s": 1.5},
)
IN_FLIGHT = 1
"""A round may have been certified when the line broke."""


async def scenario(folder: Path) -> dict[str, Any]:
    async with swarm_in_process(MANIFEST, folder, peers=(2, 2)) as swarm:
        await swarm.until_version(3)
        goers, pausers = ([swarm.of_stage(stage)[side] for stage in (0, 1)] for side in (0, 1))
        with_host = [swarm.run.host_key.peer_id, *(peer.peer_id for peer in goers)]
        for one in with_host:
            for other in pausers:
                swarm.network.cut(one, other.peer_id)
        at_cut = [peer.steps.version for peer in pausers]
        await swarm.until_version(max(at_cut) + 4, timeout_s=40.0)
        # By the run key's word, or by votes where the last roster already named none of the other half as a neighbour.
        assert all(peer.steps.version >= max(at_cut) + 4 for peer in goers)
        for peer, version in zip(pausers, at_cut, strict=True):
            assert peer.steps.version <= version + IN_FLIGHT, "both halves have gone on"
        goers[0].daemon.shared.permit.withhold("for the test")  # else the run is over before the others are back
        for one in with_host:
            for other in pausers:
                swarm.network.heal(one, other.peer_id)
        for peer, ahead in zip(pausers, goers, strict=True):
            while peer.steps.version < ahead.steps.version:  # it may still end a step that was under way
                assert await peer.steps.wait_for_version(int(ahead.steps.version), timeout_s=120.0)
            if peer.steps.version > ahead.steps.version:
                assert await ahead.steps.wait_for_version(int(peer.steps.version), timeout_s=120.0)
            assert peer.steps.chain.name == ahead.steps.chain.name
        goers[0].daemon.shared.permit.give()
        return await swarm.finished(timeout_s=60.0)


def test_of_two_halves_one_goes_on_and_the_other_follows(tmp_path: Path) -> None:
    report = asyncio.run(scenario(tmp_path))
    used = [number for step in range(report["steps"]) for number in report["microbatches"][str(step)]]
    assert len(used) == len(set(used)), "a sample was used twice"
    for digests in report["state_digests"].values():
        assert len(digests) == 2
        assert len(set(digests.values())) == 1
