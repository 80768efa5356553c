"""A leader that answers every ping and begins no round: the others go on without it."""

import asyncio
from pathlib import Path

from peer.round.mail import ROUND
from peer.round.step_progress import PROGRESS
from swarm.core.errors import RemoteError, UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Handler, Message, Transport
from tests.swarm_in_process import manifest_of, swarm_in_process

IDLE = 1
STEPS = 5
DEADLINES = {"call_s": 0.5, "step_s": 0.6}


class Idle:
    """Takes no report of what members have done, and closes no step."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.peer_id = inner.peer_id
        self.connect, self.addresses, self.traffic = inner.connect, inner.addresses, inner.traffic
        self.close = inner.close

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def refused(sender: PeerId, request: Message) -> Message:
            raise RemoteError("protocol", "not now")

        self._inner.serve(method, refused if method == PROGRESS else handler, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == ROUND and request.meta.get("kind") == "close":
            raise UnreachableError("it never gets there")
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


def test_a_stage_goes_on_when_its_leader_lives_and_begins_no_round(tmp_path: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": STEPS},
        deadlines=DEADLINES,
        limits={"founders_per_stage": 1},
        batch={"target_tokens": 256},
    )
    led: set[PeerId] = set()

    async def main() -> None:
        async with swarm_in_process(
            manifest,
            tmp_path,
            peers=(1, 4),
            wrap=lambda stage, index, inner: Idle(inner) if (stage, index) == (1, IDLE) else inner,
        ) as swarm:
            swarm.on_applied.append(lambda steps, applied: led.add(applied.result.leader))
            await swarm.until_version(STEPS, timeout_s=40.0)
            idle = swarm.peers[1 + IDLE].peer_id
            assert idle not in led
            honest = [peer for peer in swarm.of_stage(1) if peer.peer_id != idle]
            assert len({peer.steps.replica.state.weights.tobytes() for peer in honest}) == 1

    asyncio.run(main())
