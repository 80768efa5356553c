"""A router that forwards ports by PCP (RFC 6887), NAT-PMP's successor: of IPv4, to the machine that asks."""

import contextlib
import ipaddress
import secrets
import struct
from collections.abc import Sequence
from functools import partial

from swarm.core.errors import TransientError
from swarm.network.router.asking import ROUTER_PORT, Asking
from swarm.network.router.forwarded import LIFETIME_S, Forwarded

_VERSION, _MAP, _ANSWER, _TCP = 2, 1, 128, 6
_HEAD = struct.Struct(">BBxBI16x")
"""Of an answer: version, operation, result, lifetime in seconds, the router's time and what is reserved."""
_MAPPING = struct.Struct(">12sB3xHH16s")
"""Nonce, protocol, inner port, outer port, outer address."""
_ANY = ipaddress.IPv6Address("::ffff:0.0.0.0").packed
_REFUSALS = {
    1: "it speaks another version",
    2: "it is set to forward nothing",
    3: "it does not understand the question",
    4: "it does not know how",
    8: "it has no port left",
    9: "it does not forward TCP",
    10: "this machine has all that it is given",
    12: "there is another router in between",
}


class Pcp:
    """One router, by its address."""

    def __init__(self, router: str, *, port: int = ROUTER_PORT) -> None:
        self._router = (router, port)
        self._nonce = secrets.token_bytes(12)
        """Who asks again for a port, or for its end, says what it said first."""

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        """Raises TransientError if the router does not forward them, with its reason."""
        async with Asking(self._router, "PCP") as asking:
            given: dict[int, int] = {}
            outside, lifetime_s = "", LIFETIME_S
            for port in ports:
                asked = self._asked(asking.inside, port, LIFETIME_S)
                outer, outside, seconds = await asking.answer(asked, partial(self._read, port))
                given[port], lifetime_s = outer, min(lifetime_s, seconds)
            return Forwarded(outside, asking.inside, given, lifetime_s)

    async def end(self, ports: Sequence[int]) -> None:
        """Not waited for: it ends by itself."""
        with contextlib.suppress(TransientError):
            async with Asking(self._router, "PCP") as asking:
                for port in ports:
                    asking.send(self._asked(asking.inside, port, 0))

    def _asked(self, inside: str, port: int, lifetime_s: int) -> bytes:
        head = struct.pack(">BBHI16s", _VERSION, _MAP, 0, lifetime_s, ipaddress.IPv6Address(f"::ffff:{inside}").packed)
        return head + _MAPPING.pack(self._nonce, _TCP, port, port if lifetime_s else 0, _ANY)

    def _read(self, port: int, data: bytes) -> tuple[int, str, int] | None:
        """The outer port, the router's address and for how long, of an answer on this port."""
        if len(data) < 4 or (data[0] != _VERSION and data[1:2] != bytes([_MAP | _ANSWER])):
            return None
        if data[0] != _VERSION:
            raise TransientError(f"the router forwards no port: {_REFUSALS[1]} (PCP)")
        if len(data) < _HEAD.size + _MAPPING.size:
            return None
        _, operation, result, seconds = _HEAD.unpack_from(data)
        nonce, protocol, inner, outer, address = _MAPPING.unpack_from(data, _HEAD.size)
        if (operation, nonce, protocol, inner) != (_MAP | _ANSWER, self._nonce, _TCP, port):
            return None
        if result:
            raise TransientError(f"the router forwards no port: {_REFUSALS.get(result, f'code {result}')} (PCP)")
        outside = ipaddress.IPv6Address(address).ipv4_mapped
        if outside is None or not outer or not seconds:
            raise TransientError(f"the router forwards {outer} to {inner} for {seconds} s, asked for {port} (PCP)")
        return outer, str(outside), seconds
