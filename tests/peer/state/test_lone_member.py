"""The only member of a stage dies and comes back from its disk: the run goes on, and who is behind it catches up."""

import asyncio
from pathlib import Path

import pytest

from swarm.core.ids import Step
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process


def manifest(steps: int) -> str:
    return manifest_of(
        optimizer={"total_steps": steps},
        checkpoint={"every_steps": steps, "snapshot_every": steps},
        limits={"founders_per_stage": 1},
        deadlines={"call_s": 1.0},
    )


async def ended_equal(swarm: InProcessSwarm) -> None:
    report = await swarm.finished(timeout_s=60.0)
    for digests in report["state_digests"].values():
        assert len(set(digests.values())) == 1


def test_within_a_step_whose_work_is_lost_with_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with swarm_in_process(manifest(10), tmp_path, peers=(2, 1)) as swarm:
            lone = swarm.of_stage(1)[0]
            await swarm.until_version(3)
            async with asyncio.timeout(120.0):
                while not lone.steps.replica.num_done(Step(lone.steps.version)):
                    await asyncio.wait({lone.task}, timeout=0.002)
            await swarm.kill(lone)
            await swarm.restart(lone)
            await ended_equal(swarm)

    asyncio.run(play())


@pytest.mark.soak
def test_while_another_is_behind_what_it_has_on_its_disk(tmp_path: Path) -> None:
    """No state is anchored but the first: the other can only take the results of before the death."""

    async def play() -> None:
        async with swarm_in_process(manifest(64), tmp_path, peers=(1, 2)) as swarm:
            first, (lone, behind) = swarm.of_stage(0)[0], swarm.of_stage(1)
            both = {lone.peer_id, behind.peer_id}
            await swarm.until(
                lambda: all(
                    peer.daemon.at is not None and both <= set(peer.steps.chain.members) for peer in (lone, behind)
                )
            )
            others = [swarm.run.host_key.peer_id, first.peer_id, lone.peer_id]
            for other in others:
                swarm.network.cut(behind.peer_id, other)
            at = int(behind.steps.version)
            assert await lone.steps.wait_for_version(at + 3, timeout_s=120.0)
            first.daemon.shared.permit.withhold("for the test")
            while await lone.steps.wait_for_version(int(lone.steps.version) + 1, timeout_s=0.5):
                pass
            version = int(lone.steps.version)
            await swarm.kill(lone)
            for other in others:
                swarm.network.heal(behind.peer_id, other)
            await swarm.restart(lone)
            assert await behind.steps.wait_for_version(version, timeout_s=120.0)
            first.daemon.shared.permit.give()
            await ended_equal(swarm)

    asyncio.run(play())
