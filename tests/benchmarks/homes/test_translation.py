"""Home routers as pure objects: what each kind maps, lets in and forgets."""

import random
import socket
import struct

import pytest

from benchmarks.homes.translation import CLOSED_S, OPEN_S, Kind, Translation, behind

INNER = (socket.inet_aton("192.168.77.2"), 4000)
OUTSIDE = "5.77.0.9"
ONLOOKER = (socket.inet_aton("5.77.0.1"), 80)
PEER = (socket.inet_aton("5.77.0.2"), 5000)
OTHER_PORT = (PEER[0], 5001)
STRANGER = (socket.inet_aton("5.77.0.3"), 5000)
SYN, ACK, FIN, RST = 0x02, 0x10, 0x01, 0x04


def router(kind: Kind) -> Translation:
    return Translation(kind, socket.inet_aton(OUTSIDE), rng=random.Random(3))


@pytest.mark.parametrize(
    ("kind", "lets_in"),
    [
        (Kind.FULL_CONE, {PEER, OTHER_PORT, STRANGER}),
        (Kind.RESTRICTED, {PEER, OTHER_PORT}),
        (Kind.PORT_RESTRICTED, {PEER}),
        (Kind.SYMMETRIC, {PEER}),
        (Kind.RANDOM, {PEER}),
    ],
)
def test_each_kind_maps_and_lets_in_as_it_is_named(kind: Kind, lets_in: set[tuple[bytes, int]]) -> None:
    made = router(kind)
    seen = made.out(INNER, ONLOOKER, SYN, 0.0)
    if kind is not Kind.FULL_CONE:
        assert made.into(seen, PEER, SYN, 0.1) is None
    port = made.out(INNER, PEER, SYN, 0.2)
    assert (port == seen) is (not kind.is_symmetric)
    assert port == seen + 1 or kind is not Kind.SYMMETRIC
    for source in (PEER, OTHER_PORT, STRANGER):
        assert made.into(port, source, SYN, 0.3) == (INNER if source in lets_in else None)


def test_a_firewall_of_ipv6_maps_nothing_and_lets_in_what_was_called() -> None:
    inner, peer = (socket.inet_pton(socket.AF_INET6, at) for at in ("2a05:77:0:1::1", "2a05:77:0:2::1"))
    home = behind([Kind.RANDOM], OUTSIDE, seed=1, has_firewall=True)
    out, into = ipv6_packet((inner, 4000), (peer, 5000), SYN), ipv6_packet((peer, 5000), (inner, 4000), SYN)
    assert home.into(into, 0.0) is None
    assert home.out(out, 0.1) == out
    assert home.into(into, 0.2) == into
    assert home.into(ipv6_packet((peer, 5001), (inner, 4000), SYN), 0.2) is None
    assert home.out(ipv6_packet((inner, 4000), (peer, 5000), RST), 0.3) is not None
    assert home.into(into, 0.4) is None
    assert behind([Kind.RANDOM], OUTSIDE, seed=1).into(into, 0.0) == into, "without a firewall IPv6 is open"


def ipv6_packet(source: tuple[bytes, int], to: tuple[bytes, int], flags: int) -> bytes:
    """TCP, behind virtio's header."""
    header = struct.pack(">IHBB", 6 << 28, 20, 6, 64) + source[0] + to[0]
    return bytes(10) + header + struct.pack(">HHIIBBHHH", source[1], to[1], 0, 0, 5 << 4, flags, 0, 0, 0)


def test_a_mapping_lives_as_long_as_one_of_its_sessions() -> None:
    made = router(Kind.PORT_RESTRICTED)
    port = made.out(INNER, ONLOOKER, SYN, 0.0)
    made.out(INNER, PEER, SYN, 0.0)
    assert made.into(port, ONLOOKER, SYN | ACK, 0.1) == INNER
    made.out(INNER, ONLOOKER, RST, 0.2)
    assert made.into(port, ONLOOKER, ACK, 0.3) is None
    assert made.into(port, PEER, SYN, 0.3) == INNER
    made.out(INNER, PEER, FIN | ACK, 1.0)
    assert made.into(port, PEER, FIN | ACK, 1.1) == INNER
    assert made.into(port, PEER, ACK, 1.2) == INNER
    assert made.into(port, PEER, ACK, 1.3 + CLOSED_S) is None
    again = made.out(INNER, PEER, SYN, 10.0)
    assert again != port
    assert made.into(again, PEER, SYN | ACK, 10.1) == INNER
    assert made.into(again, PEER, ACK, 10.2 + OPEN_S) is None


def packet(source: tuple[bytes, int], to: tuple[bytes, int], payload: bytes, *, partial: bool) -> bytes:
    """A TCP packet as a TUN device gives it, its checksums in order or still to be finished."""
    tcp = struct.pack(">HHIIBBHHH", source[1], to[1], 1, 2, 0x50, ACK, 100, 0, 0) + payload
    pseudo = source[0] + to[0] + struct.pack(">HH", 6, len(tcp))
    checksum = total(pseudo) if partial else ~total(pseudo + tcp) & 0xFFFF
    tcp = tcp[:16] + struct.pack(">H", checksum) + tcp[18:]
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(tcp), 7, 0, 64, 6, 0) + source[0] + to[0]
    ip = ip[:10] + struct.pack(">H", ~total(ip) & 0xFFFF) + ip[12:]
    return bytes([int(partial)]) + bytes(9) + ip + tcp


def total(data: bytes) -> int:
    found = sum(struct.unpack(f">{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while found > 0xFFFF:
        found = (found & 0xFFFF) + (found >> 16)
    return found


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("kinds", [[Kind.SYMMETRIC], [Kind.PORT_RESTRICTED, Kind.RESTRICTED]])
def test_packets_keep_sound_checksums_there_and_back(kinds: list[Kind], partial: bool) -> None:
    home = behind(kinds, OUTSIDE, seed=1)
    for payload in (b"", b"odd", bytes(range(200))):
        out = home.out(packet(INNER, PEER, payload, partial=partial), 0.0)
        assert out is not None
        port = int.from_bytes(out[30:32], "big")
        assert out == packet((socket.inet_aton(OUTSIDE), port), PEER, payload, partial=partial)
        back = home.into(packet(PEER, (socket.inet_aton(OUTSIDE), port), payload, partial=partial), 0.1)
        assert back == packet(PEER, INNER, payload, partial=partial)
    assert home.into(packet(STRANGER, (socket.inet_aton(OUTSIDE), port), b"", partial=partial), 0.2) is None
    assert home.out(bytes(60), 0.0) is None
