"""A local TCP port that is listened on and dialled from at the same time.

Two connects that meet half way become one connection (RFC 9293, simultaneous open); a router that lets one of them in
by itself has it accepted. All sockets of the port share it (SO_REUSEPORT), and each pair of ends is one connection.
"""

import asyncio
import socket

from swarm.network.addresses import version_of
from swarm.network.bulk.direct import prepare
from swarm.network.places import caller_of
from swarm.network.punch.seen import Endpoint

AGAIN_S = 0.05
"""After a refusal: a router may answer what it does not know yet with a reset."""
_BACKLOG = 16


class LocalPort:
    """One port of this machine. Raises OSError when there is none."""

    def __init__(self, host: str) -> None:
        self._family = socket.AF_INET6 if version_of(host) == 6 else socket.AF_INET
        self._host = host
        self._listener = self._socket(0)
        self.number: int = self._listener.getsockname()[1]
        self._listener.listen(_BACKLOG)

    def close(self) -> None:
        """Nothing new comes by it. Connections stay with whoever has them."""
        self._listener.close()

    async def connect(self, endpoint: Endpoint) -> socket.socket:
        """A connection from this port, at the first try. Raises OSError. The caller sets a deadline."""
        connection = self._socket(self.number)
        try:
            prepare(connection)
            await asyncio.get_running_loop().sock_connect(connection, tuple(endpoint))
        except BaseException:
            connection.close()
            raise
        return connection

    async def meet(self, endpoint: Endpoint) -> socket.socket:
        """A connection from this port, tried until it is there. The caller sets a deadline.

        Raises OSError for what another try does not mend: no route, or the same connection was accepted meanwhile.
        """
        while True:
            try:
                return await self.connect(endpoint)
            except (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError):
                await asyncio.sleep(AGAIN_S)

    async def accept(self, host: str) -> socket.socket:
        """The next connection from an address, of IPv6 from its /64; others' are closed. The caller sets a deadline."""
        while True:
            connection, address = await asyncio.get_running_loop().sock_accept(self._listener)
            if caller_of(address[0]) == caller_of(host):
                prepare(connection)
                return connection
            connection.close()

    def _socket(self, port: int) -> socket.socket:
        made = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if self._family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((self._host, port))
        except BaseException:
            made.close()
            raise
        return made
