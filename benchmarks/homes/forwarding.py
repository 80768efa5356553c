"""A home router that forwards ports to who asks for it (NAT-PMP): a program in the router's namespace.

    python -m benchmarks.homes.forwarding NAMESPACE INSIDE OUTSIDE

It listens at the router's inner address, and forwards by carrying bytes itself. It ends with its standard input.
"""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from typing import cast

from benchmarks.homes.namespaces import enter
from swarm.network.port_mapping import ROUTER_PORT

MOST_PORTS = 64


class Forwarding(asyncio.DatagramProtocol):
    """The router's side of RFC 6886, of TCP alone."""

    def __init__(self, outside: str) -> None:
        self._outside = outside
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._working: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._answer(data, addr))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        if data == b"\0\0":
            self._transport.sendto(struct.pack(">BBHI4s", 0, 128, 0, 0, socket.inet_aton(self._outside)), addr)
        elif len(data) == 12 and data[:2] == b"\0\2":
            _, inner, wanted, seconds = struct.unpack(">HHHI", data[2:])
            outer = await self._forward((addr[0], inner), wanted) if seconds else self._forget((addr[0], inner))
            result = 0 if outer or not seconds else 4
            self._transport.sendto(struct.pack(">BBHIHHI", 0, 130, result, 0, inner, outer, seconds), addr)

    async def _forward(self, to: tuple[str, int], wanted: int) -> int:
        """The outer port; 0 if there is none."""
        server = self._servers.get(to)
        for port in (wanted, 0):
            if server is None and len(self._servers) < MOST_PORTS:
                with contextlib.suppress(OSError):
                    server = await asyncio.start_server(lambda *ends: carry(to, *ends), self._outside, port)
        if server is None:
            return 0
        self._servers[to] = server
        return int(server.sockets[0].getsockname()[1])

    def _forget(self, to: tuple[str, int]) -> int:
        server = self._servers.pop(to, None)
        if server is not None:
            server.close()
        return 0


async def carry(to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways between a connection that came and another that it makes, to their ends."""
    with contextlib.suppress(OSError):
        within, beyond = await asyncio.open_connection(*to)
        await asyncio.gather(_one_way(reader, beyond), _one_way(within, writer), return_exceptions=True)
        beyond.close()
    writer.close()


async def _one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _main(inside: str, outside: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: Forwarding(outside), local_addr=(inside, ROUTER_PORT))
    print(json.dumps({"forwards": outside}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    enter(sys.argv[1])
    asyncio.run(_main(*sys.argv[2:]))
