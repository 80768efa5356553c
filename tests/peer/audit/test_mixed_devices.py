"""Exams and audits between peers of two kinds of device, in a whole public swarm."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.peer.audit.test_newcomers import events, public
from tests.pretend_device import PRETEND
from tests.swarm_in_process import swarm_in_process


def on_every_other(stage: int, index: int) -> str:
    return PRETEND if index % 2 else "cpu"


def on_the_newcomer(stage: int, index: int) -> str:
    return PRETEND if index == 2 else "cpu"


@pytest.mark.parametrize("device_of", [pytest.param(on_every_other, marks=pytest.mark.soak), on_the_newcomer])
def test_a_newcomer_is_promoted_by_members_on_other_devices(tmp_path: Path, device_of: Any) -> None:
    async def train() -> None:
        async with swarm_in_process(public(), tmp_path, peers=(2, 2), device_of=device_of) as swarm:
            await swarm.until_version(2)
            newcomer = await swarm.add_peer(1)
            await swarm.until(lambda: bool(events(swarm, "promoted")))
            version = swarm.host.progress.done_versions()
            await swarm.until_version(version + 3)
            assert newcomer.steps.replica.model.device.type == device_of(1, 2).partition(":")[0]
            assert not [event for event in swarm.events if event["event"] in ("banned", "quarantined")]

    asyncio.run(train())
