"""A peer whose GPU does not do computes on the CPU, if nobody asked for that GPU."""

import asyncio
from pathlib import Path

from tests.swarm_in_process import manifest_of, swarm_in_process


def test_a_gpu_that_does_not_do_is_left_for_the_cpu(tmp_path: Path) -> None:
    async def train() -> None:
        manifest = manifest_of()
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1), device_of=lambda *_: "cuda:99,cpu") as swarm:
            await swarm.until_version(1)
            assert [peer.steps.replica.model.device.type for peer in swarm.peers] == ["cpu", "cpu"]

    asyncio.run(train())
