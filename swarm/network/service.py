"""Incoming calls and their handlers: admission within limits, and the errors that callers are told.

Both transports answer through this, so that a handler behaves the same over p2pd and in memory.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import KINDS, LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.network.transport import MAX_META_BYTES, UNLIMITED, Handler, Message, Place, Turn

logger = logging.getLogger(__name__)

MAX_METHOD_BYTES = 64
PEERS_SHARE = 4
"""One peer's calls announce at most a fourth of the bytes that all may."""
STRANGERS_SHARE = 4
"""All who are not expected together have a fourth of each limit: keys cost nothing, and must not crowd out members. Of
their calls of a method one has a fourth, and so have those with long headers."""
SHORT_META_BYTES = 64 << 10
"""A stranger's call with a longer header takes one of a few places: bytes that drip hold it for up to an hour. Rounds'
messages are longer where a stage is large, and come of who has just become a member too: they are not refused."""
MAX_ERROR_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What a peer takes on at a time; past it callers are told BUSY (TransientError) before anything is read."""

    max_calls_per_method: int = 256
    max_calls_per_peer: int = 64
    """Incoming calls of one peer, of all methods together."""
    max_incoming_bytes: int = 4 << 30
    """Announced bodies of all incoming calls; of one peer's a quarter, for what is announced need never come."""


@dataclass(frozen=True)
class Service:
    handler: Handler
    max_body_bytes: int
    turn: Turn = field(default=lambda *_: contextlib.nullcontext(UNLIMITED))


class Services:
    """The methods a peer serves and the calls it has open."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._services: dict[str, Service] = {}
        self._calls_of_method: Counter[str] = Counter()
        self._calls_of_peer: Counter[PeerId] = Counter()
        self._bytes_of_peer: Counter[PeerId] = Counter()
        """Announced, of calls that are open."""
        self._expected: frozenset[PeerId] = frozenset()
        self._strangers_calls: Counter[str] = Counter()
        """Of each method, calls of those who are not expected."""
        self._strangers_long_calls: Counter[str] = Counter()
        """Of them those with long headers."""
        self._calls_of_stranger: Counter[tuple[str, PeerId]] = Counter()
        """Of each method, those of one."""
        self._strangers_bytes = 0

    def expect(self, peers: Iterable[PeerId]) -> None:
        """From now on most of each limit is for these alone. Where nobody is expected, all share it."""
        self._expected = frozenset(peers)

    def is_stranger(self, peer_id: PeerId) -> bool:
        """Whether the peer shares with all others that are not expected."""
        return bool(self._expected) and peer_id not in self._expected

    def is_expected(self, peer_id: PeerId) -> bool:
        return peer_id in self._expected

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        """Answer `method` from now on, instead of by its former handler if there was one."""
        assert len(method.encode()) <= MAX_METHOD_BYTES, f"the name of method {method} is too long"
        self._services[method] = Service(handler, max_body_bytes)

    def in_turns(self, method: str, turn: Turn) -> None:
        """Answer `method`, which is served, as its callers have turns."""
        self._services[method] = replace(self._services[method], turn=turn)

    @contextlib.contextmanager
    def admitted(self, peer_id: PeerId, method: str, body_bytes: int, *, meta_bytes: int = 0) -> Iterator[Service]:
        """Hold a place for a call whose header and body are announced.

        Raises TransientError when the method is not served here or too much is going on, RemoteError("too_large").
        """
        service = self._services.get(method)
        if service is None:
            raise TransientError(f"{method[:MAX_METHOD_BYTES]} is not served here")
        if body_bytes > service.max_body_bytes:
            raise RemoteError(
                "too_large", f"a body of {body_bytes} bytes is over the limit of {service.max_body_bytes}"
            )
        if (
            self._calls_of_method[method] >= self._limits.max_calls_per_method
            or self._calls_of_peer[peer_id] >= self._limits.max_calls_per_peer
            or self._bytes_of_peer.total() + body_bytes > self._limits.max_incoming_bytes
            or self._bytes_of_peer[peer_id] + body_bytes > self._limits.max_incoming_bytes // PEERS_SHARE
        ):
            raise TransientError(
                f"busy: {self._calls_of_method[method]} open calls of {method}, {self._calls_of_peer[peer_id]} of yours"
            )
        is_stranger = self.is_stranger(peer_id)
        is_long = meta_bytes > SHORT_META_BYTES
        if is_stranger:
            self._check_strangers(peer_id, method, body_bytes, is_long=is_long)
            self._strangers_calls[method] += 1
            self._strangers_long_calls[method] += is_long
            self._calls_of_stranger[method, peer_id] += 1
            self._strangers_bytes += body_bytes
        self._calls_of_method[method] += 1
        self._calls_of_peer[peer_id] += 1
        self._bytes_of_peer[peer_id] += body_bytes
        try:
            yield service
        finally:
            if is_stranger:
                self._strangers_calls[method] -= 1
                self._strangers_long_calls[method] -= is_long
                self._calls_of_stranger[method, peer_id] -= 1
                if not self._calls_of_stranger[method, peer_id]:
                    del self._calls_of_stranger[method, peer_id]
                self._strangers_bytes -= body_bytes
            self._bytes_of_peer[peer_id] -= body_bytes
            self._calls_of_method[method] -= 1
            self._calls_of_peer[peer_id] -= 1
            if not self._calls_of_peer[peer_id]:
                del self._calls_of_peer[peer_id]  # strangers come and go: no trace of one remains
                del self._bytes_of_peer[peer_id]

    def _check_strangers(self, peer_id: PeerId, method: str, body_bytes: int, *, is_long: bool) -> None:
        """Raises TransientError where they have their share already, or this one of it."""
        limits, calls = self._limits, self._strangers_calls[method]
        share = max(1, limits.max_calls_per_method // STRANGERS_SHARE)
        of_one = max(1, share // STRANGERS_SHARE)
        if (
            calls >= share
            or self._calls_of_stranger[method, peer_id] >= of_one
            or (is_long and self._strangers_long_calls[method] >= of_one)
            or self._strangers_bytes + body_bytes > limits.max_incoming_bytes // STRANGERS_SHARE
        ):
            raise TransientError(f"busy: {calls} open calls of {method} by peers that are not known here")


async def ask(
    service: Service, peer_id: PeerId, method: str, request: Message, turn: contextlib.AsyncExitStack
) -> tuple[bytes, memoryview, Place]:
    """(canonical meta, body) of the handler's answer and its place, once it is the peer's turn, which goes with `turn`.

    Raises only RemoteError and TransientError.
    """
    try:
        place = await turn.enter_async_context(service.turn(peer_id, request))
        reply = await service.handler(peer_id, request)
        meta = pack(reply.meta)
        if len(meta) > MAX_META_BYTES:
            raise LocalError(f"{method}: an answer's meta of {len(meta)} bytes is over the limit of {MAX_META_BYTES}")
        body = byte_view(reply.body)
        place.will_go(len(meta) + len(body))
        return meta, body, place
    except RemoteError:
        raise
    except (LocalError, TransientError) as error:
        # Also an UnreachableError: it is the handler's own neighbour that is gone, and not we.
        raise TransientError(str(error)) from error
    except Exception as error:
        # A handler's bug costs one call and is seen in the log; what it was is no stranger's business.
        logger.exception("the handler of %s failed", method)
        raise TransientError(f"{method} failed here") from error


def byte_view(body: bytes | bytearray | memoryview) -> memoryview:
    """The bytes of a C-contiguous buffer of any format, without a copy."""
    view = memoryview(body)
    if view.nbytes == 0:  # which memoryview refuses to cast
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def decode_meta(data: bytes | bytearray | memoryview) -> dict[str, Value]:
    """Meta of a stranger's bytes. Raises RemoteError when it is not a canonical map."""
    meta = unpack(data, max_bytes=MAX_META_BYTES)
    if not isinstance(meta, dict):
        raise RemoteError("malformed", "meta is not a map")
    return meta


def decode_error(meta: dict[str, Value]) -> tuple[str, str]:
    """(kind, message) of an error reply, bounded and printable whatever was sent."""
    kind, message = meta.get("kind"), meta.get("message")
    if not isinstance(kind, str) or not isinstance(message, str):
        return "malformed", "an error reply without kind and message"
    printable = "".join(letter if letter.isprintable() else "?" for letter in message[:MAX_ERROR_CHARACTERS])
    return kind if kind in KINDS else "malformed", printable
