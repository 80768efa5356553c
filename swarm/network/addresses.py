"""HOST:PORT, as people write it, and the multiaddress that libp2p makes of it."""

import asyncio
import contextlib
import os
import socket

from swarm.core.errors import SettingsError

MAX_PORT = 65535


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


def listen_multiaddress(listen: str) -> str:
    """`HOST:PORT` of a --listen option as a TCP multiaddress; HOST is a numeric address. Raises SettingsError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise SettingsError(f"--listen {listen}: give HOST:PORT, such as 0.0.0.0:4001")
    kind = "ip6" if ":" in host else "ip4"
    return f"/{kind}/{host.strip('[]')}/tcp/{port}"


def port_of(address: str) -> int:
    """Of a TCP multiaddress that somebody listens at."""
    return int(address.split("/")[4])


def at_port(address: str, port: int) -> str:
    """The TCP multiaddress with this port in the place of its own."""
    return "/".join([*address.split("/")[:4], str(port)])


def is_free(host: str, port: int) -> bool:
    """Whether a program could listen at this TCP port of a numeric address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError):
            return False
        return True
