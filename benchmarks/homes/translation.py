"""A home router's translation of addresses, by kind: no clock, no socket (RFC 4787, RFC 5382).

A router of a kind gives each inner address and port an outer port (a symmetric one: for each destination another), and
lets in what its kind allows: full cone, from anybody; restricted, from addresses that were sent to; port-restricted and
symmetric, from ports that were sent to. What is not let in is dropped without a word (RFC 5382, REQ-4). A mapping lives
as long as one of its sessions: to the reset, a moment past both FINs, or until nothing was said for long.
"""

import random
import socket
import struct
from dataclasses import dataclass, field
from enum import Enum

CLOSED_S = 4.0
"""After both sides' FIN."""
OPENING_S, OPEN_S = 240.0, 7440.0
"""Without a packet: before an answer came, and after (RFC 5382, REQ-5)."""
_FIN, _SYN, _RST = 0x01, 0x02, 0x04
_TCP, _UDP = 6, 17
_NEEDS_CHECKSUM = 1
"""Flag of virtio: the checksum is of the addresses alone so far, and not yet inverted."""
_HEADER_BYTES = 10
_FIRST_PORT, _PORTS = 20_000, 40_000

Address = tuple[bytes, int]
"""IPv4, port."""


class Kind(Enum):
    """How a router maps and filters."""

    FULL_CONE = "full cone"
    RESTRICTED = "restricted"
    PORT_RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"
    """Its ports count up."""
    RANDOM = "random symmetric"

    @property
    def is_symmetric(self) -> bool:
        return self in (Kind.SYMMETRIC, Kind.RANDOM)


@dataclass
class _Session:
    ends_at: float
    fins: int = 0
    """1: from inside, 2: from outside."""


@dataclass
class _Mapping:
    inner: Address
    key: tuple[Address, Address | None]
    sessions: dict[Address, _Session] = field(default_factory=dict)


class Translation:
    """One router."""

    def __init__(self, kind: Kind, outside: bytes, *, rng: random.Random) -> None:
        self.kind = kind
        self.outside = outside
        self._rng = rng
        self._next_port = rng.randrange(_PORTS)
        self._by_key: dict[tuple[Address, Address | None], int] = {}
        self._by_port: dict[int, _Mapping] = {}

    def out(self, inner: Address, to: Address, flags: int, now: float) -> int:
        """The outer port of a packet that leaves."""
        key = (inner, to if self.kind.is_symmetric else None)
        port = self._by_key.get(key)
        if port is not None:
            self._sweep(port, now)
            port = self._by_key.get(key)
        if port is None:
            port = self._free_port()
            self._by_key[key] = port
            self._by_port[port] = _Mapping(inner, key)
        self._seen(port, to, flags, now, way=1)
        return port

    def into(self, port: int, source: Address, flags: int, now: float) -> Address | None:
        """To whom inside a packet goes; None if it is dropped."""
        self._sweep(port, now)
        mapping = self._by_port.get(port)
        if mapping is None or not self._lets_in(mapping, source):
            return None
        inner = mapping.inner
        self._seen(port, source, flags, now, way=2)
        return inner

    def _lets_in(self, mapping: _Mapping, source: Address) -> bool:
        if self.kind is Kind.FULL_CONE:
            return True
        if self.kind is Kind.RESTRICTED:
            return any(address == source[0] for address, _ in mapping.sessions)
        return source in mapping.sessions

    def _seen(self, port: int, other: Address, flags: int, now: float, *, way: int) -> None:
        mapping = self._by_port[port]
        session = mapping.sessions.get(other)
        if session is None:
            session = mapping.sessions[other] = _Session(now + OPENING_S)
        elif not session.fins:
            session.ends_at = now + OPEN_S
        if flags & _FIN:
            session.fins |= way
            session.ends_at = now + (CLOSED_S if session.fins == 3 else OPENING_S)
        elif flags & _SYN:
            session.fins = 0
        if flags & _RST:
            session.ends_at = now
            self._sweep(port, now)

    def _sweep(self, port: int, now: float) -> None:
        mapping = self._by_port.get(port)
        if mapping is None:
            return
        for other in [other for other, session in mapping.sessions.items() if session.ends_at <= now]:
            del mapping.sessions[other]
        if not mapping.sessions:
            del self._by_port[port], self._by_key[mapping.key]

    def _free_port(self) -> int:
        while True:
            self._next_port = (self._next_port + 1) % _PORTS
            port = _FIRST_PORT + self._next_port
            if self.kind is not Kind.SYMMETRIC:
                port = _FIRST_PORT + self._rng.randrange(_PORTS)
            if port not in self._by_port:
                return port


class Translator:
    """The routers of one home, its own first; rewrites packets that a TUN device gives, behind virtio's header."""

    def __init__(self, routers: list[Translation]) -> None:
        self._routers = routers

    def out(self, packet: bytes, now: float) -> bytes | None:
        """The packet as it leaves the last router; None if it is dropped."""
        for router in self._routers:
            read = _Read.of(packet)
            if read is None:
                return None
            port = router.out(read.source, read.to, read.flags, now)
            packet = _rewritten(packet, read, is_source=True, new=(router.outside, port))
        return packet

    def into(self, packet: bytes, now: float) -> bytes | None:
        """The packet as the home gets it; None if it is dropped."""
        for router in reversed(self._routers):
            read = _Read.of(packet)
            inner = router.into(read.to[1], read.source, read.flags, now) if read is not None else None
            if read is None or inner is None:
                return None
            packet = _rewritten(packet, read, is_source=False, new=inner)
        return packet


@dataclass(frozen=True)
class _Read:
    """What a packet says."""

    transport_at: int
    protocol: int
    source: Address
    to: Address
    flags: int

    @classmethod
    def of(cls, packet: bytes) -> "_Read | None":
        """None for what is neither TCP nor UDP over IPv4."""
        if len(packet) < _HEADER_BYTES + 20 or packet[_HEADER_BYTES] >> 4 != 4:
            return None
        at = _HEADER_BYTES + 4 * (packet[_HEADER_BYTES] & 0xF)
        protocol = packet[_HEADER_BYTES + 9]
        if protocol not in (_TCP, _UDP) or len(packet) < at + (20 if protocol == _TCP else 8):
            return None
        source_port, to_port = struct.unpack_from(">HH", packet, at)
        source, to = packet[_HEADER_BYTES + 12 : _HEADER_BYTES + 16], packet[_HEADER_BYTES + 16 : _HEADER_BYTES + 20]
        flags = packet[at + 13] if protocol == _TCP else 0
        return cls(at, protocol, (source, source_port), (to, to_port), flags)


def _rewritten(packet: bytes, read: _Read, *, is_source: bool, new: Address) -> bytes:
    """With another source or destination, and the checksums that belong to it (RFC 1624)."""
    old = read.source if is_source else read.to
    changed = bytearray(packet)
    address_at = _HEADER_BYTES + (12 if is_source else 16)
    changed[address_at : address_at + 4] = new[0]
    struct.pack_into(">H", changed, read.transport_at + (0 if is_source else 2), new[1])
    of_address = sum(struct.unpack(">HH", new[0])) - sum(struct.unpack(">HH", old[0]))
    _adjust(changed, _HEADER_BYTES + 10, of_address)
    at = read.transport_at + (16 if read.protocol == _TCP else 6)
    if packet[0] & _NEEDS_CHECKSUM:
        (partial,) = struct.unpack_from(">H", changed, at)
        struct.pack_into(">H", changed, at, _folded(partial + of_address))
    else:
        _adjust(changed, at, of_address + new[1] - old[1])
    return bytes(changed)


def _adjust(packet: bytearray, at: int, difference: int) -> None:
    (before,) = struct.unpack_from(">H", packet, at)
    struct.pack_into(">H", packet, at, ~_folded((~before & 0xFFFF) + difference) & 0xFFFF)


def _folded(total: int) -> int:
    """In ones' complement: sixteen bits."""
    while total < 0:
        total += 0xFFFF
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def behind(kinds: list[Kind], outside: str, *, seed: int) -> Translator:
    """A home behind routers of these kinds, its own first; the last one's address is `outside`."""
    addresses = [f"100.64.{seed % 250}.{number + 1}" for number in range(len(kinds) - 1)] + [outside]
    rng = random.Random(seed)
    return Translator(
        [Translation(kind, socket.inet_aton(address), rng=rng) for kind, address in zip(kinds, addresses, strict=True)]
    )
