"""A transport that keeps to its owner's megabits a second, each way, whatever carries the bytes below."""

import asyncio
from collections.abc import Iterable

from peer.directory.line import SMALL_BYTES, Line, Taker
from swarm.core.ids import PeerId
from swarm.network.transport import Handler, Message, Transport, TransportAround


class LimitedTransport(TransportAround):
    """A transport over the owner's line, which others may go over too."""

    def __init__(self, inner: Transport, line: Line) -> None:
        super().__init__(inner)
        self._line = line
        self._elsewhere_bytes = 0
        self._expected: frozenset[PeerId] = frozenset()
        self._strangers_turn = asyncio.Lock()
        """Of whom nobody expects one answer at a time has its place in the line: they cannot fill it."""
        self._up = Taker(line.up, lambda: self.traffic()[0])
        self._down = Taker(line.down, lambda: self.traffic()[1])

    def expect(self, peers: Iterable[PeerId]) -> None:
        self._expected = frozenset(peers)
        super().expect(self._expected)

    def sends_s(self, num_bytes: int) -> float:
        """Seconds that bodies of so many bytes take at this peer's share of the owner's rate; 0 if there is none."""
        return self._line.num_peers * self._up.takes_s(num_bytes)

    async def take_elsewhere(self, num_bytes: int) -> None:
        """So much came by another way than this transport: it counts, and waits for its turn."""
        await self._down.take(num_bytes)
        self._elsewhere_bytes += num_bytes

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def limited(sender: PeerId, request: Message) -> Message:
            await self._down.take(request.num_bytes)
            reply = await handler(sender, request)
            await self._take_up(sender, reply.num_bytes)
            return reply

        self._inner.serve(method, limited, max_body_bytes=max_body_bytes)

    async def _take_up(self, peer_id: PeerId, num_bytes: int) -> None:
        """For an answer to the peer."""
        if num_bytes <= SMALL_BYTES or not self._expected or peer_id in self._expected:
            await self._up.take(num_bytes)
        else:
            async with self._strangers_turn:
                await self._up.take(num_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        await self._up.take(request.num_bytes)
        reply = await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        await self._down.take(reply.num_bytes)
        return reply

    def traffic(self) -> tuple[int, int]:
        sent, received = self._inner.traffic()
        return sent, received + self._elsewhere_bytes
