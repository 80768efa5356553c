"""A home router that forwards ports to who asks for it, by NAT-PMP, PCP or UPnP: a program in the router's namespace.

    python -m benchmarks.homes.forwarding NAMESPACE nat-pmp|pcp|upnp INSIDE OUTSIDE

It listens at the router's inner address, and forwards by carrying bytes itself. It ends with its standard input.
"""

import asyncio
import contextlib
import json
import re
import socket
import struct
import sys
from dataclasses import dataclass
from typing import cast
from xml.sax.saxutils import escape

from aiohttp import web

from benchmarks.homes.namespaces import enter
from swarm.network.router.asking import ROUTER_PORT

MOST_PORTS = 64
SEARCHES = ("239.255.255.250", 1900)
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICES = [
    f"urn:schemas-upnp-org:device:{name}:1" for name in ("InternetGatewayDevice", "WANDevice", "WANConnectionDevice")
]
Inner = tuple[str, int]
"""Address and port of a machine in the home."""


class Ports:
    """What the router forwards."""

    def __init__(self, outside: str) -> None:
        self.outside = outside
        self._servers: dict[int, tuple[Inner, asyncio.Server]] = {}

    @property
    def listed(self) -> list[tuple[int, Inner]]:
        """Outer ports and where they lead."""
        return [(outer, to) for outer, (to, _) in self._servers.items()]

    async def forward(self, to: Inner, wanted: int) -> int:
        """The outer port, any if 0 is wanted; 0 if there is none."""
        if len(self._servers) < MOST_PORTS:
            with contextlib.suppress(OSError):
                server = await asyncio.start_server(lambda *ends: carry(to, *ends), self.outside, wanted)
                outer = int(server.sockets[0].getsockname()[1])
                self._servers[outer] = (to, server)
                return outer
        return 0

    def forget(self, outer: int) -> None:
        if outer in self._servers:
            self._servers.pop(outer)[1].close()


class AskedRouter(asyncio.DatagramProtocol):
    """A router that is asked by datagrams."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._working: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._answer(data, addr))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        raise NotImplementedError

    async def _held(self, to: Inner, wanted: int, seconds: int) -> int:
        """The outer port that leads there, for so long; 0 where none is left."""
        held = next((outer for outer, beyond in self._ports.listed if beyond == to), 0)
        if seconds:
            return held or await self._ports.forward(to, wanted) or await self._ports.forward(to, 0)
        self._ports.forget(held)
        return held


class NatPmpRouter(AskedRouter):
    """The router's side of RFC 6886, of TCP alone."""

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        if data == b"\0\0":
            outside = socket.inet_aton(self._ports.outside)
            self._transport.sendto(struct.pack(">BBHI4s", 0, 128, 0, 0, outside), addr)
        elif len(data) == 12 and data[:2] == b"\0\2":
            _, inner, wanted, seconds = struct.unpack(">HHHI", data[2:])
            held = await self._held((addr[0], inner), wanted, seconds)
            result = 0 if held or not seconds else 4
            self._transport.sendto(struct.pack(">BBHIHHI", 0, 130, result, 0, inner, held, seconds), addr)


class PcpRouter(AskedRouter):
    """The router's side of RFC 6887, of TCP and IPv4 alone; of another version it says that it is another."""

    def __init__(self, ports: Ports) -> None:
        super().__init__(ports)
        self._nonces: dict[Inner, bytes] = {}

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        if data[:1] != b"\2":
            self._transport.sendto(struct.pack(">BBxBI16x", 2, 128 | data[1], 1, 0), addr)
            return
        seconds, client = struct.unpack(">I16s", data[4:24])
        nonce, protocol, inner, wanted, _ = struct.unpack(">12sB3xHH16s", data[24:60])
        to = (addr[0], inner)
        if client != _mapped(addr[0]):
            result, held = 12, 0
        elif protocol != 6 or self._nonces.setdefault(to, nonce) != nonce:
            result, held = 2, 0
        else:
            held = await self._held(to, wanted, seconds)
            result = 0 if held or not seconds else 8
            if not seconds:
                del self._nonces[to]
        said = struct.pack(">BBxBII12x", 2, 129, result, seconds, 9)
        mapping = struct.pack(">12sB3xHH16s", nonce, protocol, inner, held, _mapped(self._ports.outside))
        self._transport.sendto(said + mapping, addr)


def _mapped(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, f"::ffff:{address}")


@dataclass
class UpnpRouter(asyncio.DatagramProtocol):
    """The router's side of UPnP's Internet Gateway Device: searches answered, its description, four actions."""

    inside: str
    ports: Ports
    leases: bool = True
    """Whether it forwards for a time; else until it is told to end alone."""
    port: int = 0

    async def serve(self) -> contextlib.AsyncExitStack:
        """Until what is returned is closed."""
        app = web.Application()
        app.router.add_get("/igd.xml", self._describe)
        app.router.add_post("/control", self._act)
        stack, runner = contextlib.AsyncExitStack(), web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self.inside, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        searched = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        searched.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        searched.bind(SEARCHES)
        group = socket.inet_aton(SEARCHES[0]) + socket.inet_aton(self.inside)
        searched.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=searched)
        stack.callback(transport.close)
        return stack

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if data.startswith(b"M-SEARCH") and DEVICES[0].encode() in data:
            lines = ["HTTP/1.1 200 OK", f"LOCATION: http://{self.inside}:{self.port}/igd.xml", f"ST: {DEVICES[0]}"]
            self._transport.sendto("\r\n".join([*lines, f"USN: uuid:1::{DEVICES[0]}", "", ""]).encode(), addr)

    async def _describe(self, _: web.Request) -> web.Response:
        service = f"<serviceType>{SERVICE}</serviceType><controlURL>/control</controlURL>"
        within = f"<serviceList><service>{service}<eventSubURL/><SCPDURL>/x.xml</SCPDURL></service></serviceList>"
        made = ""
        for device in reversed(DEVICES):
            made = f"<device><deviceType>{device}</deviceType>{within}</device>"
            within = f"<deviceList>{made}</deviceList>"
        return _xml(f'<root xmlns="urn:schemas-upnp-org:device-1-0">{made}</root>')

    async def _act(self, request: web.Request) -> web.Response:
        action, said = request.headers["SOAPAction"].strip('"').rpartition("#")[2], await request.text()
        given = dict(re.findall(r"<(New\w+)>([^<]*)</", said))
        if action == "GetStatusInfo":
            return _did(action, NewConnectionStatus="Connected", NewLastConnectionError="", NewUptime="9")
        if action == "GetExternalIPAddress":
            return _did(action, NewExternalIPAddress=self.ports.outside)
        if action == "AddPortMapping":
            outer, to = int(given["NewExternalPort"]), (given["NewInternalClient"], int(given["NewInternalPort"]))
            if int(given["NewLeaseDuration"]) and not self.leases:
                return failed(725, "OnlyPermanentLeasesSupported")
            if (outer, to) not in self.ports.listed and not await self.ports.forward(to, outer):
                return failed(718, "ConflictInMappingEntry")
            return _did(action)
        if action == "DeletePortMapping":
            self.ports.forget(int(given["NewExternalPort"]))
            return _did(action)
        if action == "GetGenericPortMappingEntry" and int(given["NewPortMappingIndex"]) < len(self.ports.listed):
            outer, (inside, inner) = self.ports.listed[int(given["NewPortMappingIndex"])]
            ends = {"NewExternalPort": str(outer), "NewInternalClient": inside, "NewInternalPort": str(inner)}
            rest = {"NewRemoteHost": "", "NewProtocol": "TCP", "NewEnabled": "1", "NewPortMappingDescription": ""}
            return _did(action, **ends, **rest, NewLeaseDuration="0")
        return failed(713, "SpecifiedArrayIndexInvalid")


def _did(action: str, **out: str) -> web.Response:
    told = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in out.items())
    return _xml(_soap(f'<u:{action}Response xmlns:u="{SERVICE}">{told}</u:{action}Response>'))


def failed(code: int, why: str) -> web.Response:
    """The error of UPnP by that number."""
    what = f"<errorCode>{code}</errorCode><errorDescription>{why}</errorDescription>"
    error = f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0">{what}</UPnPError>'
    fault = f"<faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>{error}</detail>"
    fault = f"<s:Fault>{fault}</s:Fault>"
    return _xml(_soap(fault), status=500)


def _soap(body: str) -> str:
    return f'<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{body}</s:Body></s:Envelope>'


def _xml(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=f'<?xml version="1.0"?>{text}', content_type="text/xml", status=status)


async def carry(to: Inner, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


async def _main(protocol: str, inside: str, outside: str) -> None:
    loop, ports = asyncio.get_running_loop(), Ports(outside)
    if protocol == "upnp":
        await UpnpRouter(inside, ports).serve()
    else:
        asked = {"nat-pmp": NatPmpRouter, "pcp": PcpRouter}[protocol]
        await loop.create_datagram_endpoint(lambda: asked(ports), local_addr=(inside, ROUTER_PORT))
    print(json.dumps({"forwards": outside}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    enter(sys.argv[1])
    asyncio.run(_main(*sys.argv[2:]))
