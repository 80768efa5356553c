"""A swarm's network simulated in one process: twins of the p2pd transport and the DHT directory.

The same calls, limits, deadlines and errors as `p2p` and `dht`, with faults to order: delay, loss, partitions, death.
"""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from swarm.core.canonical import Value, pack
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.core.transfers import Transfer
from swarm.identity.key import Identity, is_peer_id
from swarm.network.directory.records import Record, newest_of, sign_record
from swarm.network.service import ServiceLimits, Services, ask, byte_view, decode_error, decode_meta
from swarm.network.transport import MAX_META_BYTES, Handler, Message, Turn, Way

PIECE_BYTES = 16 << 10
"""Messages that share a line take turns with pieces of at most this length,"""
PIECE_S = 0.1
"""or of what the slower of the two lines carries in this time, one packet at least: none seems dead for its turn."""
PACKET_BYTES = 1448
MAX_PLANTED = 256
"""Of a topic, as a node of the DHT stores no more."""


@dataclass
class _Line:
    """One direction of a peer's link; what it carries goes piece after piece."""

    bytes_per_s: float = math.inf
    free_at: float = 0.0

    def take(self, num_bytes: int, at: float) -> float:
        """When a piece that is here at that time has passed."""
        self.free_at = max(self.free_at, at) + num_bytes / self.bytes_per_s
        return self.free_at


@dataclass(eq=False)
class _OpenCall:
    caller: PeerId
    callee: PeerId
    working: asyncio.Task[tuple[bytes, memoryview]]
    is_broken: bool = False

    def break_off(self) -> None:
        self.is_broken = True
        self.working.cancel()


class MemoryNetwork:
    """Peers of one event loop and what lies between them.

    `delay_s` is each message's way to the other peer; `loss` the probability that a message (a request or a reply)
    is never seen again, which its caller notices at the deadline. Lines may be limited or broken. The same `rng` and
    calls give the same faults.
    """

    def __init__(
        self,
        rng: random.Random,
        delay_s: float = 0.0,
        loss: float = 0.0,
        *,
        limits: ServiceLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self.clock = clock
        """Seconds since the epoch, for the expiry of directory records."""
        self.limits = limits or ServiceLimits()
        self.records: dict[str, dict[PeerId, tuple[float, bytes]]] = {}
        """(expiry, signed bytes) by topic and peer."""
        self.planted: dict[str, dict[PeerId, bytes]] = {}
        """What lying nodes hold, by topic and by whose record they say it is."""
        self._rng = rng
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._cuts: set[frozenset[PeerId]] = set()
        self._open_calls: set[_OpenCall] = set()
        self._up: defaultdict[PeerId, _Line] = defaultdict(_Line)
        self._down: defaultdict[PeerId, _Line] = defaultdict(_Line)
        self._broken_lines: set[PeerId] = set()
        self.carried: Counter[tuple[PeerId, PeerId]] = Counter()
        """Bytes of bodies, from whom to whom, of messages that came whole."""

    def limit(self, peer_id: PeerId, *, up_bytes_per_s: float, down_bytes_per_s: float = math.inf) -> None:
        """From now on the bodies of what the peer sends and is sent take their time on its line."""
        self._up[peer_id].bytes_per_s, self._down[peer_id].bytes_per_s = up_bytes_per_s, down_bytes_per_s

    def break_line(self, peer_id: PeerId) -> None:
        """Nothing passes the peer's line any more, and nobody is told."""
        self._broken_lines.add(peer_id)

    def mend_line(self, peer_id: PeerId) -> None:
        """Undo `break_line`."""
        self._broken_lines.discard(peer_id)

    def transport(self, identity: Identity) -> "MemoryTransport":
        """A new, live transport of this peer; it takes the place of one that was killed or closed."""
        self.kill(identity.peer_id)
        self._transports[identity.peer_id] = MemoryTransport(self, identity.peer_id)
        return self._transports[identity.peer_id]

    def directory(self, identity: Identity) -> "MemoryDirectory":
        """This peer's view of the one directory everybody shares."""
        return MemoryDirectory(self, identity)

    def kill(self, peer_id: PeerId) -> None:
        """The peer's process dies: its open calls break, and nobody reaches it until it has a new transport."""
        self._transports.pop(peer_id, None)
        self._break_calls(lambda call: peer_id in (call.caller, call.callee))

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Part two peers: their open calls break, new ones fail at once, and they do not see each other's records."""
        self._cuts.add(frozenset((one, other)))
        self._break_calls(lambda call: {call.caller, call.callee} == {one, other})

    def heal(self, one: PeerId, other: PeerId) -> None:
        """Undo `cut`."""
        self._cuts.discard(frozenset((one, other)))

    def is_cut(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) in self._cuts

    def is_live(self, transport: "MemoryTransport") -> bool:
        return self._transports.get(transport.peer_id) is transport

    def reach(self, caller: "MemoryTransport", callee: PeerId) -> "MemoryTransport":
        """The transport at the other end. Raises TransientError when there is none or the way there is cut."""
        other = self._transports.get(callee)
        if not self.is_live(caller) or other is None or self.is_cut(caller.peer_id, callee):
            raise UnreachableError(f"{callee}: cannot be reached")
        return other

    async def exchange(
        self, caller: PeerId, callee: "MemoryTransport", method: str, request: Message, timeout_s: float
    ) -> tuple[bytes, memoryview]:
        """Carry a request there and the answer back. Cancelled, it cancels the handler.

        Raises TransientError when the call breaks, and what the callee raises.
        """
        working = asyncio.create_task(self._there_and_back(callee, caller, method, request, timeout_s))
        call = _OpenCall(caller, callee.peer_id, working)
        self._open_calls.add(call)
        try:
            await asyncio.wait((working,))
            if call.is_broken:
                raise UnreachableError(f"{callee.peer_id}: {method} broke off")
            return working.result()
        finally:
            self._open_calls.discard(call)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)  # also where it was over: somebody takes its error

    async def _there_and_back(
        self, callee: "MemoryTransport", caller: PeerId, method: str, request: Message, timeout_s: float
    ) -> tuple[bytes, memoryview]:
        there, back = (caller, callee.peer_id), (callee.peer_id, caller)
        async with asyncio.timeout(timeout_s) as deadline:
            await self._carry(there, request.num_bytes, deadline)
            if request.num_bytes:
                deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
            try:
                async with callee.answered(caller, method, request) as answer:
                    await self._carry(back, len(answer[1]), deadline)
            except (RemoteError, TransientError):
                await self._carry(back, 0, deadline)
                raise
        return answer

    async def _carry(self, way: tuple[PeerId, PeerId], num_bytes: int, deadline: asyncio.Timeout) -> None:
        """One message's way, which a lost one never ends; its body's, as long as it keeps coming."""
        loop = asyncio.get_running_loop()
        sender, receiver = way
        if self.loss and self._rng.random() < self.loss:
            await loop.create_future()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if not self._broken_lines.isdisjoint(way):
            await loop.create_future()
        is_limited = self._up[sender].bytes_per_s < math.inf or self._down[receiver].bytes_per_s < math.inf
        if num_bytes and is_limited:
            transfer = Transfer(num_bytes, loop.time())
            deadline.reschedule(transfer.due)
            came = 0
            while came < num_bytes:
                slowest = min(self._up[sender].bytes_per_s, self._down[receiver].bytes_per_s)
                piece = max(PACKET_BYTES, int(min(PIECE_BYTES, slowest * PIECE_S)))
                size = min(piece, num_bytes - came)
                left_at = self._up[sender].take(size, loop.time())
                await asyncio.sleep(self._down[receiver].take(size, left_at) - loop.time())
                if not self._broken_lines.isdisjoint(way):
                    await loop.create_future()
                came += size
                transfer.progress(came, now=loop.time())
                deadline.reschedule(transfer.due)
        self.carried[way] += num_bytes

    def _break_calls(self, concerned: Callable[[_OpenCall], bool]) -> None:
        for call in self._open_calls:
            if concerned(call):
                call.break_off()


class MemoryTransport:
    """`swarm.network.transport.Transport` within a MemoryNetwork, which makes it."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id
        self._services = Services(network.limits)
        self._bytes_sent = 0
        self._bytes_received = 0

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        self._services.serve(method, handler, max_body_bytes=max_body_bytes)

    def in_turns(self, method: str, turn: Turn) -> None:
        self._services.in_turns(method, turn)

    def expect(self, peers: Iterable[PeerId]) -> None:
        self._services.expect(peers)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        assert peer_id != self.peer_id, f"{method}: a peer does not call itself"
        if not is_peer_id(peer_id):
            raise RemoteError("malformed", f"{peer_id[:60]!r} is no peer id")
        meta = pack(request.meta)
        body = b"".join(byte_view(buffer) for buffer in (request.body, *request.more))
        assert len(meta) <= MAX_META_BYTES, f"{method}: meta of {len(meta)} bytes is over the limit"
        callee = self._network.reach(self, peer_id)
        self._bytes_sent += len(meta) + len(body)
        try:
            # The callee gets bytes of its own, as from a network.
            carried = Message(decode_meta(meta), memoryview(bytearray(body)))
            reply_meta, reply_body = await self._network.exchange(self.peer_id, callee, method, carried, timeout_s)
        except TimeoutError as error:
            raise UnreachableError(f"{peer_id}: no answer to {method} in {timeout_s:g} s") from error
        except RemoteError as error:
            kind, message = decode_error({"kind": error.kind, "message": str(error)})
            raise RemoteError(kind, f"{method}: {message}", peer_id) from error
        if len(reply_body) > max_body_bytes:
            raise RemoteError(
                "too_large",
                f"{method}: an answer of {len(reply_body)} bytes is over the limit of {max_body_bytes}",
                peer_id,
            )
        callee.count_received(len(meta) + len(body))
        self.count_received(len(reply_meta) + len(reply_body))
        return Message(decode_meta(reply_meta), memoryview(bytearray(reply_body)))

    @contextlib.asynccontextmanager
    async def answered(self, caller: PeerId, method: str, request: Message) -> AsyncIterator[tuple[bytes, memoryview]]:
        """(canonical meta, body) for an incoming call, which is open until they have gone; for the network only."""
        with self._services.admitted(caller, method, len(request.body)) as service:
            async with contextlib.AsyncExitStack() as turn:
                meta, body, _ = await ask(service, caller, method, request, turn)
                self._bytes_sent += len(meta) + len(body)
                yield meta, body

    def count_received(self, num_bytes: int) -> None:
        """Of a message that came; for the network only."""
        self._bytes_received += num_bytes

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        self._network.reach(self, peer_id)

    def addresses(self) -> list[str]:
        return [f"/memory/1/p2p/{self.peer_id}"]

    def traffic(self) -> tuple[int, int]:
        return self._bytes_sent, self._bytes_received

    async def host_of(self, peer_id: PeerId) -> str | None:
        return "127.0.0.1"

    def ways(self) -> dict[PeerId, Way]:
        return {}

    async def close(self) -> None:
        if self._network.is_live(self):
            self._network.kill(self.peer_id)


class MemoryDirectory:
    """`swarm.network.transport.Directory` of a MemoryNetwork: the same records, signed and checked in the same way."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self._network = network
        self._identity = identity
        self.refused = 0

    async def publish(self, topic: str, fields: Mapping[str, Value], *, ttl_s: float) -> None:
        record, data = sign_record(self._identity, topic, fields, ttl_s=ttl_s, now=self._network.clock())
        records = self._network.records.setdefault(topic, {})
        expiry, _ = records.get(record.peer_id, (0.0, b""))
        if record.expires <= expiry:
            raise TransientError(f"{topic}: a record that lives longer is there already")
        records[record.peer_id] = (record.expires, data)

    async def lookup(self, topic: str) -> dict[PeerId, dict[str, Value]]:
        return {peer_id: record.fields for peer_id, (record, _) in self._newest(topic).items()}

    async def records(self, topic: str) -> dict[PeerId, bytes]:
        return {peer_id: data for peer_id, (_, data) in self._newest(topic).items()}

    async def plant(self, topic: str, data: bytes, *, peer_id: PeerId, expires: float) -> None:
        planted = self._network.planted.setdefault(topic, {})
        if len(planted) < MAX_PLANTED or peer_id in planted:
            planted[peer_id] = data

    def _newest(self, topic: str) -> dict[PeerId, tuple[Record, bytes]]:
        now = self._network.clock()
        records = self._network.records.get(topic, {})
        for peer_id in [peer_id for peer_id, (expiry, _) in records.items() if expiry <= now]:
            del records[peer_id]
        answers = [*(data for _, data in records.values()), *self._network.planted.get(topic, {}).values()]
        found, refused = newest_of(answers, topic, now=now)
        self.refused += refused
        return {peer: held for peer, held in found.items() if not self._network.is_cut(self._identity.peer_id, peer)}

    async def close(self) -> None:
        """Nothing to let go of: the records live in the network."""
