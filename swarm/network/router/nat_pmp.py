"""A router that forwards ports by NAT-PMP (RFC 6886): it answers within a moment, most others say nothing."""

import contextlib
import socket
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from swarm.core.errors import TransientError
from swarm.network.router.asking import ROUTER_PORT, Asking
from swarm.network.router.forwarded import LIFETIME_S, Forwarded

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
        async with Asking(self._router, "NAT-PMP") as asking:
            address = await asking.answer(
                struct.pack(">BB", _VERSION, _ADDRESS), partial(_read, _ADDRESS + _ANSWER, 12)
            )
            given: dict[int, int] = {}
            lifetime_s = LIFETIME_S
            for port in ports:
                asked = struct.pack(">BBHHHI", _VERSION, _TCP, 0, port, port, LIFETIME_S)
                inner, outer, seconds = struct.unpack(
                    ">HHI", await asking.answer(asked, partial(_read, _TCP + _ANSWER, 16))
                )
                if inner != port or not outer or not seconds:
                    raise TransientError(f"the router forwards {outer} to {inner} for {seconds} s, asked for {port}")
                given[port], lifetime_s = outer, min(lifetime_s, seconds)
            return Forwarded(socket.inet_ntoa(address), asking.inside, given, lifetime_s)

    async def end(self, ports: Sequence[int]) -> None:
        """Not waited for: it ends by itself."""
        with contextlib.suppress(TransientError):
            async with Asking(self._router, "NAT-PMP") as asking:
                for port in ports:
                    asking.send(struct.pack(">BBHHHI", _VERSION, _TCP, 0, port, 0, 0))


def _read(operation: int, size: int, data: bytes) -> bytes | None:
    """What is behind the head of an answer of `size` bytes."""
    if len(data) < 4:
        return None
    version, got, result = struct.unpack_from(">BBH", data)
    if result and got in (operation, _ANSWER):
        raise TransientError(f"the router forwards no port: {_REFUSALS.get(result, f'code {result}')} (NAT-PMP)")
    return data[8:] if (version, got, len(data)) == (_VERSION, operation, size) else None
