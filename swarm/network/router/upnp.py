"""A router that forwards ports by UPnP, as most do: asked by a program of its own (`swarm.network.router.igd`).

That waits on sockets without an end to it, and reads whatever the devices of the home answer, with a library in C.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Any

from swarm.core.errors import TransientError
from swarm.network.router.forwarded import LIFETIME_S, Forwarded

WITHIN_S = 15.0
"""The program has so long: most routers take one or two seconds, of which one is the search."""
END_WITHIN_S = 4.0
MAX_SAID = 4096
"""Bytes of its output that are read."""


class Upnp:
    """The router that answers in this home."""

    def __init__(self, interface: str | None = None) -> None:
        """`interface`: the address of ours from which to search, if the system is not to choose."""
        self._interface = interface

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        """Raises TransientError if no router forwards them, with the reason."""
        said = await self._run("ask", ports, WITHIN_S)
        try:
            given = {int(inner): int(outer) for inner, outer in said["ports"].items()}
            outside, inside = (str(IPv4Address(said[name])) for name in ("outside", "inside"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TransientError(f"what the router says of a port means nothing (UPnP): {error}") from error
        if set(given) != set(ports) or not all(0 < outer < 1 << 16 for outer in given.values()):
            raise TransientError("the router forwards other ports than it was asked for (UPnP)")
        return Forwarded(outside, inside, given, LIFETIME_S)

    async def end(self, ports: Sequence[int]) -> None:
        """What the router gave may have no end of its own."""
        try:
            await self._run("end", ports, END_WITHIN_S)
        except TransientError:
            return  # it is away, or has forgotten them

    async def _run(self, what: str, ports: Sequence[int], within_s: float) -> dict[str, Any]:
        try:
            program = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "swarm.network.router.igd", what, self._interface or "", *map(str, ports)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:  # too many open files, or no memory for it
            raise TransientError(f"no router could be asked to forward a port: {error} (UPnP)") from error
        assert program.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                said = await program.stdout.read(MAX_SAID)
                await program.wait()
            told: dict[str, Any] = json.loads(said)
        except TimeoutError:
            raise TransientError(f"no router has forwarded a port within {within_s:.0f} s (UPnP)") from None
        except ValueError:
            raise TransientError("no router could be asked to forward a port (UPnP)") from None
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        if "why" in told:
            raise TransientError(f"{told['why']} (UPnP)")
        return told
