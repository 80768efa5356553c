"""A namespace as a home router: it masquerades what it forwards, and lets in what was asked for.

Each connection gets a random port: no hole is punched through it.

nf_tables over netlink, as `nft` would: `table ip home { chain out { type nat hook postrouting priority srcnat;
masquerade fully-random } chain in { type filter hook input priority filter; policy drop } }`. The command is not
needed.
"""

import socket
import struct

_NETLINK_NETFILTER = 12
_BATCH_BEGIN, _BATCH_END, _ERROR = 0x10, 0x11, 2
_NFTABLES = 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_IPV4 = 2
_LOCAL_IN, _POSTROUTING = 1, 4
_FILTER, _SOURCE_NAT = 0, 100
_DROP, _ACCEPT = 0, 1
_RANDOM_FULLY = 1 << 4
_NESTED = 0x8000


def masquerade(*, answers: bool = False) -> None:
    """In this thread's network namespace; a router that `answers` takes what is sent to itself. Raises OSError where
    the kernel has no nf_tables."""
    out = _text(1, "home") + _text(3, "out") + _hook(_POSTROUTING, _SOURCE_NAT, "nat", _ACCEPT)
    into = _text(1, "home") + _text(3, "in") + _hook(_LOCAL_IN, _FILTER, "filter", _ACCEPT if answers else _DROP)
    expression = _nest(1, _text(1, "masq") + _nest(2, _number(1, _RANDOM_FULLY)))
    rule = _text(1, "home") + _text(2, "out") + _nest(4, expression)
    messages = [
        _message(_BATCH_BEGIN, 0, b"", resource=_NFTABLES),
        _message(_NFTABLES << 8 | _NEW_TABLE, _CREATE | _ACK, _text(1, "home")),
        _message(_NFTABLES << 8 | _NEW_CHAIN, _CREATE | _ACK, out),
        _message(_NFTABLES << 8 | _NEW_CHAIN, _CREATE | _ACK, into),
        _message(_NFTABLES << 8 | _NEW_RULE, _CREATE | _APPEND | _ACK, rule),
        _message(_BATCH_END, 0, b"", resource=_NFTABLES),
    ]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(5.0)
        netlink.bind((0, 0))
        netlink.send(b"".join(messages))
        for _ in range(len(messages) - 2):
            answer = netlink.recv(1 << 16)
            length, kind = struct.unpack_from("=IH", answer)
            if kind == _ERROR and (number := -struct.unpack_from("=i", answer, 16)[0]):
                raise OSError(number, f"nf_tables refuses a router's rules, in {length} bytes")


def _message(kind: int, flags: int, attributes: bytes, *, resource: int = 0) -> bytes:
    family = 0 if resource else _IPV4
    body = struct.pack("!BBH", family, 0, resource) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 0, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    data = struct.pack("=HH", 4 + len(value), kind) + value
    return data + bytes(-len(data) % 4)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _nest(kind: int, attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, attributes)


def _number(kind: int, number: int) -> bytes:
    return _attribute(kind, struct.pack("!I", number))


def _hook(number: int, priority: int, kind: str, policy: int) -> bytes:
    """A base chain's hook, policy and type."""
    return _nest(4, _number(1, number) + _number(2, priority)) + _number(5, policy) + _text(7, kind)
