"""This is where bulk messages wait for their turn: a few to each peer are under way at a time, in order.

What waits for one peer together goes together, up to `MESSAGE_BYTES`: a message costs as much as carrying 100 KB.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from peer.step_state import Bytes, StepState
from swarm.core.canonical import Value
from swarm.core.ids import PeerId

LANES = 2
"""Messages to one peer under way at a time: while one is acknowledged the others move."""
MESSAGE_BYTES = 2 << 20
"""A message of several parcels is no longer."""


@dataclass(frozen=True)
class Parcel:
    """Something for one peer, in one step's round."""

    state: StepState
    kind: str
    head: dict[str, Value]
    body: Bytes

    def goes_with(self, other: "Parcel") -> bool:
        return self.state is other.state and self.kind == other.kind


Send = Callable[[PeerId, list[Parcel]], Awaitable[None]]


class Outbox:
    """Parcels for several peers. `spawn` runs what it is given as a task; `send` brings a peer parcels that go
    together."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], None], send: Send) -> None:
        self._spawn = spawn
        self._send = send
        self._waiting: dict[PeerId, deque[Parcel]] = {}
        self._busy: dict[PeerId, int] = {}

    def put(self, peer: PeerId, parcel: Parcel) -> None:
        """Send this once what was put before is sent or under way."""
        self._waiting.setdefault(peer, deque()).append(parcel)
        if self._busy.get(peer, 0) < LANES:
            self._busy[peer] = self._busy.get(peer, 0) + 1
            self._spawn(self._send_waiting(peer))

    async def _send_waiting(self, peer: PeerId) -> None:
        try:
            while together := self._take(peer):
                await self._send(peer, together)
        finally:
            self._busy[peer] -= 1
            if not self._busy[peer]:
                del self._busy[peer]
                self._waiting.pop(peer, None)

    def _take(self, peer: PeerId) -> list[Parcel]:
        """The next parcels that go together; none if nothing waits."""
        waiting = self._waiting.get(peer)
        taken: list[Parcel] = []
        num_bytes = 0
        while waiting and (
            not taken or (waiting[0].goes_with(taken[0]) and num_bytes + len(waiting[0].body) <= MESSAGE_BYTES)
        ):
            num_bytes += len(waiting[0].body)
            taken.append(waiting.popleft())
        return taken
