"""A home router's translation of addresses, by kind, and its IPv6 firewall: no clock, no socket (RFC 4787, 5382, 6092).

A router of a kind gives each inner address and port an outer port (a symmetric one: for each destination another), and
lets in what its kind allows: full cone, from anybody; restricted, from addresses that were sent to; port-restricted and
symmetric, from ports that were sent to. What is not let in is dropped without a word (RFC 5382, REQ-4). A mapping lives
as long as one of its sessions: to the reset, a moment past both FINs, or until nothing was said for long. IPv6 is
routed as it is; a firewall lets in what somebody inside has called, by the same sessions.
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
"""IPv4 or IPv6, port."""


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

    @classmethod
    def begun(cls, now: float) -> "_Session":
        return cls(now + OPENING_S)

    def goes_on(self, flags: int, now: float, *, way: int, is_first: bool) -> None:
        """Another packet of it, that way."""
        if not is_first and not self.fins:
            self.ends_at = now + OPEN_S
        if flags & _FIN:
            self.fins |= way
            self.ends_at = now + (CLOSED_S if self.fins == 3 else OPENING_S)
        elif flags & _SYN:
            self.fins = 0
        if flags & _RST:
            self.ends_at = now


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
        is_first = session is None
        session = mapping.sessions.setdefault(other, _Session.begun(now))
        session.goes_on(flags, now, way=way, is_first=is_first)
        if flags & _RST:
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


class Firewall:
    """Of IPv6: nothing is mapped, and nothing comes in that nobody inside has asked for."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[Address, Address], _Session] = {}

    def out(self, inner: Address, to: Address, flags: int, now: float) -> None:
        session = self._live(inner, to, now)
        is_first = session is None
        session = session or self._sessions.setdefault((inner, to), _Session.begun(now))
        session.goes_on(flags, now, way=1, is_first=is_first)

    def into(self, inner: Address, source: Address, flags: int, now: float) -> bool:
        """Whether it is let in."""
        session = self._live(inner, source, now)
        if session is not None:
            session.goes_on(flags, now, way=2, is_first=False)
        return session is not None

    def _live(self, inner: Address, other: Address, now: float) -> _Session | None:
        session = self._sessions.get((inner, other))
        if session is not None and session.ends_at <= now:
            del self._sessions[inner, other]
            return None
        return session


class Translator:
    """The routers of one home, its own first; rewrites packets that a TUN device gives, behind virtio's header.

    Those of IPv6 pass the firewall, if there is one, and are not rewritten.
    """

    def __init__(self, routers: list[Translation], firewall: Firewall | None = None) -> None:
        self._routers = routers
        self._firewall = firewall

    def out(self, packet: bytes, now: float) -> bytes | None:
        """The packet as it leaves the last router; None if it is dropped."""
        if is_ipv6(packet):
            asked = _Read.of(packet)
            if asked is not None and self._firewall is not None:
                self._firewall.out(asked.source, asked.to, asked.flags, now)
            return packet if asked is not None else None
        for router in self._routers:
            read = _Read.of(packet)
            if read is None:
                return None
            port = router.out(read.source, read.to, read.flags, now)
            packet = _rewritten(packet, read, is_source=True, new=(router.outside, port))
        return packet

    def into(self, packet: bytes, now: float) -> bytes | None:
        """The packet as the home gets it; None if it is dropped."""
        if is_ipv6(packet):
            asked = _Read.of(packet)
            is_in = asked is not None and (
                self._firewall is None or self._firewall.into(asked.to, asked.source, asked.flags, now)
            )
            return packet if is_in else None
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
        """None for what is neither TCP nor UDP, and for what has extension headers of IPv6."""
        if len(packet) < _HEADER_BYTES + 20 or packet[_HEADER_BYTES] >> 4 not in (4, 6):
            return None
        at, protocol_at = _HEADER_BYTES + 4 * (packet[_HEADER_BYTES] & 0xF), _HEADER_BYTES + 9
        if is_ipv6(packet):
            at, protocol_at = _HEADER_BYTES + 40, _HEADER_BYTES + 6
        protocol = packet[protocol_at]
        if protocol not in (_TCP, _UDP) or len(packet) < at + (20 if protocol == _TCP else 8):
            return None
        source_port, to_port = struct.unpack_from(">HH", packet, at)
        source, to = addresses_in(packet)
        flags = packet[at + 13] if protocol == _TCP else 0
        return cls(at, protocol, (source, source_port), (to, to_port), flags)


def is_acknowledgement(packet: bytes) -> bool:
    """Whether it is of a TCP connection that stands, and without data."""
    read = _Read.of(packet)
    if read is None or read.protocol != _TCP or read.flags & (_SYN | _FIN | _RST):
        return False
    return len(packet) == read.transport_at + 4 * (packet[read.transport_at + 12] >> 4)


def is_ipv6(packet: bytes) -> bool:
    return packet[_HEADER_BYTES] >> 4 == 6


def addresses_in(packet: bytes) -> tuple[bytes, bytes]:
    """Of an IP packet behind virtio's header: from whom, to whom."""
    at, size = (_HEADER_BYTES + 8, 16) if is_ipv6(packet) else (_HEADER_BYTES + 12, 4)
    return packet[at : at + size], packet[at + size : at + 2 * size]


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


def behind(kinds: list[Kind], outside: str, *, seed: int, has_firewall: bool = False) -> Translator:
    """A home behind routers of these kinds, its own first; the last one's address is `outside`. Open without any."""
    addresses = [f"100.64.{seed % 250}.{number + 1}" for number in range(len(kinds) - 1)]
    addresses += [outside] if kinds else []
    rng = random.Random(seed)
    return Translator(
        [Translation(kind, socket.inet_aton(address), rng=rng) for kind, address in zip(kinds, addresses, strict=True)],
        Firewall() if has_firewall else None,
    )
