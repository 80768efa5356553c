"""A small swarm whose senders ask, before each microbatch, how long it would wait."""

import asyncio
from pathlib import Path

import pytest

from swarm.core.ids import PeerId
from swarm.core.pipeline import wiring
from tests.swarm_in_process import manifest_of, swarm_in_process


def test_senders_ask_who_has_room_and_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[PeerId, float]] = []
    hear = wiring.EarliestFinishWiring.told

    def heard(
        self: wiring.EarliestFinishWiring, peer_id: PeerId, waits_s: float, *, holds: bytes = b"", now: float
    ) -> None:
        told.append((peer_id, waits_s))
        hear(self, peer_id, waits_s, holds=holds, now=now)

    monkeypatch.setattr(wiring, "ASK_FROM_S", 0.0)  # these microbatches take milliseconds
    monkeypatch.setattr(wiring.EarliestFinishWiring, "told", heard)

    manifest = manifest_of(limits={"founders_per_stage": 2}, optimizer={"total_steps": 400})

    async def main() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2), evaluate_tokens=64) as swarm:
            last_stage = {peer.peer_id for peer in swarm.of_stage(1)}
            await swarm.until(lambda: {peer for peer, _ in told} == last_stage and any(s > 0 for _, s in told))

    asyncio.run(main())
    assert all(waits_s >= 0 for _, waits_s in told)
