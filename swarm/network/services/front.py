"""Strangers' connections to a host's doors, counted by address before anything of them is read.

A server that takes whoever connects runs out of files, and its host with it: one address opens thousands a second, and
says nothing on them.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from functools import partial

from swarm.core.errors import SettingsError
from swarm.network.places import Places, caller_of

MOST_CONNECTIONS = 256
"""Of one door. Of more, one is broken off of the address that has the most."""
READ_BYTES = 64 << 10
CONNECT_S = 5.0


async def listening(made: Callable[[], asyncio.BaseProtocol], listen: str, setting: str) -> asyncio.Server:
    """Listen at HOST:PORT, everywhere without HOST, port 0 for any. Raises SettingsError if that cannot be had.

    `setting` is what its owner calls it.
    """
    loop = asyncio.get_running_loop()
    host, _, port = listen.rpartition(":")
    try:
        if host:
            return await loop.create_server(made, host.strip("[]"), int(port))
        return await loop.create_server(made, sock=_everywhere(int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(f"--{setting} {listen}: cannot listen there ({error}); choose another port") from error


def port_of(server: asyncio.Server) -> int:
    """That was had."""
    return int(server.sockets[0].getsockname()[1])


class Counted(asyncio.Protocol):
    """A connection of the protocol `inner`, as long as it has a place."""

    def __init__(self, inner: asyncio.Protocol, places: "Places[asyncio.BaseTransport]") -> None:
        self._inner = inner
        self._places = places
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        _take(self._places, transport)

    def connection_lost(self, error: Exception | None) -> None:
        assert self._transport is not None
        self._places.leave(self._transport)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Passage:
    """Connections handed on, byte by byte, to a server on this machine that does not count its own."""

    def __init__(self) -> None:
        self._places: Places[asyncio.BaseTransport] = Places(MOST_CONNECTIONS)
        self._hosts: dict[int, str] = {}
        """Where each that is open comes from, by the port of ours that it is handed on from."""

    async def lead(self, listen: str, setting: str, *, to: int) -> asyncio.Server:
        """Hand on what comes to HOST:PORT `listen`, to this port of 127.0.0.1. Raises as `listening`."""

        def made() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(READ_BYTES), partial(self._hand_on, to))

        return await listening(made, listen, setting)

    def host_of(self, port: int) -> str:
        """The IP address of whose connection comes to the server from this port; empty for a program of this machine's
        own."""
        return self._hosts.get(port, "")

    async def _hand_on(self, to: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        mine = 0
        _take(self._places, writer.transport)
        try:
            async with asyncio.timeout(CONNECT_S):
                answers, there = await asyncio.open_connection("127.0.0.1", to, limit=READ_BYTES)
            mine = there.get_extra_info("sockname")[1]
            self._hosts[mine] = writer.get_extra_info("peername")[0]
            ways = {asyncio.ensure_future(_copy(reader, there)), asyncio.ensure_future(_copy(answers, writer))}
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, TimeoutError):
            pass  # it was broken off, or the server has ended
        finally:
            self._places.leave(writer.transport)
            self._hosts.pop(mine, None)
            for one in (writer, there):
                if one is not None:
                    one.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


def _take(places: "Places[asyncio.BaseTransport]", transport: asyncio.BaseTransport) -> None:
    peer = transport.get_extra_info("peername")
    lost = places.take(transport, caller_of(peer[0] if peer else None))
    if lost is not None:
        assert isinstance(lost, asyncio.WriteTransport)
        lost.abort()


def _everywhere(port: int) -> socket.socket:
    """Listens at this machine's addresses, of IPv6 too if it has any. Raises OSError."""
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("0.0.0.0", port))  # noqa: S104 - what its owner asked for
