"""The sender of `benchmarks.homes.bulk`, on a made-up line."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.round.bulk_sender import PART_BYTES, Sender
from peer.round.mail import outbox
from swarm.core.ids import PeerId
from swarm.network.transport import Message

OTHER = PeerId("other")


class Line:
    """Carries one message after the other, each within a few turns of the loop."""

    def __init__(self) -> None:
        self.under_way = 0
        self.num_bytes = 0
        self._turn = asyncio.Lock()

    async def call(self, peer: PeerId, method: str, message: Message, **limits: Any) -> None:
        self.under_way += 1
        async with self._turn:
            for _ in range(3):
                await asyncio.sleep(0)
        self.under_way -= 1
        self.num_bytes += sum(len(body) for body in message.more)


def test_a_transfer_ends_when_the_last_of_its_messages_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow line parcels are cut, and messages begin beside those that were there from the start."""
    ticks = itertools.count(step=4.0)
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    async def main() -> None:
        line: Any = Line()
        sender = Sender(line, OTHER)
        for transfer in (1, 2, 3):
            told = await sender.transfer(8 * PART_BYTES)
            assert line.under_way == 0
            assert line.num_bytes == transfer * 8 * PART_BYTES
            assert told["stop"] >= told["start"]

    asyncio.run(main())
