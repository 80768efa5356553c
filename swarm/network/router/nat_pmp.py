"""A router that forwards ports by NAT-PMP (RFC 6886): it answers within a moment, most others say nothing."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from swarm.core.errors import TransientError
from swarm.network.router.forwarded import LIFETIME_S, Forwarded

TRIES_S = (0.25, 0.5, 1.0)
"""An answer is waited for so long, and then asked for again (RFC 6886, 3.1, which goes on for a minute)."""
ROUTER_PORT = 5351
_VERSION, _ADDRESS, _TCP, _ANSWER = 0, 0, 2, 128
_ROUTES = Path("/proc/net/route")
_REFUSALS = {
    1: "it speaks another version",
    2: "it is set to forward nothing",
    3: "it has no address of its own",
    4: "it has no port left",
    5: "it does not know how",
}


def gateway() -> str | None:
    """The router of the default route of IPv4; None where there is none, or the system does not tell."""
    with contextlib.suppress(OSError):
        for line in _ROUTES.read_text(encoding="ascii").splitlines()[1:]:
            _, destination, router, *_ = line.split()
            if int(destination, 16) == 0 and int(router, 16) != 0:
                return socket.inet_ntoa(struct.pack("<I", int(router, 16)))
    return None


class NatPmp:
    """One router, by its address."""

    def __init__(self, router: str, *, port: int = ROUTER_PORT) -> None:
        self._router = (router, port)

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        """Raises TransientError if the router does not forward them, with its reason."""
        async with _Asking(self._router) as asking:
            (address,) = struct.unpack("4s", await asking.answer(struct.pack(">BB", _VERSION, _ADDRESS), 12))
            given: dict[int, int] = {}
            lifetime_s = LIFETIME_S
            for port in ports:
                asked = struct.pack(">BBHHHI", _VERSION, _TCP, 0, port, port, LIFETIME_S)
                inner, outer, seconds = struct.unpack(">HHI", await asking.answer(asked, 16))
                if inner != port or not outer or not seconds:
                    raise TransientError(f"the router forwards {outer} to {inner} for {seconds} s, asked for {port}")
                given[port], lifetime_s = outer, min(lifetime_s, seconds)
            return Forwarded(socket.inet_ntoa(address), asking.inside, given, lifetime_s)

    async def end(self, ports: Sequence[int]) -> None:
        """Not waited for: it ends by itself."""
        with contextlib.suppress(OSError):
            async with _Asking(self._router) as asking:
                for port in ports:
                    asking.send(struct.pack(">BBHHHI", _VERSION, _TCP, 0, port, 0, 0))


class _Asking(asyncio.DatagramProtocol):
    """A socket that hears the router alone."""

    def __init__(self, router: tuple[str, int]) -> None:
        self._router = router
        self._came: asyncio.Queue[bytes] = asyncio.Queue(maxsize=16)

    async def __aenter__(self) -> "_Asking":
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=self._router)
        except OSError as error:
            raise TransientError(f"the router {self._router[0]} cannot be asked: {error}") from error
        self.inside = str(self._transport.get_extra_info("sockname")[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, _addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # nobody needs so many
            self._came.put_nowait(data)

    def send(self, asked: bytes) -> None:
        self._transport.sendto(asked)

    async def answer(self, asked: bytes, size: int) -> bytes:
        """What is behind the head of the answer, which has `size` bytes."""
        for seconds in TRIES_S:
            self.send(asked)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._next(asked[1] + _ANSWER, size)
        raise TransientError("the router does not answer when it is asked to forward a port (NAT-PMP)")

    async def _next(self, operation: int, size: int) -> bytes:
        while True:
            data = await self._came.get()
            if len(data) < 4:
                continue
            version, got, result = struct.unpack_from(">BBH", data)
            if result and got in (operation, _ANSWER):
                raise TransientError(f"the router forwards no port: {_REFUSALS.get(result, f'code {result}')}")
            if (version, got, len(data)) == (_VERSION, operation, size):
                return data[8:]
