"""A swarm whose leader sends its messages to one member, who hands them on to the next: rounds end whatever one of them
does with them, and bytes are equal."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from peer.round.mail.mail import ROUND
from peer.round.mail.ropes import HANDED_ON
from swarm.core.ids import PeerId
from swarm.core.round.mail import sheets
from swarm.network.transport import Message, Transport, TransportAround
from tests.peer.stage.state_digests import StateDigests
from tests.swarm_in_process import manifest_of, swarm_in_process

STEPS = 6
"""At least: until it was the liar's turn to hand something on, which is drawn for each step."""
LIAR = 1


class HandsOn(TransportAround):
    """What a peer hands on, counted; a liar's goes nowhere, or says something else."""

    def __init__(self, inner: Transport, handed: Counter[str], does: str) -> None:
        super().__init__(inner)
        self._handed, self._does = handed, does

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == ROUND and request.meta.get("kind") == HANDED_ON:
            self._handed[self._does] += 1
            if self._does == "silent":
                return Message({"status": "ok"})
            if self._does == "killed":  # it has what all are sent, and dies before it hands it on
                await asyncio.Future()
            if self._does == "altered" and request.meta["rope"] is not None:
                request = Message({**request.meta, "rope": [0, b"nothing of the kind"]})
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


@pytest.mark.parametrize("does", ["silent", "killed", pytest.param("altered", marks=pytest.mark.soak)])
def test_rounds_end_alike_when_a_member_of_the_tree_is(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sheets, "FAN_OUT", 1)
    handed: Counter[str] = Counter()
    digests = StateDigests()
    manifest = manifest_of(
        optimizer={"total_steps": 400}, limits={"founders_per_stage": 1}, batch={"target_tokens": 256}
    )

    async def main() -> None:
        async with swarm_in_process(
            manifest,
            tmp_path,
            peers=(1, 3),
            wrap=lambda stage, index, inner: HandsOn(inner, handed, does if (stage, index) == (1, LIAR) else "honest"),
        ) as swarm:
            swarm.on_applied.append(digests.applied)
            await swarm.until_version(STEPS, timeout_s=90.0)
            await swarm.until(lambda: handed["honest"] > 0 < handed[does], timeout_s=90.0)
            if does == "killed":
                await swarm.kill(swarm.of_stage(1)[LIAR])
            await swarm.until_version(swarm.host.progress.done_versions() + 1, timeout_s=90.0)

    asyncio.run(main())
    assert len(digests) > STEPS, (
        "of two stages, but for versions that one which catches up had left when it told of them"
    )
    assert all(len(each) == 1 for each in digests.values()), digests
