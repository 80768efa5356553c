"""Peers call each other over the Internet: calls over p2pd, in the caller's event loop.

A call is a request and its answer on a stream, which then waits for the next call. Whoever gives up closes the stream,
and the other end's work on it is cancelled. Streams are libp2p's, over TCP with TLS or noise, never over QUIC, where
p2pd loses data; or direct ones (`swarm.network.bulk.direct`), once a call to the peer carried bulk.
"""

import asyncio
import contextlib
import math
import random
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Any

from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity, is_peer_id
from swarm.network.addresses import is_dialled, multiaddress, ports_of, version_of
from swarm.network.answering import Answering, AnsweringLimits
from swarm.network.bulk import framing
from swarm.network.bulk.direct import (
    ASK_S,
    CONNECT_S,
    OFFER,
    WORTH_BYTES,
    WORTH_PUNCHING_BYTES,
    DirectDialler,
    DirectListener,
)
from swarm.network.bulk.direct import prepare as prepare_direct
from swarm.network.bulk.framing import ReplyHead, Status
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.bulk.sessions import SESSION_BYTES
from swarm.network.bulk.sockets import Sending, Stream, prepare, receive
from swarm.network.directory.dial_back import DIAL_BACK, MAX_PORTS, DialBack, DialBackRequest, DialledBack
from swarm.network.directory.reachable import remoteness
from swarm.network.p2pd.control import ControlClient, ControlError, read_stream_peer
from swarm.network.p2pd.idle_streams import PUNCHED_KEPT_BY_CALLEE_S, IdleStreams
from swarm.network.p2pd.named_hosts import NamedHosts
from swarm.network.p2pd.processes import P2PDaemon
from swarm.network.p2pd.relay_place import RelayPlace, take_place
from swarm.network.p2pd.settings import P2PSettings, check_address, direct_hosts, is_relayed, is_tcp, p2pd_arguments
from swarm.network.punch.onlooker import ONLOOKER, Onlooker
from swarm.network.punch.puncher import GO, PUNCH, Puncher, Surroundings
from swarm.network.punch.seen import Judge, Seen
from swarm.network.router.forwarded import Forwarded
from swarm.network.service import Services, decode_error
from swarm.network.transport import Handler, Message, Turn, Way
from swarm.release import PROTOCOL

__all__ = ["P2PSettings", "P2PTransport"]

_ITS_TURN_S = 5.0
"""A peer behind a relay has this long to dial us before we reach it through the relay."""
_LOOK_AGAIN_S = 0.2
_CROSSED = "noise: message is too short"
"""In p2pd's words, where both ends dialled at the same moment, each from the port it listens on: TCP makes one
connection of the two, in which both expect an answer. p2pd then refuses for 5 s to dial again."""
_DIAL_AGAIN_S = 0.25, 0.75
"""Drawn, or both would dial at the same moment again. Who was dialled meanwhile is connected."""
_LOOK_AT_STREAMS_S = 5.0
"""A punched stream that broke in use never comes to rest."""
SMALL_TALK_WAITS_S = 0.25
"""For a punched stream that comes to rest, while all of them are at work; then it goes by the relay. At the end of such
a time one does on lines for which a round's messages are cut."""
PROVE = "punched"
"""{} -> {}: that whoever answers on a new connection is the peer."""
_MOST_ONLOOKERS = 4
"""Asked, one after the other, until two have said where this peer is seen."""
_STREAM_PROTOCOL = f"/homeswarm/{PROTOCOL}/call"


class P2PTransport:
    """`swarm.network.transport.Transport` over one p2pd. Made by `create`."""

    def __init__(self, identity: Identity, settings: P2PSettings, daemon: P2PDaemon) -> None:
        self._identity = identity
        self._settings = settings
        self._daemon = daemon
        self._control = ControlClient(daemon.control_path)
        self._addresses: list[str] = []
        self.relayed: tuple[str, ...] = ()
        """Addresses through relays that keep a place for this peer; others are told them too."""
        self.forwarded: Forwarded | None = None
        """What a router forwards to this peer, once it is known to lead here; others are told it too."""
        self.relay_carries_bulk = True
        """As its owner's budget says; calls that carry bulk are not made through it otherwise."""
        self.dialled_back: DialledBack | None = None
        """What the host's dialling back came to; None until it has said it."""
        self._services = Services(settings.limits)
        self._sent = framing.Sent()
        self._answering = Answering(
            self._services,
            self._sent,
            AnsweringLimits(
                window_s=settings.window_s, longest_call_s=settings.longest_call_s, max_streams=settings.max_streams
            ),
        )
        self._named = NamedHosts(public_only=settings.punch_public_only)
        self._idle = IdleStreams()
        self._hosts: dict[PeerId, str | None] = {}
        """As p2pd last listed its peers, at which address each is; None for who is behind a relay."""
        self.host: PeerId | None = None
        """The run's, once one is known: its word on where a peer is seen counts by itself."""
        self._onlooker = Onlooker(identity)
        self._puncher: Puncher | None = None
        """None where nothing is listened on."""
        self._direct = DirectDialler(
            self.peer_id,
            self._control,
            self._ask_for_offer,
            self._named.elsewhere,
            self._punch,
            on_known=self._idle.drop,
        )
        self._direct_listener = DirectListener(self.peer_id, [], 0)
        self._ending: asyncio.Task[None] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bytes_received = 0

    @classmethod
    async def create(cls, identity: Identity, settings: P2PSettings | None = None) -> "P2PTransport":
        """Start p2pd and listen; connects to nobody. Raises LocalError when p2pd does not start."""
        settings = settings or P2PSettings()
        daemon = await P2PDaemon.start(
            p2pd_arguments(settings),
            key_file_bytes=identity.to_key_file_bytes(),
            timeout_s=settings.start_s,
            threads=settings.threads,
        )
        transport = cls(identity, settings, daemon)
        try:
            async with asyncio.timeout(settings.start_s):
                await transport._listen()
        except BaseException as error:
            await transport.close()
            if isinstance(error, ControlError | TimeoutError):
                raise LocalError(f"p2pd started but does not answer: {error}") from error
            raise
        return transport

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def daemon(self) -> P2PDaemon:
        """The p2pd behind this transport; the directory speaks to it too."""
        return self._daemon

    @property
    def ended(self) -> asyncio.Event:
        """Set when p2pd has ended: this transport is of no more use, and its owner should stop or make another."""
        return self._daemon.ended

    @property
    def can_be_dialled(self) -> bool | None:
        """By IPv4 or IPv6, as the host says; None until it has said it."""
        return None if self.dialled_back is None else self.dialled_back.answers

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
            raise RemoteError("malformed", f"{peer_id[:60]!r} is no peer id", None)
        phase = "connecting"
        stream: Stream | None = None
        request_head, body = framing.encode_request(method, request, timeout_s=timeout_s)
        request_bytes = len(request_head) + request.num_bytes
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                is_bulk = await self._is_bulk(peer_id, request_bytes, max_body_bytes)
                self._consider_direct(peer_id, request_bytes, is_bulk=is_bulk)
                if is_bulk:
                    await self._direct.found_out(peer_id, timeout_s)
                # What a punch begins by has no time to lose: half of its way is waited for.
                within_s = math.inf if is_bulk else 0.0 if method in (PUNCH, GO) else SMALL_TALK_WAITS_S
                brings_some = max(request_bytes, max_body_bytes) >= WORTH_PUNCHING_BYTES
                stream = self._idle.take(peer_id) or await self._open_stream(peer_id, within_s, for_bulk=brings_some)
                if is_bulk and not (self.relay_carries_bulk or isinstance(stream, SealedSocket)):
                    await self._spare_relay(peer_id)
            phase = "sending and waiting"
            head = await self._exchange_heads(stream, method, request_head, body, timeout_s, request.on_left)
            phase = "receiving the answer"
            reply = await self._read_reply(stream, method, head, max_body_bytes)
            is_kept = isinstance(stream, SealedSocket) or not (self._direct.knows(peer_id) or self._is_punched(peer_id))
            if is_kept and head.status.was_read:
                self._rest(peer_id, stream)
                stream = None
            _check_answered(peer_id, method, head.status, reply)
            reply_bytes = head.meta_bytes + head.body_bytes
            self._consider_direct(peer_id, reply_bytes, is_bulk=reply_bytes >= self._worth_bytes(peer_id))
            return reply
        except TimeoutError as error:
            waited_s = asyncio.get_running_loop().time() - began
            raise UnreachableError(f"{peer_id}: no answer to {method} in {waited_s:.3g} s ({phase})") from error
        except (EOFError, OSError, ControlError) as error:
            raise UnreachableError(f"{peer_id}: {method} broke off while {phase}: {error}") from error
        except RemoteError as error:
            error.peer_id = peer_id
            raise
        finally:
            if stream is not None:
                stream.close()

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        """As in `Transport`. p2pd refuses for 5 s (later longer) to dial an address that failed before: a peer that
        comes back at its old address is reached at once only if it is the one that dials.

        A peer behind a relay dials whoever can be dialled. We leave it time for that: a connection through the relay
        would stay, and its bytes with it.
        """
        if not is_peer_id(peer_id):
            raise TransientError(f"{peer_id[:60]!r} is no peer id")
        dialled = []
        for address in filter(is_dialled, addresses):
            with contextlib.suppress(SettingsError):  # a stranger's address of another kind is not for us
                check_address("address", address)
                dialled.append(address.removesuffix(f"/p2p/{peer_id}"))
        self._named.name(peer_id, dialled)
        if addresses and not dialled:
            raise TransientError(f"{peer_id}: none of its {len(addresses)} addresses is a TCP multiaddress")
        if self.can_be_dialled and any(map(is_relayed, dialled)) and await self._is_dialled_by(peer_id):
            return
        await self._dial(peer_id, dialled)

    async def _is_dialled_by(self, peer_id: PeerId) -> bool:
        """Whether the peer connects within a moment."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _ITS_TURN_S
        while peer_id not in await self.connected_peers():
            if loop.time() > give_up_at:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True

    async def _dial(self, peer_id: PeerId, dialled: list[str]) -> None:
        crossed = False
        try:
            async with asyncio.timeout(self._settings.connect_s):
                while True:
                    try:
                        await self._control.connect(peer_id, dialled)
                        return
                    except ControlError as error:
                        crossed = crossed or _CROSSED in str(error)
                        if not crossed:
                            raise UnreachableError(f"{peer_id}: {error}") from error
                    await asyncio.sleep(random.uniform(*_DIAL_AGAIN_S))
        except TimeoutError as error:
            raise UnreachableError(
                f"{peer_id}: no connection within {self._settings.connect_s:g} s to {', '.join(dialled)}"
            ) from error

    async def disconnect(self, peer_id: PeerId) -> None:
        """Close the connections to a peer; open calls to and from it break."""
        self._idle.drop(peer_id)
        if self._puncher is not None:
            self._puncher.drop(peer_id)
        with contextlib.suppress(ControlError, TimeoutError):
            async with asyncio.timeout(self._settings.connect_s):
                await self._control.disconnect(peer_id)

    async def connected_peers(self) -> list[PeerId]:
        """Peers there is a connection to at the moment. Raises TransientError when p2pd does not answer."""
        try:
            async with asyncio.timeout(self._settings.connect_s):
                self._hosts = await self._control.remote_hosts()
                return sorted(self._hosts)
        except (ControlError, TimeoutError) as error:
            raise TransientError(f"p2pd does not list its peers: {error}") from error

    def addresses(self) -> list[str]:
        """Public ones first, then those through relays: whoever keeps some of them alone keeps these."""
        forwarded = self.addresses_at(self.forwarded) if self.forwarded is not None else []
        public = [address for address in self._addresses if not remoteness(address)]
        return [*forwarded, *public, *self.relayed, *(one for one in self._addresses if one not in public)]

    def addresses_by(self, version: int) -> list[str]:
        """Where p2pd listens itself by this version of IP."""
        return [address for address in self._addresses if address.startswith(f"/ip{version}/")]

    def ports(self) -> list[int]:
        """Of IPv4, that a router would have to forward: p2pd's and that of direct streams."""
        direct, _ = self._direct_listener.ports()
        return [*self._listened_ports(), *([] if direct is None else [direct])]

    def addresses_at(self, forwarded: Forwarded) -> list[str]:
        """Where p2pd is dialled if the router does so."""
        listened = [forwarded.ports[port] for port in self._listened_ports() if port in forwarded.ports]
        return [f"{multiaddress(forwarded.outside, port)}/p2p/{self.peer_id}" for port in listened]

    def _listened_ports(self) -> list[int]:
        return ports_of(self._addresses, 4)

    def _direct_ports(self, host: str | None) -> tuple[int | None, int | None]:
        """Where a peer seen at this address dials direct streams."""
        four, six = self._direct_listener.ports()
        if self.forwarded is not None and four is not None and not self.forwarded.is_beside(host):
            return self.forwarded.ports.get(four), six
        return four, six

    async def ask_to_be_dialled(self, peer_id: PeerId, addresses: Sequence[str] | None = None) -> DialledBack:
        """Have a peer that this one is connected to dial it back, where it listens itself or at the ports of others.

        By both versions of IP, if the peer can be dialled by the other one too. Raises as `call` does.
        """
        with contextlib.suppress(ControlError, TimeoutError):
            async with asyncio.timeout(self._settings.connect_s):
                await self._look_where_it_listens()  # a provider may give another prefix, or address, any day
        listened = self._addresses if addresses is None else addresses
        ports4, ports6 = (tuple(ports_of(listened, version)[:MAX_PORTS]) for version in (4, 6))
        seen = await self._seen_otherwise(peer_id, {version for version, ports in ((4, ports4), (6, ports6)) if ports})
        request = Message(DialBackRequest(ports4, ports6, seen).to_value())
        timeout_s = self._settings.connect_s
        answer = await self.call(peer_id, DIAL_BACK, request, timeout_s=timeout_s, max_body_bytes=0)
        return DialledBack.from_value(answer.meta)

    async def _seen_otherwise(self, peer_id: PeerId, versions: Collection[int]) -> tuple[Seen, ...]:
        """The peer's word on where it sees this one by that of the versions of IP that p2pd has not reached it by."""
        with contextlib.suppress(ControlError, TransientError, RemoteError, OSError, EOFError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                known = await self._control.remote_host(peer_id)
                if self._puncher is None or known is None:
                    return ()
                for host in await self._named.of(peer_id):
                    if version_of(host) != version_of(known) and version_of(host) in versions:
                        return (await self._puncher.seen_by(peer_id, host),)
        return ()

    async def take_place(self, relay: PeerId) -> RelayPlace:
        """A place at a relay that this peer is connected to. Raises TransientError with the relay's reason."""
        try:
            async with asyncio.timeout(self._settings.connect_s):
                return await take_place(self._control, relay)
        except TimeoutError as error:
            raise UnreachableError(f"relay {relay}: no answer within {self._settings.connect_s:g} s") from error

    async def punch(self, peer_id: PeerId) -> bool:
        """Whether there are punched streams to the peer, once that has been tried if it is worth a try."""
        punching = self._punch(peer_id)
        return await asyncio.shield(punching) if punching is not None else self._is_punched(peer_id)

    def traffic(self) -> tuple[int, int]:
        return self._sent.num_bytes, self._bytes_received + self._answering.bytes_received

    async def host_of(self, peer_id: PeerId) -> str | None:
        try:
            async with asyncio.timeout(self._settings.connect_s):
                return await self._control.remote_host(peer_id)
        except (ControlError, TimeoutError) as error:
            raise TransientError(f"p2pd does not tell where {peer_id} is: {error}") from error

    def ways(self) -> dict[PeerId, Way]:
        found = {}
        for peer_id, host in self._hosts.items():
            if self._services.is_expected(peer_id):
                is_direct = host is not None or self._direct.knows(peer_id)
                is_punched = self._is_punched(peer_id) and not self._direct.knows(peer_id)
                found[peer_id] = Way.PUNCHED if is_punched else Way.DIRECT if is_direct else Way.RELAYED
        return found

    async def close(self) -> None:
        """End p2pd, and with it every open call, within 2 s. Handlers still running are cancelled."""
        # p2pd's end is what breaks our own open calls: their sockets close under them.
        await asyncio.gather(self._daemon.stop(), self._answering.stop(), return_exceptions=True)
        if self._ending is not None:
            await self._ending
        self._direct_listener.close()
        self._listener.close()

    # The calling side.

    async def _open_stream(self, peer_id: PeerId, within_s: float, *, for_bulk: bool) -> Stream:
        stream: Stream | None = await self._direct.open(peer_id, for_bulk=for_bulk)
        if stream is None:
            stream = await self._punched_stream(peer_id, within_s)
        return stream or await self._control.open_stream(peer_id, _STREAM_PROTOCOL)

    async def _punched_stream(self, peer_id: PeerId, within_s: float) -> Stream | None:
        """One that comes to rest in time, or if that is endless, of those that are punched meanwhile; None when there
        is none, or are no such any more."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + within_s
        while self._is_punched(peer_id) and (left_s := give_up_at - loop.time()) > 0:
            waits: set[asyncio.Future[Any]] = {self._idle.arrival(peer_id)}
            punching = self._punch(peer_id) if left_s == math.inf else None
            if punching is not None:
                waits.add(punching)
            timeout_s = min(left_s, _LOOK_AT_STREAMS_S)
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            stream = self._idle.take(peer_id)
            if stream is not None:
                return stream
        return None

    def _is_punched(self, peer_id: PeerId) -> bool:
        return self._puncher is not None and self._puncher.num_streams(peer_id) > 0

    def _punch(self, peer_id: PeerId) -> "asyncio.Task[bool] | None":
        return self._puncher.punch(peer_id) if self._puncher is not None else None

    def _rest(self, peer_id: PeerId, stream: Stream) -> None:
        is_punched = self._puncher is not None and self._puncher.is_punched(peer_id, stream)
        self._idle.put(peer_id, stream, is_punched=is_punched)

    async def _take_punched(self, peer_id: PeerId, stream: SealedSocket) -> None:
        timeout_s = self._settings.connect_s
        request_head, body = framing.encode_request(PROVE, Message(), timeout_s=timeout_s)
        head = await self._exchange_heads(stream, PROVE, request_head, body, timeout_s)
        _check_answered(peer_id, PROVE, head.status, await self._read_reply(stream, PROVE, head, 0))
        if not self._is_punched(peer_id):
            self._idle.drop(peer_id)  # p2pd's
        self._idle.put(peer_id, stream, is_punched=True)

    def _consider_direct(self, peer_id: PeerId, num_bytes: int, *, is_bulk: bool) -> None:
        if self._settings.direct_port is None or self._is_punched(peer_id):
            return
        if is_bulk or self._direct.is_worth_it(peer_id, num_bytes):
            self._direct.consider(peer_id)

    async def _spare_relay(self, peer_id: PeerId) -> None:
        """Raises UnreachableError where a stream of p2pd's goes through a relay."""
        if await self._control.remote_host(peer_id) is None:
            raise UnreachableError(f"{peer_id}: only a relay leads there, and it carries no bulk any more")

    async def _is_bulk(self, peer_id: PeerId, num_bytes: int, max_answer_bytes: int) -> bool:
        """Whether so much is worth a way of its own, or what may be answered where a relay would carry it."""
        most_bytes = max(num_bytes, max_answer_bytes)
        if most_bytes >= WORTH_PUNCHING_BYTES and not (peer_id in self._hosts or self._direct.knows(peer_id)):
            with contextlib.suppress(TransientError):
                await self.connected_peers()
        worth_bytes = self._worth_bytes(peer_id)
        return (most_bytes if worth_bytes == WORTH_PUNCHING_BYTES else num_bytes) >= worth_bytes

    def _worth_bytes(self, peer_id: PeerId) -> int:
        """Less where a relay carries it, as far as is known, or did before the peer was punched."""
        is_behind_relay = self._is_punched(peer_id) or self._hosts.get(peer_id, "") is None
        return WORTH_PUNCHING_BYTES if is_behind_relay else WORTH_BYTES

    async def _ask_for_offer(self, peer_id: PeerId) -> dict[str, Value]:
        answer = await self.call(peer_id, OFFER, Message(), timeout_s=ASK_S, max_body_bytes=0)
        return answer.meta

    async def _offer(self, sender: PeerId, _request: Message) -> Message:
        host = None
        with contextlib.suppress(ControlError):
            host = await self._control.remote_host(sender)
        offer = self._direct_listener.offer(sender, host, now=asyncio.get_running_loop().time())
        four, six = self._direct_ports(host)
        # Whoever is seen in a private network is behind the same router. Others would dial in vain, again and again.
        if self.dialled_back is not None and (host is None or ip_address(host).is_global):
            four = None if self.dialled_back.is_silent(4) else four
            six = None if self.dialled_back.is_silent(6) else six
        return Message(replace(offer, port4=four, port6=six).to_value())

    async def _exchange_heads(
        self,
        stream: Stream,
        method: str,
        head: bytes,
        body: Sequence[memoryview],
        timeout_s: float,
        on_left: Callable[[], None] | None = None,
    ) -> ReplyHead:
        """Send the request, and listen meanwhile: a peer that refuses says so before it has read the body."""
        num_bytes = len(head) + sum(map(len, body))
        sending = Sending(stream, head, *body)
        try:
            with self._sent.counting(stream, sending), framing.telling(stream, sending, on_left):
                reply_head = await framing.reply_head_after(
                    stream,
                    sending,
                    num_bytes,
                    wait_s=timeout_s,
                    window_s=self._settings.window_s,
                )
            if reply_head.status.was_read and not sending.is_done:
                raise RemoteError("malformed", f"{method}: answered before its request was received")
            return reply_head
        finally:
            sending.stop()

    async def _read_reply(self, stream: Stream, method: str, head: ReplyHead, max_body_bytes: int) -> Message:
        """The answer, or the error that was sent in its place."""
        if head.body_bytes > (max_body_bytes if head.status is Status.OK else 0):
            raise RemoteError(
                "too_large", f"{method}: an answer of {head.body_bytes} bytes is over the limit of {max_body_bytes}"
            )
        reply = await framing.read_content(stream, head, window_s=self._settings.window_s)
        self._bytes_received += head.meta_bytes + head.body_bytes
        return reply

    async def _listen(self) -> None:
        path = self._daemon.folder / "calls.sock"
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(512)
        self._answering.start(self._listener, _greet)
        await self._control.accept_streams(_STREAM_PROTOCOL, path)
        await self._look_where_it_listens()
        self.serve(DIAL_BACK, DialBack(self._control, self.peer_id).answer, max_body_bytes=0)
        self._ending = asyncio.create_task(self._end_with_p2pd(), name="end with p2pd")
        if self._settings.direct_port is not None:
            self._listen_directly(self._settings.direct_port)

    async def _look_where_it_listens(self) -> None:
        peer_id, addresses = await self._control.identify()
        assert peer_id == self.peer_id, f"p2pd runs as {peer_id}, not as {self.peer_id}"
        self._addresses = [f"{address}/p2p/{peer_id}" for address in addresses if is_tcp(address)]

    def _listen_directly(self, port: int) -> None:
        try:
            self._direct_listener = DirectListener(self.peer_id, direct_hosts(self._settings), port)
        except OSError as error:
            raise LocalError(f"port {port} for direct streams cannot be listened on: {error}") from error
        for listener in self._direct_listener.sockets:
            self._answering.start(listener, self._greet_direct)
        if not self._direct_listener.sockets:
            return
        self.serve(OFFER, self._offer, max_body_bytes=0)
        self.serve(ONLOOKER, self._offer_onlooker, max_body_bytes=0)
        around = Surroundings(
            bind_hosts={version_of(host): host for _, host in direct_hosts(self._settings)},
            call=self._call_small,
            onlookers=self._onlookers,
            versions=self._versions,
            judge=self._judge,
            is_stranger=self._services.is_stranger,
            answer=partial(self._answering.take, kept_s=PUNCHED_KEPT_BY_CALLEE_S),
            greet=self._greet_direct,
            take=self._take_punched,
        )
        self._puncher = Puncher(self.peer_id, self._direct_listener, around)
        self.serve(PUNCH, self._puncher.asked, max_body_bytes=0)
        self.serve(GO, self._puncher.go, max_body_bytes=0)
        self.serve(PROVE, _proven, max_body_bytes=0)

    async def _call_small(self, peer_id: PeerId, method: str, request: Message, timeout_s: float) -> Message:
        return await self.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=0)

    async def _versions(self, peer_id: PeerId) -> list[int]:
        """Of IP, by which this peer and another may meet. Nobody behind a router says of itself that it has IPv4."""
        known = None
        with contextlib.suppress(ControlError):
            known = await self._control.remote_host(peer_id)
        told = {
            version_of(host) for host in [*await self._named.elsewhere(peer_id), *([] if known is None else [known])]
        }
        listened = {version_of(host) for _, host in direct_hosts(self._settings)}
        has_ipv6 = False
        with contextlib.suppress(TransientError):
            has_ipv6 = {6} <= listened & told and bool(await self._onlookers(6))
        return [*([6] if has_ipv6 else []), *([4] if 4 in listened else [])]

    async def _onlookers(self, version: int) -> list[tuple[PeerId, str]]:
        """The host, and members that this peer is in touch with past all relays, and by this version of IP."""
        try:
            hosts = await self._control.remote_hosts()
        except ControlError as error:
            raise TransientError(f"p2pd does not list its peers: {error}") from error
        members = sorted(peer for peer in hosts if peer != self.host and self._services.is_expected(peer))
        asked = [self.host, *members] if self.host is not None else members
        found = []
        for peer in asked:
            known = hosts.get(peer)
            if known is not None:
                places = [known, *await self._named.elsewhere(peer)]
                found += [(peer, host) for host in places if version_of(host) == version][:1]
        return found[:_MOST_ONLOOKERS]

    def _judge(self) -> Judge:
        return Judge(self.host, self._services.is_expected, public_only=self._settings.punch_public_only)

    async def _offer_onlooker(self, sender: PeerId, _request: Message) -> Message:
        if self.can_be_dialled is False:
            raise TransientError("this peer cannot be dialled, and sees nobody")
        host = None
        with contextlib.suppress(ControlError):
            host = await self._control.remote_host(sender)
        return Message(self._onlooker.offer(sender, host, *self._direct_ports(host)).to_value())

    async def _greet_direct(self, connection: socket.socket) -> tuple[PeerId, SealedSocket]:
        prepare_direct(connection)
        session = bytes(await receive(connection, SESSION_BYTES))
        if self._onlooker.knows(session):
            await self._onlooker.answer(session, connection)
            raise EOFError("an onlooker has said what it saw")
        return await self._direct_listener.greet(session, connection)

    async def _end_with_p2pd(self) -> None:
        """Without p2pd nobody finds this peer, and its owner stops: no stream goes on past it."""
        await self._daemon.ended.wait()
        await asyncio.gather(self._answering.stop(), self._direct.close(), self._onlooker.close())
        if self._puncher is not None:
            await self._puncher.close()
        self._idle.close()


async def _greet(connection: socket.socket) -> tuple[PeerId, Stream]:
    prepare(connection)
    return await read_stream_peer(connection), connection


def _check_answered(peer_id: PeerId, method: str, status: Status, reply: Message) -> None:
    """Raises TransientError or RemoteError as the peer says."""
    if status is Status.OK:
        return
    kind, message = decode_error(reply.meta)
    if status.is_transient:
        raise TransientError(f"{peer_id}: {message}")
    raise RemoteError(kind, f"{method}: {message}")


async def _proven(_: PeerId, _request: Message) -> Message:
    return Message()
