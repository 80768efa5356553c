"""HOST:PORT, as people write it, and the multiaddresses that libp2p makes of it, of IPv4 and IPv6."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address

from swarm.core.errors import SettingsError

MAX_PORT = 65535
_FAR_AWAY = "2001:4860:4860::8888"
"""An address of IPv6 that is nobody's neighbour; nothing is sent there."""


async def knock(address: str, *, timeout_s: float = 5.0) -> str:
    """Why nothing accepts a TCP connection at a multiaddress; empty if something does.

    p2pd must not find that out: it waits longer after each failed dial, up to five minutes, before it dials again.
    """
    parts = address.split("/")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(parts[2], int(parts[4]))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    except (ValueError, IndexError):
        return "no TCP multiaddress"
    return ""


def beside(listen: str, further: int) -> str:
    """The same HOST of a --listen option with a PORT so much further; any port where any was asked for."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + further if port.isdigit() and int(port) else 0}"


def listen_multiaddresses(listen: str) -> tuple[str, ...]:
    """`HOST:PORT` of a --listen option as TCP multiaddresses; HOST is a numeric address, or nothing.

    Without HOST: all of this machine's addresses, of IPv6 too where it has one to the Internet. Raises SettingsError.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise SettingsError(
            f"--listen {listen}: give a PORT of at most {MAX_PORT} behind a colon, such as :4001 or 203.0.113.5:4001"
        )
    if not host:
        everywhere = ("/ip4/0.0.0.0", "/ip6/::") if has_ipv6() else ("/ip4/0.0.0.0",)
        return tuple(f"{address}/tcp/{int(port)}" for address in everywhere)
    number = host.removeprefix("[").removesuffix("]")
    try:
        version = ip_address(number).version
    except ValueError as error:
        raise SettingsError(
            f"--listen {listen}: {host} is no address; give one of this machine, an IPv6 one in brackets "
            f"([::]:{port}), or none for all (:{port})"
        ) from error
    if (host != number) != (version == 6) or "%" in number:
        raise SettingsError(
            f"--listen {listen}: write IPv6 addresses alone in brackets, as [::]:{port}, without a zone"
        )
    return (f"/ip{version}/{number}/tcp/{int(port)}",)


def has_ipv6() -> bool:
    """Whether this machine would reach the Internet by IPv6, from an address of its own that others reach."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asked:
            asked.connect((_FAR_AWAY, 9))  # chooses a route and an address
            return ip_address(asked.getsockname()[0]).is_global
    except OSError:
        return False


_DIALLED = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:-]{1,253}/tcp/[0-9]{1,5}(/p2p/[0-9A-Za-z]{1,64}(/p2p-circuit(/p2p/[0-9A-Za-z]{1,64})?)?)?"
)


def is_dialled(address: str) -> bool:
    """Whether a multiaddress is of a kind that is dialled: TCP at a host, or through a relay there."""
    if not _DIALLED.fullmatch(address):
        return False
    parts = address.split("/")
    return int(parts[4]) <= MAX_PORT and (parts[1].startswith("dns") or _is_machines(parts[1], parts[2]))


def is_numeric(address: str) -> bool:
    """Whether what is dialled is called by its number."""
    return address.startswith(("/ip4/", "/ip6/"))


def _is_machines(kind: str, host: str) -> bool:
    """Whether a number is that of one machine."""
    try:
        number = ip_address(host)
    except ValueError:
        return False
    is_everybodys = number.is_multicast or number.is_unspecified or number == IPv4Address("255.255.255.255")
    return f"ip{number.version}" == kind and not is_everybodys


def version_of(host: str) -> int:
    """Of IP, of a numeric address: 4 or 6."""
    return 6 if ":" in host else 4


def multiaddress(host: str, port: int) -> str:
    """Of TCP, at a numeric address."""
    return f"/ip{version_of(host)}/{host}/tcp/{port}"


async def resolved(host: str) -> list[str]:
    """The numeric addresses of a host, which may be one of them; none of a name that nobody knows."""
    with contextlib.suppress(OSError, UnicodeError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return []


def port_of(address: str) -> int:
    """Of a TCP multiaddress that somebody listens at."""
    return int(address.split("/")[4])


def ports_of(addresses: Sequence[str], version: int) -> list[int]:
    """Of the TCP multiaddresses of one version of IP, each once, ascending."""
    split = (address.split("/") for address in addresses)
    return sorted({int(parts[4]) for parts in split if parts[1] == f"ip{version}" and parts[3] == "tcp"})


def as_had(asked: Sequence[str], had: Sequence[str]) -> tuple[str, ...]:
    """The TCP multiaddresses asked for, each with the port that was had: the first of its version of IP."""
    found = []
    for address in asked:
        kind = "/".join(address.split("/")[:2]) + "/"
        port = next((port_of(one) for one in had if one.startswith(kind)), port_of(address))
        found.append(at_port(address, port))
    return tuple(found)


def at_port(address: str, port: int) -> str:
    """The TCP multiaddress with this port in the place of its own."""
    return "/".join([*address.split("/")[:4], str(port)])


def is_free(host: str, port: int) -> bool:
    """Whether a program could listen at this TCP port of a numeric address."""
    with socket.socket(socket.AF_INET6 if version_of(host) == 6 else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError):
            return False
        return True
