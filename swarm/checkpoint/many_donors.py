"""Many pieces of one thing from several donors: each gives as many as it can, and none is asked for twice at a time."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import MOST_LANES, lanes_of

MOST_OF_ALL = 64
"""Pieces under way at a time, of all donors together: each has its place in memory."""

Piece = TypeVar("Piece")
Fetch = Callable[[PeerId, Piece], Awaitable[int]]
"""Have a piece of one donor here; its bytes. Raises TransientError or RemoteError where it does not give it."""


async def from_donors(donors: Sequence[PeerId], wanted: Iterable[Piece], fetch: Fetch[Piece]) -> None:
    """Have all pieces here, in about this order, the first donors' first.

    A donor that fails once is asked no more. Raises the last one's error when pieces are left.
    """
    todo, failed, busy, came = deque(wanted), set[PeerId](), Counter[PeerId](), Counter[PeerId]()
    began = time.monotonic()
    running: set[asyncio.Task[None]] = set()
    last: TransientError | RemoteError = TransientError(f"none of {len(donors)} donors is left")

    async def one(donor: PeerId, piece: Piece) -> None:
        nonlocal last
        try:
            came[donor] += await fetch(donor, piece)
        except (TransientError, RemoteError) as error:
            failed.add(donor)
            todo.appendleft(piece)
            last = error
        finally:
            busy[donor] -= 1

    def able() -> list[PeerId]:
        """Who may be asked for one more; those first who have the fewest under way."""
        seconds = max(time.monotonic() - began, 1e-3)
        if len(running) >= MOST_OF_ALL:
            return []
        most = {donor: lanes_of(came[donor] / seconds, most=MOST_LANES) for donor in donors}
        there = [donor for donor in donors if donor not in failed and busy[donor] < most[donor]]
        return sorted(there, key=lambda donor: busy[donor])

    try:
        while True:
            while todo and (free := able()):
                busy[free[0]] += 1
                running.add(asyncio.ensure_future(one(free[0], todo.popleft())))
            if not running:
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if todo:
        raise last
