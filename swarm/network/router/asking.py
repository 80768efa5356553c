"""Questions to the home's router, a datagram each: by NAT-PMP or by PCP, which share a port."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from swarm.core.errors import TransientError

T = TypeVar("T")
TRIES_S = (0.25, 0.5, 1.0)
"""An answer is waited for so long, and then asked for again (RFC 6886, 3.1, which goes on for a minute)."""
ROUTER_PORT = 5351


class Asking(asyncio.DatagramProtocol):
    """A socket that hears the router alone."""

    def __init__(self, router: tuple[str, int], protocol: str) -> None:
        self._router = router
        self._protocol = protocol
        self._came: asyncio.Queue[bytes] = asyncio.Queue(maxsize=16)

    async def __aenter__(self) -> "Asking":
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=self._router)
        except OSError as error:
            raise TransientError(f"the router {self._router[0]} cannot be asked: {error}") from error
        self.inside = str(self._transport.get_extra_info("sockname")[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, _addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # nobody needs so many
            self._came.put_nowait(data)

    def send(self, asked: bytes) -> None:
        self._transport.sendto(asked)

    async def answer(self, asked: bytes, read: Callable[[bytes], T | None]) -> T:
        """What `read` makes of the answer; of what answers another question, None. Raises TransientError as it does,
        or where the router says nothing."""
        for seconds in TRIES_S:
            self.send(asked)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while (found := read(await self._came.get())) is None:
                        pass
                    return found
        raise TransientError(f"the router does not answer when it is asked to forward a port ({self._protocol})")
