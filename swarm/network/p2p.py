"""This is where peers call each other over the Internet: calls over p2pd, in the caller's event loop.

A call is one libp2p stream: request, reply, end. Whoever gives up closes the stream, and the other end's
work on it is cancelled. Streams run over TCP with TLS or noise, never over QUIC, where p2pd loses data.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal

from hivemind.utils.multiaddr import Multiaddr

from swarm import PROTOCOL
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity import Identity, is_peer_id
from swarm.network import framing
from swarm.network.control import ControlClient, ControlError, prepare, read_stream_peer
from swarm.network.framing import ReplyHead, RequestHead, Status
from swarm.network.processes import P2PDaemon
from swarm.network.service import ServiceLimits, Services, ask, decode_error
from swarm.network.transport import Handler, Message

logger = logging.getLogger(__name__)

_STREAM_PROTOCOL = f"/homeswarm/{PROTOCOL}/call"
_LINGER_S = 5.0
"""A refused caller has this long to read why and to close."""
_ACCEPT_PAUSE_S = 0.1
_MAX_ADDRESS_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class P2PSettings:
    """How a peer listens and what it takes on for others."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """TCP multiaddresses to listen on; port 0 lets the system choose. Empty: dial out only."""
    announce: tuple[str, ...] = ()
    """TCP multiaddresses others should dial instead, such as a forwarded port. Empty: those listened on."""
    relay: Literal["off", "use", "serve"] = "off"
    """use: dial, and be dialled, through peers that relay. serve: carry strangers' traffic as well (seeds)."""
    trusted_relays: tuple[str, ...] = ()
    """With relay = "use": where to ask for a relay address; multiaddresses with /p2p/<peer id>."""
    port_mapping: bool = False
    """Ask the router to forward the port (UPnP, NAT-PMP)."""
    auto_nat: bool = False
    """Let others tell whether we can be dialled, and answer them the same question."""
    reachability: Literal["unknown", "public", "private"] = "unknown"
    """What libp2p is to assume; a relay needs "public"."""
    start_s: float = 15.0
    """p2pd must listen by then. Nothing is dialled before."""
    connect_s: float = 10.0
    """One attempt to dial a peer at all its addresses."""
    stall_s: float = 30.0
    """No frame sent or received for this long, in either direction, ends a call that is being transferred."""
    longest_call_s: float = 3600.0
    """An incoming call that takes longer is cancelled, whatever deadline its caller announced."""
    max_streams: int = 512
    """Incoming streams at a time, those being refused included."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    def __post_init__(self) -> None:
        for name in ("listen", "announce", "trusted_relays"):
            for address in getattr(self, name):
                _check_address(name, address)
        if any("/tcp/0/" in f"{address}/" for address in self.announce):
            raise SettingsError(f"announce = {list(self.announce)}: port 0 cannot be dialled; name the forwarded port")


class P2PTransport:
    """`swarm.network.transport.Transport` over one p2pd. Made by `create`."""

    def __init__(self, identity: Identity, settings: P2PSettings, daemon: P2PDaemon) -> None:
        self._identity = identity
        self._settings = settings
        self._daemon = daemon
        self._control = ControlClient(daemon.control_path)
        self._addresses: list[str] = []
        self._services = Services(settings.limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bytes_sent = 0
        self._bytes_received = 0

    @classmethod
    async def create(cls, identity: Identity, settings: P2PSettings | None = None) -> "P2PTransport":
        """Start p2pd and listen; connects to nobody. Raises LocalError when p2pd does not start."""
        settings = settings or P2PSettings()
        daemon = await P2PDaemon.start(
            _p2pd_arguments(settings), key_file_bytes=identity.to_key_file_bytes(), timeout_s=settings.start_s
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

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        self._services.serve(method, handler, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        assert peer_id != self.peer_id, f"{method}: a peer does not call itself"
        if not is_peer_id(peer_id):
            raise RemoteError("malformed", f"{peer_id[:60]!r} is no peer id", None)
        phase = "connecting"
        stream = None
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._control.open_stream(peer_id, _STREAM_PROTOCOL)
                phase = "sending and waiting"
                head = await self._exchange_heads(stream, method, request, timeout_s)
                phase = "receiving the answer"
                return await self._read_reply(stream, peer_id, method, head, max_body_bytes)
        except TimeoutError as error:
            raise UnreachableError(f"{peer_id}: no answer to {method} within {timeout_s:g} s ({phase})") from error
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
        """
        if not is_peer_id(peer_id):
            raise TransientError(f"{peer_id[:60]!r} is no peer id")
        dialled = []
        for address in addresses:
            with contextlib.suppress(SettingsError):  # a stranger's address of another kind is not for us
                _check_address("address", address)
                dialled.append(address.removesuffix(f"/p2p/{peer_id}"))
        if addresses and not dialled:
            raise TransientError(f"{peer_id}: none of its {len(addresses)} addresses is a TCP multiaddress")
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await self._control.connect(peer_id, dialled)
        except TimeoutError as error:
            raise UnreachableError(
                f"{peer_id}: no connection within {self._settings.connect_s:g} s to {', '.join(dialled)}"
            ) from error
        except ControlError as error:
            raise UnreachableError(f"{peer_id}: {error}") from error

    async def disconnect(self, peer_id: PeerId) -> None:
        """Close the connections to a peer; open calls to and from it break."""
        with contextlib.suppress(ControlError, TimeoutError):
            async with asyncio.timeout(self._settings.connect_s):
                await self._control.disconnect(peer_id)

    async def connected_peers(self) -> list[PeerId]:
        """Peers there is a connection to at the moment. Raises TransientError when p2pd does not answer."""
        try:
            async with asyncio.timeout(self._settings.connect_s):
                return await self._control.connected_peers()
        except (ControlError, TimeoutError) as error:
            raise TransientError(f"p2pd does not list its peers: {error}") from error

    def addresses(self) -> list[str]:
        return list(self._addresses)

    async def refresh_addresses(self) -> list[str]:
        """Ask p2pd again where it can be dialled: relayed and mapped addresses come later than the start."""
        peer_id, addresses = await self._control.identify()
        assert peer_id == self.peer_id, f"p2pd runs as {peer_id}, not as {self.peer_id}"
        self._addresses = [f"{address}/p2p/{peer_id}" for address in addresses if _is_tcp(address)]
        return self.addresses()

    def traffic(self) -> tuple[int, int]:
        return self._bytes_sent, self._bytes_received

    async def close(self) -> None:
        """End p2pd, and with it every open call, within 2 s. Handlers still running are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        # p2pd's end is what breaks our own open calls: their sockets close under them.
        await asyncio.gather(self._daemon.stop(), *tasks, return_exceptions=True)
        self._listener.close()

    # The calling side.

    async def _exchange_heads(
        self, stream: socket.socket, method: str, request: Message, timeout_s: float
    ) -> ReplyHead:
        """Send the request, and listen meanwhile: a peer that refuses says so before it has read the body."""
        head, body = framing.encode_request(method, request, timeout_s=timeout_s)
        sending = asyncio.create_task(framing.send(stream, head, body, stall_s=timeout_s))
        try:
            reply_head = await framing.read_reply_head(stream)
            if reply_head.status is Status.OK and not sending.done():
                # Everything is in the kernel's hands before a peer can have read it; the task may not have noticed yet.
                await sending
            if sending.done() and not sending.cancelled() and sending.exception() is None:
                self._bytes_sent += len(head) + len(body)
            return reply_head
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _read_reply(
        self, stream: socket.socket, peer_id: PeerId, method: str, head: ReplyHead, max_body_bytes: int
    ) -> Message:
        if head.body_bytes > (max_body_bytes if head.status is Status.OK else 0):
            raise RemoteError(
                "too_large", f"{method}: an answer of {head.body_bytes} bytes is over the limit of {max_body_bytes}"
            )
        reply = await framing.read_content(stream, head, stall_s=self._settings.stall_s)
        self._bytes_received += head.meta_bytes + head.body_bytes
        if head.status is Status.OK:
            return reply
        kind, message = decode_error(reply.meta)
        if head.status is Status.TRANSIENT:
            raise TransientError(f"{peer_id}: {message}")
        raise RemoteError(kind, f"{method}: {message}")

    # The answering side.

    async def _listen(self) -> None:
        path = self._daemon.folder / "calls.sock"
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(512)
        self._start(self._accept())
        await self._control.accept_streams(_STREAM_PROTOCOL, path)
        await self.refresh_addresses()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("an incoming stream cannot be taken: %s", error)  # too many open files, say
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._tasks) > self._settings.max_streams:
                stream.close()  # a flood; its sender sees the stream end
            else:
                prepare(stream)
                self._start(self._answer(stream))

    async def _answer(self, stream: socket.socket) -> None:
        """One incoming call. Whatever goes wrong in it ends here."""
        with contextlib.closing(stream):
            try:
                async with asyncio.timeout(self._settings.stall_s):
                    peer_id = await read_stream_peer(stream)
                    head = await framing.read_request_head(stream)
                await self._answer_request(stream, peer_id, head)
                async with asyncio.timeout(self._settings.stall_s):
                    await _until_closed(stream)
            except RemoteError as error:
                await self._refuse(stream, Status.REMOTE, error.kind, str(error))
            except TransientError as error:
                await self._refuse(stream, Status.TRANSIENT, "transient", str(error))
            except (EOFError, OSError, ControlError, TimeoutError) as error:
                logger.debug("an incoming call broke off: %s", error)

    async def _answer_request(self, stream: socket.socket, peer_id: PeerId, head: RequestHead) -> None:
        with self._services.admitted(peer_id, head.method, head.body_bytes) as service:
            stall_s = self._settings.stall_s
            async with asyncio.timeout(min(head.timeout_ms / 1000, self._settings.longest_call_s)):
                request = await framing.read_content(stream, head, stall_s=stall_s)
                self._bytes_received += head.meta_bytes + head.body_bytes
                meta, body = await self._unless_closed(stream, ask(service.handler, peer_id, head.method, request))
                await framing.send(stream, framing.encode_reply_head(meta, body), body, stall_s=stall_s)
                self._bytes_sent += len(meta) + len(body)

    async def _unless_closed(
        self, stream: socket.socket, work: Coroutine[None, None, tuple[bytes, memoryview]]
    ) -> tuple[bytes, memoryview]:
        """The result of `work`, which is cancelled when the caller closes the stream. Raises EOFError then."""
        working = asyncio.create_task(work)
        watching = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(stream, 1))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EOFError("its caller has closed it")
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _refuse(self, stream: socket.socket, status: Status, kind: str, message: str) -> None:
        """Send an error; the caller closes."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await asyncio.get_running_loop().sock_sendall(stream, framing.encode_error(status, kind, message))
                await _until_closed(stream)


async def _until_closed(stream: socket.socket) -> None:
    """Let the caller close first: when we do, p2pd resets the stream and drops what the caller has not read yet."""
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(stream, 1 << 16):
        pass


def _p2pd_arguments(settings: P2PSettings) -> list[str]:
    """p2pd's flags. Those not named keep their defaults: connections pruned above 512, yamux, TLS and noise on."""
    arguments = [
        "-dhtServer=1",  # p2pd's own table only finds addresses of peer ids
        "-connManager=1",
        "-noise=1",
        "-tls=1",
        "-b=0",  # dialling seeds is ours to do and to repeat: a start must not depend on them
        f"-natPortMap={int(settings.port_mapping)}",
        f"-autonat={int(settings.auto_nat)}",
        f"-relay={int(settings.relay != 'off')}",
        f"-relayService={int(settings.relay == 'serve')}",
        f"-autoRelay={int(settings.relay == 'use' and bool(settings.trusted_relays))}",
    ]
    if settings.listen:
        arguments.append(f"-hostAddrs={','.join(settings.listen)}")
    else:
        arguments.append("-noListenAddrs=1")
    if settings.announce:
        arguments.append(f"-announceAddrs={','.join(settings.announce)}")
    if settings.trusted_relays:
        arguments.append(f"-trustedRelays={','.join(settings.trusted_relays)}")
    if settings.reachability != "unknown":
        arguments.append(f"-forceReachability{settings.reachability.capitalize()}=1")
    return arguments


def _is_tcp(address: str) -> bool:
    protocols = address.split("/")
    return "tcp" in protocols and not {"udp", "quic", "quic-v1", "ws", "wss", "webtransport"} & set(protocols)


def _check_address(field: str, address: str) -> None:
    try:
        if len(address) > _MAX_ADDRESS_CHARACTERS or "," in address:
            raise ValueError("too long, or several")
        Multiaddr(address)
    except ValueError as error:
        raise SettingsError(
            f"{field}: {address[:_MAX_ADDRESS_CHARACTERS]!r} is no multiaddress ({error}); "
            "write for example /ip4/203.0.113.5/tcp/31000"
        ) from error
    if not _is_tcp(address):
        raise SettingsError(f"{field}: {address!r} is not plain TCP, the one transport used; write /ip4/.../tcp/...")
