"""A transport that keeps to its owner's megabits a second, each way, whatever carries the bytes below."""

import asyncio
import time
from collections.abc import Callable, Iterable

from swarm.core.ids import PeerId
from swarm.core.plan import HEADERS
from swarm.network.transport import Handler, Message, Transport, TransportAround

SMALL_BYTES = 4 << 10
"""A message whose body is no longer overtakes bulk: bulk waits as much longer."""
BURST_S = 1.0
"""What was not used may be used later, up to so many seconds' worth at once."""


class Meter:
    """Lets bytes through at a rate on average.

    A body is taken for before it moves; what moved besides (headers, the unasked) is told by `moved`, the transport's
    own count, and made up for.
    """

    def __init__(self, mbit: float, moved: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = mbit * 125_000
        self._clock = clock
        self._moved = moved
        self._moved_before = moved()
        self._taken = 0.0
        self._free_at = clock()

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes of a message's body may move. A small one waits for none: it counts, no more."""
        wait_s = self.book(size_bytes)
        if size_bytes <= SMALL_BYTES:
            return
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:  # they will not move
                self._taken -= size_bytes * HEADERS
                self._free_at -= size_bytes * HEADERS / self._bytes_per_s
                raise

    def takes_s(self, size_bytes: int) -> float:
        """Seconds between such bodies, one after the other."""
        return size_bytes * HEADERS / self._bytes_per_s

    def book(self, size_bytes: int) -> float:
        """Seconds until these bytes may move; they count from now on."""
        now = self._clock()
        on_line = size_bytes * HEADERS
        unforeseen = max(0.0, (self._moved() - self._moved_before) * HEADERS - self._taken)
        self._taken += unforeseen + on_line
        self._free_at = max(self._free_at, now - BURST_S) + (unforeseen + on_line) / self._bytes_per_s
        return self._free_at - now


class LimitedTransport(TransportAround):
    """A transport that keeps to the owner's megabits a second, each way."""

    def __init__(self, inner: Transport, *, upload_mbit: float | None, download_mbit: float | None) -> None:
        super().__init__(inner)
        self._elsewhere_bytes = 0
        self._expected: frozenset[PeerId] = frozenset()
        self._strangers_turn = asyncio.Lock()
        """Of whom nobody expects one answer at a time has its place in the line: they cannot fill it."""
        self.set_rates(upload_mbit=upload_mbit, download_mbit=download_mbit)

    def set_rates(self, *, upload_mbit: float | None, download_mbit: float | None) -> None:
        """Keep to other megabits a second from now on."""
        inner = self._inner
        self._up = None if upload_mbit is None else Meter(upload_mbit, lambda: inner.traffic()[0])
        self._down = None if download_mbit is None else Meter(download_mbit, lambda: self.traffic()[1])

    def expect(self, peers: Iterable[PeerId]) -> None:
        self._expected = frozenset(peers)
        super().expect(self._expected)

    def sends_s(self, num_bytes: int) -> float:
        """Seconds that bodies of so many bytes take at the owner's rate; 0 if there is none."""
        return self._up.takes_s(num_bytes) if self._up is not None else 0.0

    async def take_elsewhere(self, num_bytes: int) -> None:
        """So much came by another way than this transport: it counts, and waits for its turn."""
        if self._down is not None:
            await self._down.take(num_bytes)
        self._elsewhere_bytes += num_bytes

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def limited(sender: PeerId, request: Message) -> Message:
            if self._down is not None:
                await self._down.take(request.num_bytes)
            reply = await handler(sender, request)
            await self._take_up(sender, reply.num_bytes)
            return reply

        self._inner.serve(method, limited, max_body_bytes=max_body_bytes)

    async def _take_up(self, peer_id: PeerId, num_bytes: int) -> None:
        """For an answer to the peer."""
        if self._up is None:
            return
        if num_bytes <= SMALL_BYTES or not self._expected or peer_id in self._expected:
            await self._up.take(num_bytes)
        else:
            async with self._strangers_turn:
                await self._up.take(num_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if self._up is not None:
            await self._up.take(request.num_bytes)
        reply = await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        if self._down is not None:
            await self._down.take(reply.num_bytes)
        return reply

    def traffic(self) -> tuple[int, int]:
        sent, received = self._inner.traffic()
        return sent, received + self._elsewhere_bytes
