"""A peer whose memory flips a bit finds itself out by the anchored digest, loads the state anew, and goes on."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.swarm_in_process import manifest_of, swarm_in_process

STEPS = 24


@pytest.mark.soak
def test_a_peer_with_a_wrong_state_loads_it_anew_and_ends_like_the_others(tmp_path: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": STEPS},
        batch={"target_tokens": 8 * 32},
        limits={"founders_per_stage": 4},
        checkpoint={"every_steps": 8, "snapshot_every": 2},
    )

    async def train() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(4, 4)) as swarm:
            await swarm.until_version(3)
            broken = swarm.of_stage(1)[1].steps
            state = broken.replica.state
            state.weights.setflags(write=True)
            state.weights.view(np.uint32)[7] ^= 1 << 20
            report = await swarm.finished(timeout_s=90.0)
            assert report["steps"] == STEPS
            digests = report["state_digests"]["1"]
            assert len(digests) == 4
            assert len(set(digests.values())) == 1, "the broken peer did not come back"

    asyncio.run(train())
