"""Which of a host's own addresses answer, found out before it puts them into an invite.

It dials them from this machine: what does not answer here answers nobody. Whether a router lets strangers in is for
others to say.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterable

from swarm.core.errors import SettingsError

DIAL_S = 3.0


async def answering(addresses: Iterable[str]) -> list[str]:
    """Those of these /ip4|ip6|dns.../tcp/... multiaddresses that take a connection, public ones before private ones."""
    listed = list(addresses)
    answers = await asyncio.gather(*(_answers(*host_and_port(address)) for address in listed))
    return sorted((address for address, answer in zip(listed, answers, strict=True) if answer), key=remoteness)


def host_and_port(address: str) -> tuple[str, int]:
    """Of a TCP multiaddress. Raises SettingsError."""
    parts = address.split("/")
    if len(parts) < 5 or parts[3] != "tcp" or not parts[4].isdigit():
        raise SettingsError(f"{address} is no /ip4/.../tcp/... multiaddress")
    return parts[2], int(parts[4])


async def _answers(host: str, port: int) -> bool:
    writer = None
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIAL_S):
            await writer.wait_closed()
    return True


def remoteness(address: str) -> int:
    """0: for everybody, 1: for the home network, 2: for this machine."""
    try:
        number = ipaddress.ip_address(address.split("/")[2])
    except ValueError:
        return 0  # a name
    return 2 if number.is_loopback else 1 if number.is_private or number.is_link_local else 0
