"""Incoming streams, answered: call after call on each, until its caller leaves it."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.network.bulk import framing
from swarm.network.bulk.framing import RequestHead, Status
from swarm.network.bulk.sockets import Stream, send_all, until_closed
from swarm.network.p2pd.control import ControlError
from swarm.network.p2pd.idle_streams import KEPT_BY_CALLEE_S
from swarm.network.places import Places, network_of
from swarm.network.service import STRANGERS_SHARE, Services, ask
from swarm.network.transport import UNLIMITED, Place

logger = logging.getLogger(__name__)

_LINGER_S = 5.0
"""A refused caller has this long to read why and to close."""
_GREET_S = 5.0
"""Whoever connects says by then who it is: until then it is anybody."""
_ACCEPT_PAUSE_S = 0.1
_P2PD = "p2pd"
"""In place of the network of a stream that p2pd brings: it tells of none."""
_MOST_STRANGERS = 64
"""Connections of whoever has not yet said who it is, and as many of whoever has and did not prove it yet: addresses are
to be had by the thousand, and take no place from who was named. None take anything from those who have shown it, or
from who is expected, which has as many places beside."""

Greet = Callable[[socket.socket], Awaitable[tuple[PeerId, Stream]]]
"""Learns which (authenticated) peer has opened an accepted connection, and how it is spoken to. Raises EOFError,
OSError or ControlError."""


@dataclass(frozen=True, kw_only=True)
class AnsweringLimits:
    """Deadlines and bounds of incoming streams; see `P2PSettings`, where users set them."""

    window_s: float
    longest_call_s: float
    max_streams: int


class Answering:
    """The streams that others have opened to this peer."""

    def __init__(self, services: Services, sent: framing.Sent, limits: AnsweringLimits) -> None:
        """`sent` counts what answers come to."""
        self._services = services
        self._sent = sent
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Places[asyncio.Task[None]] = Places(_MOST_STRANGERS)
        """Of who has not said yet who it is, by address."""
        self._by_p2pd: Places[asyncio.Task[None]] = Places(_MOST_STRANGERS)
        """Of whom p2pd is about to name."""
        self._greeted: Places[asyncio.Task[None]] = Places(_MOST_STRANGERS)
        """Of who has said it, or was named, and has not shown it yet: by address, for keys are to be had for nothing;
        by peer where p2pd brings it, which has seen the key."""
        self._expected: Places[asyncio.Task[None]] = Places(_MOST_STRANGERS)
        """Likewise of who is expected, by peer: nobody else takes a place from those."""
        self._unexpected: Places[asyncio.Task[None]] = Places(max(1, limits.max_streams // STRANGERS_SHARE))
        """Streams of who has shown it, and is not expected, by address: keys are to be had for nothing."""
        self._streams: Counter[PeerId] = Counter()
        """That each peer has here, at work or at rest."""
        self._idle: dict[asyncio.Task[None], PeerId] = {}
        """Those of streams without a call, the one that rests longest first."""
        self.bytes_received = 0

    def start(self, listener: socket.socket, greet: Greet) -> None:
        """Answer whatever comes in by this socket."""
        self._start(self._accept(listener, greet))

    def take(self, connection: socket.socket, greet: Greet, host: str, *, kept_s: float) -> None:
        """Answer calls on a connection that was made otherwise, from this address; at rest it is kept for so long."""
        self._take(connection, greet, network_of(host), kept_s=kept_s)

    async def stop(self) -> None:
        """Cancel all handlers and close all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, greet: Greet) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("an incoming stream cannot be taken: %s", error)  # too many open files, say
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            network = _P2PD if listener.family == socket.AF_UNIX else network_of(address[0])
            self._take(connection, greet, network, kept_s=KEPT_BY_CALLEE_S)

    def _take(self, connection: socket.socket, greet: Greet, network: str, *, kept_s: float) -> None:
        task = self._start(self._answer(connection, greet, network, kept_s))
        for places in (self._strangers, self._by_p2pd, self._greeted, self._expected, self._unexpected):
            task.add_done_callback(places.leave)
        _take(self._by_p2pd if network == _P2PD else self._strangers, task, network)
        task.add_done_callback(partial(_close, connection))  # if it never began

    def _admit(self, peer_id: PeerId) -> None:
        """One more stream of the peer's. Of too many, one rests, of the peer that has the most, and is closed.

        Raises TransientError where only streams of who has fewer rest.
        """
        self._streams[peer_id] += 1
        if self._streams.total() <= self._limits.max_streams:
            return
        resting = [(self._streams[of], task) for task, of in self._idle.items()]
        most = max((streams for streams, _ in resting), default=0)
        if most < self._streams[peer_id]:
            raise TransientError(
                f"{self._streams.total()} streams are open here, {self._streams[peer_id]} of them yours"
            )
        task = next(task for streams, task in resting if streams == most)
        del self._idle[task]
        task.cancel()

    def _dismiss(self, peer_id: PeerId) -> None:
        self._streams[peer_id] -= 1
        if not self._streams[peer_id]:
            del self._streams[peer_id]

    async def _answer(self, connection: socket.socket, greet: Greet, network: str, kept_s: float) -> None:
        """One incoming stream. Whatever goes wrong in it ends here."""
        stream: Stream = connection
        admitted: PeerId | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(_GREET_S):
                peer_id, stream = await greet(connection)
            self._strangers.leave(task)
            self._by_p2pd.leave(task)
            is_expected = self._services.is_expected(peer_id)
            named = self._expected if is_expected else self._greeted
            _take(named, task, peer_id if is_expected or network == _P2PD else network)
            head = await framing.read_first_head(stream, window_s=self._limits.window_s)  # which proves it
            named.leave(task)
            admitted = peer_id
            self._admit(peer_id)
            if self._services.is_stranger(peer_id):
                _take(self._unexpected, task, network)
            while True:
                await self._answer_request(stream, peer_id, head)
                # The caller closes first: when we do, p2pd resets the stream and drops what was not read yet.
                head = await self._next_head(stream, peer_id, kept_s)
                if not self._services.is_stranger(peer_id):  # any more
                    self._unexpected.leave(task)
        except RemoteError as error:
            await self._refuse(stream, Status.REMOTE, error.kind, str(error))
        except TransientError as error:
            await self._refuse(stream, Status.TRANSIENT, "transient", str(error))
        except (EOFError, OSError, ControlError, TimeoutError) as error:
            logger.debug("an incoming stream ended: %s", error)
        finally:
            stream.close()
            if admitted is not None:
                self._dismiss(admitted)

    async def _next_head(self, stream: Stream, peer_id: PeerId, kept_s: float) -> RequestHead:
        task = asyncio.current_task()
        assert task is not None
        self._idle[task] = peer_id
        try:
            async with asyncio.timeout(kept_s):
                return await framing.read_request_head(stream)
        finally:
            self._idle.pop(task, None)

    async def _answer_request(self, stream: Stream, peer_id: PeerId, head: RequestHead) -> None:
        announced = self._services.admitted(peer_id, head.method, head.body_bytes, meta_bytes=head.meta_bytes)
        with announced as service:
            window_s = self._limits.window_s
            request = await framing.read_content(stream, head, window_s=window_s)
            self.bytes_received += head.meta_bytes + head.body_bytes
            async with contextlib.AsyncExitStack() as turn:
                body, place = memoryview(b""), UNLIMITED
                try:
                    async with asyncio.timeout(min(head.timeout_ms / 1000, self._limits.longest_call_s)):
                        asked = ask(service, peer_id, head.method, request, turn)
                        meta, body, place = await _unless_closed(stream, asked)
                    head_and_meta = framing.encode_reply_head(meta, body)
                # The stream goes on: a punched one costs both sides and an onlooker.
                except RemoteError as error:
                    head_and_meta = framing.encode_error(Status.REMOTE_READ, error.kind, str(error))
                except TransientError as error:
                    head_and_meta = framing.encode_error(Status.TRANSIENT_READ, "transient", str(error))
                del request
                most = place.most
                await framing.send(stream, head_and_meta, body, window_s=window_s, sent=self._sent, most=most)

    async def _refuse(self, stream: Stream, status: Status, kind: str, message: str) -> None:
        """Send an error before the request was read; the caller closes."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await send_all(stream, framing.encode_error(status, kind, message))
                # When we close first, p2pd resets the stream and drops what the caller has not read yet.
                await until_closed(stream)


def _take(places: Places[asyncio.Task[None]], task: asyncio.Task[None], who: str) -> None:
    """Of too many, another is cut off, or this one."""
    lost = places.take(task, who)
    if lost is not None:
        lost.cancel()


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


async def _unless_closed(
    stream: Stream, work: Coroutine[None, None, tuple[bytes, memoryview, Place]]
) -> tuple[bytes, memoryview, Place]:
    """The result of `work`, which is cancelled when the caller closes the stream. Raises EOFError then.

    A caller has nothing to say before it is answered: whatever makes the stream readable is its end.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    closed = False

    def on_readable() -> None:
        nonlocal closed
        closed = True
        loop.remove_reader(stream)
        task.cancel()

    loop.add_reader(stream, on_readable)
    try:
        return await work
    except asyncio.CancelledError:
        if closed and task.uncancel() <= cancelling:
            raise EOFError("its caller has closed it") from None
        raise
    finally:
        loop.remove_reader(stream)
