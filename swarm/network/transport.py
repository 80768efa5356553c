"""The swarm's one way of talking: a call with a small header and a bulk body.

`swarm.network.p2pd.p2p` carries it over hivemind's p2pd, `swarm.network.memory` within one process for tests.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from swarm.core.canonical import Value
from swarm.core.ids import PeerId

MAX_META_BYTES = 8 << 20
"""Bound on a message's canonical header; rosters of long steps are the largest."""


@dataclass(frozen=True)
class Message:
    """A canonical `meta` value and bulk bytes. The body's digest is signed inside meta where it matters.

    A body to be sent may be any C-contiguous buffer; it must not change while the call is open. A received
    body is a memoryview of bytes over a writable buffer that nobody else holds.
    """

    meta: dict[str, Value] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""
    more: tuple[bytes | bytearray | memoryview, ...] = ()
    """Of a request to be sent: buffers that continue the body. What is received has one body."""
    on_left: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Of a request to be sent: called once when its bytes are there, where the system says so, before its answer."""

    @property
    def num_bytes(self) -> int:
        """Of the whole body."""
        return sum(memoryview(buffer).nbytes for buffer in (self.body, *self.more))


Handler = Callable[[PeerId, Message], Awaitable[Message]]
"""Answers a call of the (authenticated) peer. Cancelled when the caller goes away or its deadline passes.

Raising TransientError, RemoteError or LocalError sends that error to the caller, where it is raised as TransientError,
RemoteError or TransientError respectively; any other exception is logged here and reaches the caller as a
TransientError without its text.
"""


class Place(NamedTuple):
    """What an answer has that goes."""

    will_go: Callable[[int], None]
    """To be told of how many bytes it has, before it goes."""
    most: Callable[[], float]
    """Bytes a second at which it is sent, at most, where the uplink is slow and nobody else carries it (as p2pd does);
    asked for as long as it goes."""


UNLIMITED = Place(lambda _: None, lambda: math.inf)
Turn = Callable[[PeerId, Message], AbstractAsyncContextManager[Place]]
"""What a peer's call waits for before its handler begins, and holds until the answer has gone or cannot go."""


class Way(Enum):
    """How another peer is reached, and so whose line its bulk costs."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"
    """Through a relay alone: its owner's bytes, twice."""


class Transport(Protocol):
    """Calls between peers. Every call has deadlines; a peer's death breaks its open calls at once."""

    @property
    def peer_id(self) -> PeerId: ...

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        """Answer `method` by `handler` from now on. Larger bodies are refused before they are read."""

    def in_turns(self, method: str, turn: Turn) -> None:
        """From now on calls of `method`, which is served, are answered as their callers have turns."""

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Whom this peer deals with: most places for calls are for them, whoever else calls. Until then for anybody."""

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        """The answer of another peer. Cancelling the call cancels its handler.

        The connection is there within `timeout_s`, and the answer begins within `timeout_s` of the request's last byte.
        While bytes move, the call lasts as long as they keep coming (`swarm.core.transfers`), and no longer.

        Raises UnreachableError (a TransientError) when the peer cannot be dialled, breaks off or is late;
        TransientError when it answers that it is busy or does not serve the method, or when its handler raised that;
        RemoteError when it answers with an error or with something malformed or too large.
        """

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        """Dial a peer where it listens; later calls find it. Raises UnreachableError if no address answers."""

    def addresses(self) -> list[str]:
        """Multiaddresses others can dial, each ending in `/p2p/<peer id>`."""

    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) in bodies and headers so far."""

    async def host_of(self, peer_id: PeerId) -> str | None:
        """The IP address that a peer is connected from; None of who is reached through a relay alone.

        Raises TransientError where that cannot be found out now.
        """

    def ways(self) -> Mapping[PeerId, Way]:
        """To the peers that this one deals with and is in touch with, as last looked."""

    async def close(self) -> None:
        """Break all open calls, cancel all handlers and leave nothing behind, within 2 s."""


class TransportAround:
    """A transport that hands everything on to another; what differs is in who derives from it."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def peer_id(self) -> PeerId:
        return self._inner.peer_id

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        self._inner.serve(method, handler, max_body_bytes=max_body_bytes)

    def in_turns(self, method: str, turn: Turn) -> None:
        self._inner.in_turns(method, turn)

    def expect(self, peers: Iterable[PeerId]) -> None:
        self._inner.expect(peers)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        await self._inner.connect(peer_id, addresses)

    def addresses(self) -> list[str]:
        return self._inner.addresses()

    def traffic(self) -> tuple[int, int]:
        return self._inner.traffic()

    async def host_of(self, peer_id: PeerId) -> str | None:
        return await self._inner.host_of(peer_id)

    def ways(self) -> Mapping[PeerId, Way]:
        return self._inner.ways()

    async def close(self) -> None:
        await self._inner.close()


class Directory(Protocol):
    """Signed, expiring hints of who is where. What it returns is signed by the peer it names."""

    async def publish(self, topic: str, fields: Mapping[str, Value], *, ttl_s: float) -> None:
        """State facts about this peer under `topic` until `ttl_s` from now (at most 300 s, 4 KiB in all).

        Takes the place of this peer's earlier record there if it lives longer. Raises TransientError when no node
        took it, LocalError when it is over a limit.
        """

    async def lookup(self, topic: str) -> dict[PeerId, dict[str, Value]]:
        """Live records under `topic`, by peer; wrongly signed, foreign or expired ones are left out.

        Raises TransientError when the directory cannot be asked.
        """

    async def records(self, topic: str) -> dict[PeerId, bytes]:
        """The same records as they were signed."""

    async def plant(self, topic: str, data: bytes, *, peer_id: PeerId, expires: float) -> None:
        """For a developer's liar: give others these bytes as that peer's record, and hold them here whatever they are.

        Who is given them, or finds them, checks them as any record.
        """

    @property
    def refused(self) -> int:
        """Records that this peer was given or found, and that were wrongly signed, of another topic or expired."""

    async def close(self) -> None: ...
