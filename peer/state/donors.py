"""Those who can give a joining peer what they hold: the peers that serve a stage by now."""

import asyncio
import contextlib
import random

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.network.directory.records import addresses_in
from swarm.network.transport import Directory, Transport

AT_ONCE = 64
"""Dialled: whoever tells of addresses where nobody answers holds up one place, and not all others."""
LONGEST_S = 10.0
"""Where nobody is there soon: about what a dial may take."""


async def donors_of(
    directory: Directory, transport: Transport, topic: str, rng: random.Random, *, soon_s: float | None = None
) -> list[PeerId]:
    """Who serves the stage of this `topic`: first those whom this peer is connected to, in any order.

    All are dialled; where some are there within `soon_s`, and at last after `LONGEST_S`, no others are waited for.
    Raises TransientError.
    """
    found = await directory.lookup(topic)
    donors = sorted(found.keys() - {transport.peer_id})
    rng.shuffle(donors)
    there, places = set[PeerId](), asyncio.Semaphore(AT_ONCE)

    async def dial(donor: PeerId) -> None:
        async with places:
            with contextlib.suppress(TransientError, RemoteError, TimeoutError):
                await transport.connect(donor, addresses_in(found[donor]))
                there.add(donor)

    dialling = [asyncio.ensure_future(dial(donor)) for donor in donors]
    try:
        pending = set(dialling)
        if dialling:
            _, pending = await asyncio.wait(dialling, timeout=soon_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_S):
                while pending and not there:
                    _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
    return sorted(donors, key=lambda donor: donor not in there)
