"""Who does not answer a ping is gone, unless something of it came meanwhile; on a full line it has longer."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from peer.round.presence import PING_FACTOR, PING_S, Presence
from swarm.core.errors import UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Message

OTHER = PeerId("other")
CALL_S = 100.0


class Silent:
    """A transport on which nobody answers."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.waited_s: list[float] = []
        self._meanwhile = meanwhile

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        self.waited_s.append(timeout_s)
        self._meanwhile()
        raise UnreachableError("no answer")


def presence_on(transport: Silent) -> Presence:
    settings = SimpleNamespace(deadlines=SimpleNamespace(call_s=CALL_S))
    steps: Any = SimpleNamespace(
        context=SimpleNamespace(transport=transport, settings=settings), may_join=lambda peer: True
    )
    return Presence(steps)


def test_a_member_of_which_something_comes_while_it_is_pinged_is_not_gone() -> None:
    """On a full line of 1 Mbit/s pings took longer than 2 s, and members were taken for lost while their parts came."""
    silent = Silent()
    alone = presence_on(silent)
    alone.heard_of(OTHER)
    assert asyncio.run(alone.is_gone(OTHER)), "that was before"
    heard: list[Presence] = []
    moving = presence_on(Silent(lambda: heard[0].heard_of(OTHER)))
    heard.append(moving)
    assert not asyncio.run(moving.is_gone(OTHER))


def test_a_ping_waits_as_long_as_small_calls_to_that_member_took() -> None:
    silent = Silent()
    presence = presence_on(silent)
    for _ in range(4):
        presence.answered(OTHER, within_s=0.01)
    asyncio.run(presence.is_gone(OTHER))
    assert silent.waited_s == [PING_S]
    for _ in range(60):
        presence.answered(OTHER, within_s=4.0)
    asyncio.run(presence.is_gone(OTHER))
    assert PING_FACTOR * 4.0 <= silent.waited_s[1] <= CALL_S
