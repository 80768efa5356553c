"""TCP connections past p2pd, for two peers that carry bulk to each other.

p2pd costs more than 4 CPU seconds a GB, with both ends and our reading in pieces of 32 KiB; a sealed socket costs a
fraction. On a slow or lossy line p2pd's one connection stands still whenever a packet is lost, and all calls wait in it
behind the bulk; here each call under way has a connection of its own. p2pd stays what finds, names and reaches peers,
and carries every call to a peer that cannot be dialled so.

A caller asks for an *offer* over p2pd, which has authenticated both ends and keeps what passes secret: a port, a
session's number and a fresh secret. Whoever opens a connection there and seals under that secret is the peer that
asked, and only the peer that was asked can answer. Each connection has keys of its own, from the secret, both peers'
names, the session and a nonce of either end, so that nothing recorded can be played again, nor to anybody else.

    caller: session, 16 bytes | nonce, 32 bytes        callee: nonce, 32 bytes        then sealed records, both ways
"""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from swarm.core.canonical import Value, digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.forms import Integer, Octets
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.core.record import Record
from swarm.network.addresses import version_of
from swarm.network.bulk.sealed_socket import NONCE_BYTES, SECRET_BYTES, SealedSocket, stream_keys
from swarm.network.bulk.sessions import SESSION_BYTES, Sessions
from swarm.network.bulk.sockets import receive, send_all
from swarm.network.p2pd.control import ControlClient, ControlError

logger = logging.getLogger(__name__)

OFFER = "direct_offer"
"""The method by which a peer is asked for one."""
WORTH_BYTES = 64 << 10
"""A call that brings this much has its peer asked for an offer; so do several that bring it together."""
WORTH_PUNCHING_BYTES = 4 << 10
"""As much where only a relay leads to the peer: fragments for slow lines are short, and there are many. Less than this
is small talk, however often it comes."""
CONGESTION = b"bbr"
"""TCP's congestion control, where the system lets us choose it: it does not take each lost packet for a full line."""
CONNECT_S = 4.0
"""Two packets of a handshake may be lost, on a line that loses some."""
ASK_S = 20.0
"""An offer and a first connection are there by then: on a slow line the question may wait behind what p2pd carries."""
WORTH_WAITING_S = 1.0
"""A call that brings bulk waits so long for the answer: its bytes would be under way for longer by a worse way."""
MOST_PLACES = 3
"""At which a peer is tried, one after the other."""
_AGAIN_S, _AGAIN_IF_FULL_S = 120.0, 20.0
"""A peer that could not be dialled is tried again after this long, when it is worth it; sooner if it was reached before
and does not answer: a full line loses the packets of a handshake, too."""
_SILENT_S = 30.0
"""A way that has led to a peer is kept for so long though nothing answers on it."""
_UNHEARD_S = 1.0
"""Of a dial that was cut short: so long without an answer is silence."""
_MOST_SESSIONS = 1024
_UNUSED_S = 120.0
"""An offer that nobody came for ends then; after a first connection it holds for `_USED_S` past the last one."""
_USED_S = 3600.0
_PORT = Integer(low=1, high=65535)
_BACKLOG = 128
_USER_TIMEOUT_MS = 30_000
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, and times. Who waits for an answer sends nothing, and would not see for two hours that the other end has
given the connection up. It keeps the mappings of routers, too."""

PUNCH_WORTH_WAITING_S = 12.0
"""And so long where the worse way is a relay, whose bytes are somebody else's; half of the call's time at most."""

Punch = Callable[[PeerId], "asyncio.Task[bool] | None"]
"""Begins to make streams to a peer that cannot be dialled; None while that is not worth a try."""
Places = Callable[[PeerId], Awaitable[list[str]]]
"""Other addresses at which a peer says it can be dialled."""
Ask = Callable[[PeerId], Awaitable[dict[str, Value]]]
"""Calls a peer's `OFFER` over p2pd; raises TransientError or RemoteError."""


@dataclass(frozen=True)
class DirectOffer(Record):
    """Where a peer takes direct connections of one other peer, and what both alone know."""

    session: Annotated[bytes, Octets(SESSION_BYTES)]
    secret: Annotated[bytes, Octets(SECRET_BYTES)]
    port4: Annotated[int, _PORT] | None
    port6: Annotated[int, _PORT] | None

    def port_at(self, host: str) -> int | None:
        """At an address of the peer's."""
        return self.port6 if version_of(host) == 6 else self.port4


class DirectListener:
    """The callee's side: who may connect, and as whom."""

    def __init__(self, me: PeerId, hosts: Sequence[tuple[socket.AddressFamily, str]], port: int) -> None:
        """Listens at once, on `port` or one that the system chooses (0). Raises OSError when the port is taken."""
        self.sockets: list[socket.socket] = []
        self._me = me
        self._sessions = Sessions(_MOST_SESSIONS)
        try:
            for family, host in hosts:
                listener = self._listening(family, host, port)
                listener.setblocking(False)
                self.sockets.append(listener)
        except BaseException:
            self.close()
            raise

    def offer(self, peer_id: PeerId, host: str | None, *, now: float, is_punched: bool = False) -> DirectOffer:
        """For one peer, seen at this address; its earlier ones end, those for punched connections by themselves.

        When there are too many, one ends of those from the address that has asked for the most.
        """
        purpose = "punched" if is_punched else ""
        session, secret = self._sessions.offer(peer_id, host, now=now, valid_s=_UNUSED_S, purpose=purpose)
        return DirectOffer(session, secret, *self.ports())

    async def greet(self, session: bytes, connection: socket.socket) -> tuple[PeerId, SealedSocket]:
        """Who is at the other end of a connection that began with `session`. Whether it is, its first record shows.

        Raises EOFError or OSError for whoever has no offer. The caller sets a deadline.
        """
        now = asyncio.get_running_loop().time()
        known = self._sessions.valid(session, now=now)
        if known is None:
            raise ConnectionRefusedError("a direct connection of a session that was not offered, or is over")
        self._sessions.use(session, until=now + _USED_S)
        return known.peer_id, await answered(connection, session, known.secret, caller=known.peer_id, callee=self._me)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()

    def ports(self) -> tuple[int | None, int | None]:
        """Listened on, of IPv4 and IPv6."""
        return self._port(socket.AF_INET), self._port(socket.AF_INET6)

    def _listening(self, family: socket.AddressFamily, host: str, port: int) -> socket.socket:
        """Where the system chooses, it is the same port for both versions of IP if that is free."""
        if not port and self.sockets:
            with contextlib.suppress(OSError):
                same = int(self.sockets[0].getsockname()[1])
                return socket.create_server((host, same), family=family, backlog=_BACKLOG)
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)

    def _port(self, family: socket.AddressFamily) -> int | None:
        ports = [int(listener.getsockname()[1]) for listener in self.sockets if listener.family == family]
        return ports[0] if ports else None


@dataclass
class _Way:
    """That has led to a peer. Times are the event loop's."""

    offer: DirectOffer
    host: str
    answered_at: float = -math.inf
    silent_since: float | None = None
    silent_at: float = -math.inf
    """When a dial was last given up."""

    def answered(self, now: float) -> None:
        self.answered_at, self.silent_since = now, None

    def silent(self, began: float, now: float) -> None:
        """A dial that began then was not answered, nor another one since."""
        if self.answered_at < began:
            if self.silent_since is None or now > self.silent_at + _SILENT_S:
                self.silent_since = began
            self.silent_at = now

    def is_tried(self, now: float, *, for_bulk: bool) -> bool:
        """While it is silent calls go by p2pd, but for one now and then, sooner if it brings bulk."""
        return self.silent_since is None or now >= self.silent_at + (CONNECT_S if for_bulk else _SILENT_S)

    def is_lost(self, now: float) -> bool:
        return self.silent_since is not None and now >= self.silent_since + _SILENT_S


class DirectDialler:
    """The caller's side: which peers can be dialled directly, learnt in the background of calls that were worth it."""

    def __init__(
        self,
        me: PeerId,
        control: ControlClient,
        ask: Ask,
        places: Places,
        punch: Punch,
        on_known: Callable[[PeerId], None],
    ) -> None:
        self._me = me
        self._punch = punch
        self._control = control
        self._on_known = on_known
        self._ask = ask
        self._places = places
        self._known: OrderedDict[PeerId, _Way] = OrderedDict()
        self._again_at: OrderedDict[PeerId, float] = OrderedDict()
        self._reached: OrderedDict[PeerId, None] = OrderedDict()
        """Whom a way has led to, if none may lead there now."""
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._carried: OrderedDict[PeerId, int] = OrderedDict()
        """By p2pd, in calls each of which was worth no offer."""
        self._relayed: set[PeerId] = set()
        """Of those being asked, who is reached through a relay alone."""
        self._open: weakref.WeakSet[SealedSocket] = weakref.WeakSet()

    def knows(self, peer_id: PeerId) -> bool:
        """Whether the next stream to the peer will be a direct one."""
        return peer_id in self._known

    def consider(self, peer_id: PeerId) -> None:
        """A call brings bulk to or from the peer: see whether there is a way without p2pd."""
        if peer_id in self._known or peer_id in self._asking:
            return
        task = asyncio.create_task(self._learn(peer_id), name="direct offer")
        self._asking[peer_id] = task
        task.add_done_callback(lambda _: self._asking.pop(peer_id, None))
        task.add_done_callback(lambda _: self._relayed.discard(peer_id))

    def is_worth_it(self, peer_id: PeerId, num_bytes: int) -> bool:
        """One call more brings so much to or from the peer by p2pd: whether all together are worth an offer.

        A round over a slow line is made of short messages, and p2pd's one connection would carry all of them.
        """
        if num_bytes < WORTH_PUNCHING_BYTES or peer_id in self._known:
            return False
        carried = self._carried.pop(peer_id, 0) + num_bytes
        if carried >= WORTH_BYTES:
            return True
        self._carried[peer_id] = carried
        keep_newest(self._carried, _MOST_SESSIONS)
        return False

    async def found_out(self, peer_id: PeerId, timeout_s: float) -> None:
        """Wait a moment until it is known how the peer is reached directly, if that is being found out."""
        asking = self._asking.get(peer_id)
        if asking is not None:
            await asyncio.wait({asking}, timeout=WORTH_WAITING_S)
            if peer_id in self._relayed:
                await asyncio.wait({asking}, timeout=min(PUNCH_WORTH_WAITING_S, timeout_s / 2) - WORTH_WAITING_S)

    async def open(self, peer_id: PeerId, *, for_bulk: bool = True) -> SealedSocket | None:
        """A new direct connection; None where there is no way, none any more, or nothing answers for now."""
        now = asyncio.get_running_loop().time
        way, began = self._known.get(peer_id), now()
        if way is None or not way.is_tried(began, for_bulk=for_bulk):
            return None
        try:
            stream = await _dial(way.offer, way.host, caller=self._me, callee=peer_id)
        except asyncio.CancelledError:
            if now() >= began + _UNHEARD_S:  # a short call has less time than a dial
                way.silent(began, now())
            raise
        except (OSError, EOFError, TimeoutError) as error:
            is_silent = isinstance(error, TimeoutError)
            if is_silent:
                way.silent(began, now())
            # Of several dials at a time the first to end has done it.
            if self._known.get(peer_id) is way and (way.is_lost(now()) or not is_silent):
                self._give_up(peer_id, error)
            return None
        way.answered(now())
        self._open.add(stream)
        return stream

    async def close(self) -> None:
        """Break what was opened, whoever uses it."""
        for stream in list(self._open):
            stream.break_off()
        self._known.clear()
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn(self, peer_id: PeerId) -> None:
        with contextlib.suppress(ControlError):
            if await self._control.remote_host(peer_id) is None:
                self._relayed.add(peer_id)
        if self._again_at.get(peer_id, 0.0) <= asyncio.get_running_loop().time() and await self._dials(peer_id):
            return
        punching = self._punch(peer_id)
        if punching is not None:
            await asyncio.wait({punching})

    async def _dials(self, peer_id: PeerId) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                known = await self._control.remote_host(peer_id)
                # What p2pd has reached first; where that is a relay, or closed to us, the peer's other addresses.
                hosts = list(dict.fromkeys([*([] if known is None else [known]), *await self._places(peer_id)]))
                if not hosts:
                    raise ConnectionRefusedError("it is reached through a relay alone")
                offer = DirectOffer.from_value(await self._ask(peer_id))
                host = await self._first_that_answers(offer, hosts[:MOST_PLACES], peer_id)
        except (OSError, EOFError, TimeoutError, ControlError, TransientError, RemoteError) as error:
            self._give_up(peer_id, error)
            return False
        self._known[peer_id] = _Way(offer, host)
        self._reached[peer_id] = None
        self._on_known(peer_id)
        for newest in (self._known, self._reached):
            keep_newest(newest, _MOST_SESSIONS)
        return True

    async def _first_that_answers(self, offer: DirectOffer, hosts: Sequence[str], peer_id: PeerId) -> str:
        """Raises OSError, EOFError or TimeoutError, of the last one."""
        *others, last = hosts
        for host in others:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                (await _dial(offer, host, caller=self._me, callee=peer_id)).close()
                return host
        (await _dial(offer, last, caller=self._me, callee=peer_id)).close()
        return last

    def _give_up(self, peer_id: PeerId, error: Exception) -> None:
        logger.debug("%s is called through p2pd: %s", peer_id, error)
        self._known.pop(peer_id, None)
        self._again_at.pop(peer_id, None)
        is_silent = isinstance(error, TimeoutError | TransientError)
        again_s = _AGAIN_IF_FULL_S if is_silent and peer_id in self._reached else _AGAIN_S
        self._again_at[peer_id] = asyncio.get_running_loop().time() + again_s
        keep_newest(self._again_at, _MOST_SESSIONS)


def prepare(connection: socket.socket) -> None:
    """Make a TCP socket ready for calls. The kernel sizes its buffers to the link; a dead end is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_CONGESTION"):  # Linux
        with contextlib.suppress(OSError):  # not there, or not allowed: the system's own
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


async def _dial(offer: DirectOffer, host: str, *, caller: PeerId, callee: PeerId) -> SealedSocket:
    """Raises OSError, EOFError or TimeoutError."""
    family = socket.AF_INET6 if version_of(host) == 6 else socket.AF_INET
    port = offer.port_at(host)
    if port is None:
        raise ConnectionRefusedError("it takes no direct connections at the address it is known by")
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(connection)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            return await opened(connection, offer, caller=caller, callee=callee)
    except BaseException:
        connection.close()
        raise


async def opened(connection: socket.socket, offer: DirectOffer, *, caller: PeerId, callee: PeerId) -> SealedSocket:
    """The caller's side of the handshake on a connection. Raises OSError or EOFError; no deadline."""
    caller_nonce = secrets.token_bytes(NONCE_BYTES)
    await send_all(connection, offer.session + caller_nonce)
    callee_nonce = bytes(await receive(connection, NONCE_BYTES))
    binding = _binding(offer.session, caller=caller, callee=callee)
    of_caller, of_callee = stream_keys(offer.secret, binding, caller_nonce, callee_nonce)
    return SealedSocket(connection, send_key=of_caller, receive_key=of_callee)


async def answered(
    connection: socket.socket, session: bytes, secret: bytes, *, caller: PeerId, callee: PeerId
) -> SealedSocket:
    """The callee's side, behind the session. Raises OSError or EOFError; no deadline."""
    caller_nonce = bytes(await receive(connection, NONCE_BYTES))
    callee_nonce = secrets.token_bytes(NONCE_BYTES)
    await send_all(connection, callee_nonce)
    binding = _binding(session, caller=caller, callee=callee)
    of_caller, of_callee = stream_keys(secret, binding, caller_nonce, callee_nonce)
    return SealedSocket(connection, send_key=of_callee, receive_key=of_caller)


def _binding(session: bytes, *, caller: PeerId, callee: PeerId) -> bytes:
    """What the keys of a session's streams are bound to."""
    return digest("direct-stream", [session, caller, callee])
