"""p2pd's control protocol: protobuf messages behind a varint length on a Unix socket.

hivemind has a client of its own, made of asyncio's buffered streams. Ours hands out the plain sockets: a body
is then received straight into its one buffer, and a cancelled call closes its socket at once, which ends the
stream at the other peer. Protocol: https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md
"""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarm.core.ids import PeerId
from swarm.identity.key import peer_id_bytes, peer_id_from_bytes
from swarm.network.bulk.sockets import prepare, receive

_MAX_CONTROL_BYTES = 4 << 20
_P2P_CODE = bytes([0xA5, 0x03])
"""Of /p2p/ in a binary multiaddress."""
_MAX_ERROR_CHARACTERS = 500


class ControlError(Exception):
    """p2pd refused a request, in its own words, or broke off."""


class ControlClient:
    """Requests to one p2pd. None of them has a deadline of its own: callers set one."""

    def __init__(self, control_path: Path) -> None:
        self._control_path = control_path

    async def identify(self) -> tuple[PeerId, list[str]]:
        """p2pd's peer id and the multiaddresses it believes it can be dialled at."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        peer_id = _checked_peer_id(response.identify.id)
        return peer_id, [str(Multiaddr(address)) for address in response.identify.addrs]

    async def connect(self, peer_id: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer at `addresses` (without their /p2p part) unless there is a connection already."""
        request = p2pd_pb2.ConnectRequest(
            peer=peer_id_bytes(peer_id), addrs=[_address_bytes(address) for address in addresses]
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))

    async def disconnect(self, peer_id: PeerId) -> None:
        """Close the connections to a peer, and with them its open streams."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer_id))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request))

    async def remote_host(self, peer_id: PeerId) -> str | None:
        """The IP address at the other end of a connection to the peer; None if there is none but through relays."""
        return (await self.remote_hosts()).get(peer_id)

    async def remote_hosts(self) -> dict[PeerId, str | None]:
        """Of each connected peer, the IP address at the other end; None for one that only relays lead to."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        hosts: dict[PeerId, str | None] = {}
        for info in response.peers:
            try:
                peer_id = peer_id_from_bytes(info.id)
            except ValueError:  # of another kind of key
                continue
            hosts.setdefault(peer_id, None)
            for data in info.addrs:
                match str(Multiaddr(data)).split("/"):
                    case ["", "ip4" | "ip6", host, "tcp", _]:
                        hosts[peer_id] = hosts[peer_id] or host
        return hosts

    async def accept_streams(self, protocol: str, listen_path: Path) -> None:
        """Have p2pd open a connection to the Unix socket at `listen_path` for every incoming stream of `protocol`."""
        request = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{listen_path}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))

    async def open_stream(self, peer_id: PeerId, protocol: str) -> socket.socket:
        """A stream to the peer, as a socket of the caller's; closing it ends the stream at both ends."""
        request = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol])
        connection, _ = await self._send(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request))
        return connection

    async def _ask(self, request: "p2pd_pb2.Request") -> "p2pd_pb2.Response":
        connection, response = await self._send(request)
        connection.close()
        return response

    async def _send(self, request: "p2pd_pb2.Request") -> "tuple[socket.socket, p2pd_pb2.Response]":
        loop = asyncio.get_running_loop()
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # too many open files
            raise ControlError(f"p2pd cannot be asked: {error}") from error
        try:
            prepare(connection)
            await loop.sock_connect(connection, str(self._control_path))
            await loop.sock_sendall(connection, delimited(request.SerializeToString()))
            response = p2pd_pb2.Response()
            response.ParseFromString(await read_delimited(connection))
            if response.type == p2pd_pb2.Response.ERROR:
                raise ControlError(" ".join(response.error.msg.split())[:_MAX_ERROR_CHARACTERS])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | EOFError):
                raise ControlError(f"p2pd does not answer: {error}") from error
            raise
        return connection, response


async def read_stream_peer(connection: socket.socket) -> PeerId:
    """The authenticated peer at the other end of an incoming stream, which p2pd announces first on it."""
    info = p2pd_pb2.StreamInfo()
    info.ParseFromString(await read_delimited(connection))
    return _checked_peer_id(info.peer)


async def read_delimited(connection: socket.socket) -> bytes:
    """A message behind its length. Raises ControlError when it is over a bound, EOFError when it breaks off."""
    length = shift = 0
    while True:
        byte = (await receive(connection, 1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise ControlError("p2pd sent a length of more than four bytes")
    if length > _MAX_CONTROL_BYTES:
        raise ControlError(f"p2pd sent a message of {length} bytes")
    return bytes(await receive(connection, length))


def delimited(message: bytes) -> bytes:
    """A message behind its length, as libp2p's protocols have it."""
    length, prefix = len(message), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + message


def _address_bytes(address: str) -> bytes:
    """hivemind's Multiaddr writes a peer id in a form that p2pd refuses within an address, as relayed ones have it."""
    start, *hops = address.split("/p2p/")
    data: bytes = Multiaddr(start).to_bytes()
    for hop in hops:
        peer_id, _, rest = hop.partition("/")
        raw = peer_id_bytes(PeerId(peer_id))
        data += _P2P_CODE + bytes([len(raw)]) + raw + (Multiaddr(f"/{rest}").to_bytes() if rest else b"")
    return data


def _checked_peer_id(data: bytes) -> PeerId:
    try:
        return peer_id_from_bytes(data)
    except ValueError as error:
        raise ControlError(str(error)) from error
