"""A swarm whose parts all go in fragments, as over slow lines: its rounds end like any others, and no part is lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.round.mail import meter, outbox
from peer.round.mail.fragments import Fragments
from tests.swarm_in_process import manifest_of, swarm_in_process

STEPS = 4
MANIFEST = manifest_of(optimizer={"total_steps": STEPS}, limits={"founders_per_stage": 2})


async def scenario(folder: Path) -> dict[str, Any]:
    async with swarm_in_process(MANIFEST, folder, peers=(2, 2)) as swarm:
        return await swarm.finished(timeout_s=60.0)


@pytest.mark.soak
def test_rounds_end_when_parts_go_in_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MESSAGE_S": 0.0, "SHORTEST_BYTES": 1 << 10}.items():
        monkeypatch.setattr(outbox, name, value)
    monkeypatch.setattr(meter, "MIN_MEASURED_BYTES", 1)
    put, whole = Fragments.put, list[memoryview]()

    def noted(*args: Any, **named: Any) -> memoryview | None:
        made = put(*args, **named)
        whole.extend([made] if made is not None else [])
        return made

    monkeypatch.setattr(Fragments, "put", noted)
    report = asyncio.run(scenario(tmp_path))
    assert report["steps"] == STEPS
    for digests in report["state_digests"].values():
        assert len(digests) == 2
        assert len(set(digests.values())) == 1
    # Of a stage's one part a contribution goes one way and the result the other, whole in the first round alone.
    assert len(whole) >= 2 * STEPS
