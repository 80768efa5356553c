"""Who leaves in the middle of a round ends it first, however long it takes; and goes where nothing moves."""

import asyncio
import time
from pathlib import Path

import pytest

from peer.round.mail.mail import ROUND
from swarm.core.errors import UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Message, Transport, TransportAround
from tests.swarm_in_process import SwarmPeer, manifest_of, swarm_in_process

DRAIN_S, MESSAGE_S = 1.5, 0.4
LINES = {"is_slow": False, "is_dead": False}


class SlowLine(TransportAround):
    """What carries parts of a round takes its time, or comes to nothing."""

    def __init__(self, inner: Transport, lines: dict[str, bool]) -> None:
        super().__init__(inner)
        self._lines = lines

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == ROUND and request.meta.get("kind") == "parts":
            if self._lines["is_dead"]:
                await asyncio.sleep(timeout_s)
                raise UnreachableError("no answer")
            if self._lines["is_slow"]:
                await asyncio.sleep(MESSAGE_S)
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


def all_are_members(peers: list[SwarmPeer]) -> bool:
    return all(peer.daemon.at is not None and len(peer.steps.chain.members) == len(peers) for peer in peers)


def has_contributed(peer: SwarmPeer) -> bool:
    """To a round that is under way."""
    states = peer.steps.open.values()
    return any(state.accumulation is not None and state.accumulation.work for state in states)


@pytest.mark.parametrize("line", ["is_slow", "is_dead"])
def test_who_leaves_in_mid_round(line: str, tmp_path: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": 400},
        limits={"founders_per_stage": 1},
        deadlines={"drain_s": DRAIN_S},
        codecs={"averaging": "fp32"},
    )
    lines = dict(LINES)

    async def main() -> None:
        async with swarm_in_process(
            manifest,
            tmp_path,
            peers=(1, 3),
            wrap=lambda stage, index, inner: SlowLine(inner, lines) if stage else inner,
        ) as swarm:
            await swarm.until_version(1)
            await swarm.until(lambda: all_are_members(swarm.of_stage(1)))
            lines[line] = True
            leaver = await swarm.first_of_stage(1, has_contributed)
            others = [peer for peer in swarm.of_stage(1) if peer is not leaver]
            left_in, began = leaver.steps.version, time.monotonic()
            await asyncio.wait_for(swarm.leave(leaver), 30.0)
            took_s = time.monotonic() - began
            if line == "is_slow":
                assert took_s > DRAIN_S, "the round took no longer than what is waited for where nothing moves"
                # Where it had begun work for the step after, that one's round, too.
                assert leaver.steps.version in (left_in + 1, left_in + 2), "it saw its round to its end"
                assert all(peer.steps.version > left_in for peer in others), "and the others, too"
            else:
                assert took_s < 10 * DRAIN_S

    asyncio.run(main())
