"""This is where bulk messages wait for their turn: a few to each peer are under way at a time, in order."""

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from swarm.core.ids import PeerId

LANES = 3
"""Messages to one peer under way at a time: while one is acknowledged the others move."""

Send = Callable[[], Awaitable[None]]


class Outbox:
    """Messages to several peers. `spawn` runs what it is given as a task of its owner's."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._spawn = spawn
        self._waiting: dict[PeerId, deque[Send]] = {}
        self._busy: dict[PeerId, int] = {}

    def put(self, peer: PeerId, send: Send) -> None:
        """Send this once what was put before is sent or under way."""
        self._waiting.setdefault(peer, deque()).append(send)
        if self._busy.get(peer, 0) < LANES:
            self._busy[peer] = self._busy.get(peer, 0) + 1
            self._spawn(self._send_waiting(peer))

    async def _send_waiting(self, peer: PeerId) -> None:
        try:
            while waiting := self._waiting.get(peer):
                await waiting.popleft()()
        finally:
            self._busy[peer] -= 1
            if not self._busy[peer]:
                del self._busy[peer]
                self._waiting.pop(peer, None)
