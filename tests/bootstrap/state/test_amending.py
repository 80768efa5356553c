"""A run's settings are changed while it goes on: an amended run is what a run of these settings would be from there."""

import asyncio
from pathlib import Path

from tests.swarm_in_process import manifest_of, swarm_in_process


def test_a_run_is_lengthened_while_it_goes_on(tmp_path: Path) -> None:
    manifest = manifest_of(optimizer={"total_steps": 8}, limits={"founders_per_stage": 1})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(1)
            said = await swarm.host.amending.ask(["optimizer.total_steps=12", "optimizer.learning_rate=0.005"], "6")
            print(said)
            report = await swarm.finished()
            for event in swarm.events:
                if event["event"] not in ("step", "version"):
                    print(event)
            assert report["steps"] == 12

    asyncio.run(scenario())
