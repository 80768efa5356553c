"""Streams between two peers whose routers let nobody in, made by both dialling at once (libp2p's DCUtR, over TCP).

    asker -> callee   punch: where the asker's ports were seen, and an offer of streams
    callee -> asker   where its own were, and an offer
    asker -> callee   punch_go: the callee dials when it comes, the asker half a round trip after it was sent

Both calls are p2pd's, which has authenticated both ends and keeps what passes secret, or go by a stream that is there.
Whatever connection comes of it is nobody's yet: the asker begins the handshake of direct streams on it, or has the
callee begin it, by turns, so that one agreement gives both sides streams to call by; and a stream counts when a call on
it was answered. Who lies about times, addresses or ports has punched nothing, and dialled nobody but itself.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import weakref
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.forms import Integer, Octets
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.core.layout import AtMost
from swarm.core.record import Record
from swarm.network.addresses import version_of
from swarm.network.bulk.direct import DirectListener, DirectOffer, opened
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.bulk.sessions import SESSION_BYTES
from swarm.network.bulk.sockets import receive, send_all
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.punch.onlooker import ONLOOKER, where_seen
from swarm.network.punch.ports import LocalPort
from swarm.network.punch.seen import Endpoint, Judge, Seen
from swarm.network.punch.tries import PORTS, STRANGERS_SHARE, TRIES, Limits, moves, to_dial
from swarm.network.transport import Message

logger = logging.getLogger(__name__)

PUNCH, GO = "punch", "punch_go"
TRY_S = 5.0
"""To agree on one try; half of it is the callee's."""
BEGIN_S = 9.0
"""No try begins later: then there is no way for now."""
NEAR_GO_S = 2.0
"""So long the asker of a try at ports near by may take to go on with it: others wait for their turn meanwhile."""
REFUSED_S = 1.0
"""Until another try, about, where the other side was busy."""
MOST_REFUSED = 1
"""By one version of IP where there is another to try."""
DIAL_S = 1.8
"""A packet of each side may be lost, or come before the other's router knows of it: the next goes a second later."""
GREET_S = 4.0
LONGEST_WAIT_S = 2.0
"""Before the asker dials, whatever the round trip seems to be."""
MOST_AT_ONCE = 8
"""Tries of others that this side takes part in."""
MOST_GREETED = 32
"""Connections of a try that have not shown yet whose they are: whoever shares the peer's address may come by."""
MOST_STREAMS, MOST_WHERE_PORTS_MOVE = 24, 6
"""Of one peer, to call it by. The latter come one by one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 4.0, 300.0
"""After a punch that failed; twice as long after each."""
_MOST_PEERS = 1024
_MAX_WORDS = 2


@dataclass(frozen=True)
class Port(Record, kind="punch port"):
    """One local port, as onlookers saw it: the latest word first."""

    words: Annotated[tuple[Seen, ...], AtMost(_MAX_WORDS)]


@dataclass(frozen=True)
class Side(Record, kind="punch side"):
    """What one side tells the other."""

    offer: DirectOffer
    """Of streams by which the other calls this side."""
    ports: Annotated[tuple[Port, ...], AtMost(PORTS)]
    moves: bool
    """Its router makes another mapping for each destination, as far as it knows."""
    num_streams: Annotated[int, Integer()]
    """That it has to call the other by."""
    took_ms: Annotated[int, Integer()]
    """To find that out: no part of the round trip."""


@dataclass(frozen=True)
class Asked(Record, kind="punch question"):
    """The asker's side of a try."""

    session: Annotated[bytes, Octets(SESSION_BYTES)]
    near: bool
    """Ports near those that were seen are dialled, from one port."""
    side: Side


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a puncher needs of the transport that it is part of."""

    bind_hosts: Mapping[int, str]
    """Of its local ports, by version of IP."""
    call: Callable[[PeerId, str, Message, float], Awaitable[Message]]
    """By whatever way there is; never one that waits for a punch."""
    onlookers: Callable[[int], Awaitable[list[tuple[PeerId, str]]]]
    """Who may be asked by this version of IP, and at which address each is reached: the best first."""
    versions: Callable[[PeerId], Awaitable[Sequence[int]]]
    """Of IP, by which a peer may be met: what is tried first, first."""
    judge: Callable[[], Judge]
    is_stranger: Callable[[PeerId], bool]
    """Whether a peer shares with all others that nobody expects."""
    answer: Callable[[socket.socket, Callable[[socket.socket], Awaitable[tuple[PeerId, SealedSocket]]], str], None]
    """Takes calls on a connection from that address, once its greeting has told whose."""
    greet: Callable[[socket.socket], Awaitable[tuple[PeerId, SealedSocket]]]
    take: Callable[[PeerId, SealedSocket], Awaitable[None]]
    """Tries a stream, and keeps it if it is the peer's, and few rest. Raises TransientError or RemoteError."""


@dataclass
class _Seat:
    """The local ports of a try, and what onlookers said of them."""

    ports: list[LocalPort]
    words: list[tuple[Seen, ...]]

    @property
    def moves(self) -> bool:
        return moves([word.port for word in self.words[0]])


@dataclass
class _Agreed:
    """A try that the other side begins."""

    peer_id: PeerId
    near: bool
    seat: _Seat
    closing: ExitStack
    turn: ExitStack
    """Closed by `closing`, or as soon as nothing is dialled any more."""
    targets: list[list[Endpoint]]
    mine: DirectOffer
    others: DirectOffer


@dataclass
class _Link:
    """What is known of the way to one peer."""

    streams: "weakref.WeakSet[SealedSocket]" = field(default_factory=weakref.WeakSet)
    num_came: int = 0
    """Streams that were punched so far. Where too many rest one may be closed at once: its punch succeeded."""
    again_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    moves: bool = False
    """By the last punch that succeeded, or what either side knows of its router."""

    @property
    def num_streams(self) -> int:
        return sum(stream.fileno() >= 0 for stream in self.streams)


class Puncher:
    """Punches, and takes part in others' punches."""

    def __init__(self, me: PeerId, listener: DirectListener, around: Surroundings) -> None:
        self._me = me
        self._listener = listener
        self._around = around
        self._links: OrderedDict[PeerId, _Link] = OrderedDict()
        self._punching: dict[PeerId, asyncio.Task[bool]] = {}
        self._agreed: dict[tuple[PeerId, bytes], _Agreed] = {}
        """By who asked, and its session."""
        self._answering: set[PeerId] = set()
        """Whose question is being answered."""
        self._dialled = Counter[PeerId]()
        """Whose tries are gone on with, as long as anything is dialled for them."""
        self._limits = Limits()
        self._one_near = asyncio.Lock()
        """Two tries at ports that are counted up would move each other's. Whom nobody expects waits for no turn, and
        gives its own up to who is expected, and to this peer: keys cost nothing."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def num_streams(self, peer_id: PeerId) -> int:
        """That are open to call the peer by, at work or at rest."""
        link = self._links.get(peer_id)
        return link.num_streams if link is not None else 0

    def is_punched(self, peer_id: PeerId, stream: object) -> bool:
        link = self._links.get(peer_id)
        return link is not None and stream in link.streams

    def punch(self, peer_id: PeerId) -> "asyncio.Task[bool] | None":
        """Begin, or see how it goes; None while it is not worth it. The task says whether a stream came of it."""
        if peer_id not in self._punching:
            link = self._link(peer_id)
            most = MOST_WHERE_PORTS_MOVE if link.moves else MOST_STREAMS
            if link.num_streams >= most or link.again_at > asyncio.get_running_loop().time():
                return None
            task = self._start(self._punch(peer_id, link))
            self._punching[peer_id] = task
            task.add_done_callback(lambda _: self._punching.pop(peer_id, None))
        return self._punching[peer_id]

    async def seen_by(self, onlooker: PeerId, address: str) -> Seen:
        """The word of an onlooker on a connection to this address of its.

        Raises OSError, EOFError, TransientError or RemoteError. The caller sets a deadline.
        """
        with ExitStack() as closing:
            port = LocalPort(self._around.bind_hosts[version_of(address)])
            closing.callback(port.close)
            (word,) = await self._seen(closing, onlooker, address, [port])
            return word

    def drop(self, peer_id: PeerId) -> None:
        """Break the streams to a peer; it may be punched again at once, as if it were another."""
        link = self._links.pop(peer_id, _Link())
        for stream in list(link.streams):
            stream.break_off()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for agreed in self._agreed.values():
            agreed.closing.close()
        self._agreed.clear()
        for link in self._links.values():
            for stream in list(link.streams):
                stream.break_off()

    async def asked(self, sender: PeerId, request: Message) -> Message:
        """The callee's answer to `PUNCH`."""
        began = asyncio.get_running_loop().time()
        ask = Asked.from_value(request.meta)
        if sender in self._punching and self._me < sender:
            raise TransientError("this side is about to punch")
        is_stranger = self._around.is_stranger(sender)
        if sender in self._answering or (sender, ask.session) in self._agreed:
            raise TransientError("this try is under way")
        if not self._has_place(sender, is_stranger=is_stranger):
            raise TransientError("others are punching")
        if ask.near and is_stranger and self._one_near.locked():
            raise TransientError("others are punching")
        if not self._limits.take(sender, is_stranger=is_stranger, now=began):
            raise TransientError("too many punches within a minute")
        endpoints, version = self._endpoints(sender, ask.side)
        if version not in self._around.bind_hosts:
            raise TransientError(f"this side has no IPv{version}")
        self._answering.add(sender)
        closing, turn = ExitStack(), ExitStack()
        closing.callback(turn.close)
        try:
            async with asyncio.timeout(TRY_S / 2):
                if ask.near:
                    await self._take_turn(turn, is_stranger=is_stranger)
                seat = await self._sit_down(closing, version, near=ask.near)
        except BaseException as error:
            closing.close()
            if isinstance(error, OSError | EOFError | TimeoutError):
                raise TransientError(f"no onlooker: {error}") from error
            raise
        finally:
            self._answering.discard(sender)
        mine = self._offer(sender)
        targets = _targets(seat, endpoints, near=ask.near)
        self._agreed[sender, ask.session] = _Agreed(
            sender, ask.near, seat, closing, turn, targets, mine, ask.side.offer
        )
        asyncio.get_running_loop().call_later(NEAR_GO_S if ask.near else TRY_S, self._forget, sender, ask.session)
        took_ms = round((asyncio.get_running_loop().time() - began) * 1000)
        return Message(self._side(sender, mine, seat, took_ms).to_value())

    async def go(self, sender: PeerId, request: Message) -> Message:
        """The callee's answer to `GO`: it dials."""
        fields = Fields("punch go", request.meta)
        session = fields.octets("session")
        fields.done()
        agreed = self._agreed.pop((sender, session), None)
        if agreed is None:
            raise TransientError("no punch was agreed on, or it is over")
        self._dialled[sender] += 1
        agreed.turn.callback(self._dialled_no_more, sender)
        meeting = _Meeting(
            agreed.seat.ports,
            agreed.targets,
            partial(self._met_as_callee, agreed),
            self._start,
            dialled=agreed.turn.close,
            near=agreed.near,
        )
        self._start(self._meet(meeting, agreed.closing))
        return Message()

    def _has_place(self, sender: PeerId, *, is_stranger: bool) -> bool:
        """Whether one more of its tries may be taken part in; its earlier one is over. All strangers share a fourth."""
        for peer, session in [agreed for agreed in self._agreed if agreed[0] == sender]:
            self._forget(peer, session)
        at_it = [*self._answering, *(peer for peer, _ in self._agreed), *self._dialled.elements()]
        strangers = sum(map(self._around.is_stranger, at_it))
        return len(at_it) < MOST_AT_ONCE and not (is_stranger and strangers >= MOST_AT_ONCE // STRANGERS_SHARE)

    def _dialled_no_more(self, sender: PeerId) -> None:
        self._dialled -= Counter([sender])  # and forgets who has none

    # The asker's side.

    async def _punch(self, peer_id: PeerId, link: _Link) -> bool:
        why, number, refused = "", 0, 0
        loop = asyncio.get_running_loop()
        begin_until = loop.time() + BEGIN_S
        tries = [one for version in await self._around.versions(peer_id) for one in TRIES[version]]
        while number < len(tries) and loop.time() < begin_until:
            version, supposed = tries[number]
            near = supposed == "moves" or (link.moves and version == 4)
            had = link.num_came
            try:
                moves = await self._try(peer_id, version, near=near)
                link.moves = link.moves or (moves and version == 4)
                number, why = number + 1, "nobody came through"
            except TransientError as error:  # the other side is about to punch this one, or others, or has no onlooker
                why, refused = str(error), refused + 1
                if refused > MOST_REFUSED and version != tries[-1][0]:
                    number += 1
                else:
                    await asyncio.sleep(REFUSED_S * (0.5 + random.random()))  # or two would keep step
            except (OSError, EOFError, TimeoutError, RemoteError) as error:
                number, why = number + 1, str(error) or type(error).__name__
            if link.num_came > had:
                link.moves = near
                link.pause_s, link.again_at = FIRST_PAUSE_S, 0.0
                return True
        link.moves = False
        logger.info("%s is not reached by hole punching: %s", peer_id, why)
        link.again_at = asyncio.get_running_loop().time() + link.pause_s
        link.pause_s = min(2 * link.pause_s, LONGEST_PAUSE_S)
        return False

    async def _try(self, peer_id: PeerId, version: int, *, near: bool) -> bool:
        """Whether one of the routers is known to make new mappings. Returns with the first stream, or without any."""
        loop = asyncio.get_running_loop()
        closing, turn = ExitStack(), ExitStack()
        closing.callback(turn.close)
        try:
            if near:
                await self._take_turn(turn, is_stranger=False)
            async with asyncio.timeout(TRY_S):
                seat = await self._sit_down(closing, version, near=near)
            if seat.moves and not near:
                closing.close()
                return True
            mine, session = self._offer(peer_id), secrets.token_bytes(SESSION_BYTES)
            ask = Asked(session, near, self._side(peer_id, mine, seat, 0))
            asked_at = loop.time()
            answer = await self._around.call(peer_id, PUNCH, Message(ask.to_value()), TRY_S)
            side = Side.from_value(answer.meta)
            if side.moves and not near:
                closing.close()
                return True
            round_trip_s = loop.time() - asked_at - side.took_ms / 1000
            endpoints, theirs = self._endpoints(peer_id, side)
            if theirs != version:
                raise RemoteError(
                    "malformed", f"a punch by IPv{version} answered with addresses of IPv{theirs}", peer_id
                )
            targets = _targets(seat, endpoints, near=near)
            self._start(self._say_go(peer_id, session))
            await asyncio.sleep(min(max(0.0, round_trip_s / 2), LONGEST_WAIT_S))
            # Where ports move one connection comes of a try: who has fewer calls by it.
            number = int(near and side.num_streams < self.num_streams(peer_id))

            async def met(connection: socket.socket) -> bool:
                nonlocal number
                number += 1
                is_mine = bool(number % 2)
                await self._met_as_asker(peer_id, connection, mine, side.offer, is_mine=is_mine)
                return is_mine or near

            meeting = _Meeting(seat.ports, targets, met, self._start, dialled=turn.close, near=near)
        except BaseException:
            closing.close()
            raise
        self._start(self._meet(meeting, closing))
        await meeting.first_or_end()
        return seat.moves or side.moves

    async def _say_go(self, peer_id: PeerId, session: bytes) -> None:
        with contextlib.suppress(TransientError, RemoteError):
            await self._around.call(peer_id, GO, Message({"session": session}), TRY_S)

    async def _met_as_asker(
        self, peer_id: PeerId, connection: socket.socket, mine: DirectOffer, others: DirectOffer, *, is_mine: bool
    ) -> None:
        """`is_mine`: it is to call the peer by, and not for the peer to call."""
        if is_mine:
            await self._take(peer_id, await opened(connection, others, caller=self._me, callee=peer_id))
        else:
            await send_all(connection, mine.session)
            self._around.answer(connection, self._around.greet, connection.getpeername()[0])

    async def _met_as_callee(self, agreed: _Agreed, connection: socket.socket) -> bool:
        session = bytes(await receive(connection, SESSION_BYTES))
        if session == agreed.mine.session:
            greet = partial(self._listener.greet, session)
            self._around.answer(connection, greet, connection.getpeername()[0])
        elif session == agreed.others.session:
            stream = await opened(connection, agreed.others, caller=self._me, callee=agreed.peer_id)
            await self._take(agreed.peer_id, stream)
        else:
            raise ConnectionRefusedError("a punched connection of no session that was agreed on")
        return True

    # Both sides.

    async def _take_turn(self, turn: ExitStack, *, is_stranger: bool) -> None:
        """At ports near by, until `turn` is closed. No deadline."""
        if not is_stranger:
            for (peer, session), agreed in [*self._agreed.items()]:
                if agreed.near and self._around.is_stranger(peer):
                    self._forget(peer, session)
        await self._one_near.acquire()
        turn.callback(self._one_near.release)

    async def _sit_down(self, closing: ExitStack, version: int, *, near: bool) -> _Seat:
        """Ports of this side, and where two onlookers, or the one there is, see them from; the router keeps them for
        as long as `closing` is open. Raises OSError, EOFError, TransientError or RemoteError; no deadline."""
        ports = []
        for _ in range(1 if near else PORTS):
            port = LocalPort(self._around.bind_hosts[version])
            closing.callback(port.close)
            ports.append(port)
        words: list[tuple[Seen, ...]] = [() for _ in ports]
        host, why = self._around.judge().host, "nobody is there to see where this peer's connections come from"
        for onlooker, address in await self._around.onlookers(version):
            # The host's word is enough: another's is wanted of the first port alone, to see what the router does.
            by_host = any(word.onlooker == host for word in words[-1])
            try:
                found = await self._seen(closing, onlooker, address, ports[:1] if by_host else ports)
            except (OSError, EOFError, TransientError, RemoteError) as error:
                why = str(error)
                continue
            for number, word in enumerate(found):
                words[number] = (word, *words[number])
            if len(words[0]) == _MAX_WORDS:
                break
        if not all(words):
            raise TransientError(f"no onlooker: {why}")
        return _Seat(ports, words)

    async def _seen(self, closing: ExitStack, onlooker: PeerId, address: str, ports: Sequence[LocalPort]) -> list[Seen]:
        answer = await self._around.call(onlooker, ONLOOKER, Message(), TRY_S)
        offer = DirectOffer.from_value(answer.meta)
        number = offer.port_at(address)
        if number is None:
            raise TransientError(f"{onlooker} is no onlooker at {address}")
        at = Endpoint(address, number)
        asking = [where_seen(port, at, offer, me=self._me, onlooker=onlooker) for port in ports]
        found = await asyncio.gather(*asking, return_exceptions=True)
        words = []
        failed: BaseException | None = None
        for item in found:
            if isinstance(item, BaseException):
                failed = item
            else:
                closing.callback(item[1].close)
                words.append(item[0])
        if failed is not None:
            raise failed
        return words

    def _endpoints(self, owner: PeerId, side: Side) -> tuple[list[Endpoint], int]:
        """Where to dial, and by which version of IP."""
        if not side.ports:
            raise RemoteError("malformed", "a punch without ports", owner)
        judge, now = self._around.judge(), swarm_time.now()
        endpoints = [judge.endpoint(port.words, owner, now=now) for port in side.ports]
        versions = {version_of(endpoint.host) for endpoint in endpoints}
        if len(versions) > 1:
            raise RemoteError("malformed", "a punch by both versions of IP at once", owner)
        return endpoints, versions.pop()

    def _side(self, peer_id: PeerId, mine: DirectOffer, seat: _Seat, took_ms: int) -> Side:
        return Side(mine, tuple(Port(words) for words in seat.words), seat.moves, self.num_streams(peer_id), took_ms)

    def _offer(self, peer_id: PeerId) -> DirectOffer:
        return self._listener.offer(peer_id, None, now=asyncio.get_running_loop().time(), is_punched=True)

    async def _take(self, peer_id: PeerId, stream: SealedSocket) -> None:
        try:
            await self._around.take(peer_id, stream)
        except BaseException:
            stream.close()
            raise
        link = self._link(peer_id)
        link.streams.add(stream)
        link.num_came += 1

    async def _meet(self, meeting: "_Meeting", closing: ExitStack) -> None:
        with closing:
            await meeting.run()

    def _forget(self, peer_id: PeerId, session: bytes) -> None:
        agreed = self._agreed.pop((peer_id, session), None)
        if agreed is not None:
            agreed.closing.close()

    def _link(self, peer_id: PeerId) -> _Link:
        link = self._links.setdefault(peer_id, _Link())
        self._links.move_to_end(peer_id)
        keep_newest(self._links, _MOST_PEERS)
        return link

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work, name="hole punching")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Meeting:
    """Both sides dial: connections as they come, each handed to `met`, until there are enough or `DIAL_S` is over.

    `met` says whether it is one that this side waits for.
    """

    def __init__(
        self,
        ports: Sequence[LocalPort],
        targets: Sequence[Sequence[Endpoint]],
        met: Callable[[socket.socket], Awaitable[bool]],
        start: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"],
        *,
        dialled: Callable[[], None],
        near: bool,
    ) -> None:
        """`dialled` is called once no port is dialled any more: connections may still be greeted then."""
        self._ports = ports
        self._targets = targets
        self._met = met
        self._start = start
        self._dialled = dialled
        self._near = near
        self._greeting: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()

    async def first_or_end(self) -> None:
        """Until a stream is there that was tried, or none will be."""
        await self._came.wait()

    async def run(self) -> None:
        dials = [
            self._start(self._dial(port, endpoint))
            for port, endpoints in zip(self._ports, self._targets, strict=True)
            for endpoint in endpoints  # in this order: so the routers' mappings are made
        ]
        hosts = {endpoints[0].host for endpoints in self._targets}
        accepts = [self._start(self._accept(port, host)) for port in self._ports for host in hosts]
        enough = [self._start(self._came.wait()), self._start(_all(dials))] if self._near else []
        try:
            if enough:
                await asyncio.wait(enough, timeout=DIAL_S, return_when="FIRST_COMPLETED")
            else:
                await asyncio.wait(dials, timeout=DIAL_S)
        finally:
            for task in (*dials, *accepts, *enough):
                task.cancel()
            await asyncio.gather(*dials, *accepts, *enough, return_exceptions=True)
            self._dialled()
            await asyncio.gather(*self._greeting, return_exceptions=True)
            self._came.set()

    async def _dial(self, port: LocalPort, endpoint: Endpoint) -> None:
        with contextlib.suppress(OSError):
            self._begin(await port.meet(endpoint))

    async def _accept(self, port: LocalPort, host: str) -> None:
        while True:
            self._begin(await port.accept(host))

    def _begin(self, connection: socket.socket) -> None:
        if len(self._greeting) >= MOST_GREETED:
            connection.close()
            return
        task = self._start(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREET_S):
                if await self._met(connection):
                    self._came.set()
        except (OSError, EOFError, TimeoutError, TransientError, RemoteError) as error:
            logger.debug("a punched connection came to nothing: %s", error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise


async def _all(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    await asyncio.wait(tasks)


def _targets(seat: _Seat, endpoints: Sequence[Endpoint], *, near: bool) -> list[list[Endpoint]]:
    """Of each local port, where it dials."""
    return [to_dial(endpoints, near=near) for _ in seat.ports]
