"""Has a home's router forward ports to this machine, by whichever protocol it speaks."""

from collections.abc import Sequence
from typing import Protocol

from swarm.core.errors import TransientError
from swarm.network.router.forwarded import Forwarded
from swarm.network.router.nat_pmp import NatPmp, gateway
from swarm.network.router.pcp import Pcp
from swarm.network.router.upnp import Upnp


class Way(Protocol):
    """A protocol."""

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        """Raises TransientError if no router forwards them, with the reason."""
        ...

    async def end(self, ports: Sequence[int]) -> None: ...


class PortMapper:
    """Asks again and again as what was given comes to its end."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = list(ways)

    @classmethod
    def of_this_home(cls) -> "PortMapper | None":
        """Of the default route's router; None if there is none, or the system does not tell."""
        router = gateway()
        return cls([NatPmp(router), Pcp(router), Upnp()]) if router is not None else None

    async def ask(self, ports: Sequence[int]) -> Forwarded:
        """Have these TCP ports of this machine forwarded, each by its own number if that is free.

        Raises TransientError if the router does not, with its reasons.
        """
        reasons = []
        for way in self._ways:
            try:
                found = await way.ask(ports)
            except TransientError as error:
                reasons.append(str(error))
            else:
                self._ways.sort(key=lambda one: one is not way)  # it is asked first the next time, and told of the end
                return found
        raise TransientError("; ".join(reasons))

    async def end(self, ports: Sequence[int]) -> None:
        """They need be forwarded no longer."""
        await self._ways[0].end(ports)
