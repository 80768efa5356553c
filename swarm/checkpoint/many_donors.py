"""Many pieces of one thing from several donors: each gives as many as it can, and none is asked for twice at a time."""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import MOST_LANES, lanes_of

MOST_OF_ALL = 64
"""Pieces under way at a time, of all donors together: each has its place in memory."""

LOOK_S = 1.0
LATE_TIMES = 4.0
"""At the end a piece is asked of another donor if the first has given none in so many times as long as one takes the
other: what came of it is lost, and all the rest need not wait for a line that carries next to nothing."""

Piece = TypeVar("Piece")
Fetch = Callable[[PeerId, Piece], Awaitable[int]]
"""Have a piece of one donor here; its bytes. Raises TransientError or RemoteError where it does not give it."""


async def from_donors(donors: Sequence[PeerId], wanted: Iterable[Piece], fetch: Fetch[Piece]) -> None:
    """Have all pieces here, in about this order, the first donors' first.

    A donor that fails is asked no more; where another of its pieces came meanwhile, for half as many at a time. Raises
    the last one's error when pieces are left.
    """
    todo, failed, busy, came = deque(wanted), set[PeerId](), Counter[PeerId](), Counter[PeerId]()
    took_s: defaultdict[PeerId, list[float]] = defaultdict(list)
    came_at: dict[PeerId, float] = {}
    most = dict.fromkeys(donors, MOST_LANES)
    began = time.monotonic()
    running: dict[asyncio.Task[None], tuple[PeerId, Piece, float]] = {}
    last: TransientError | RemoteError = TransientError(f"none of {len(donors)} donors is left")

    async def one(donor: PeerId, piece: Piece) -> None:
        nonlocal last
        asked_at = time.monotonic()
        try:
            came[donor] += await fetch(donor, piece)
            came_at[donor] = time.monotonic()
            took_s[donor].append(came_at[donor] - asked_at)
        except (TransientError, RemoteError) as error:
            if isinstance(error, TransientError) and came_at.get(donor, -math.inf) > asked_at and most[donor] > 1:
                most[donor] = max(1, min(most[donor], busy[donor]) // 2)  # it lives: its line had too much to carry
            else:
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
        room = {donor: min(most[donor], lanes_of(came[donor] / seconds, most=MOST_LANES)) for donor in donors}
        there = [donor for donor in donors if donor not in failed and busy[donor] < room[donor]]
        return sorted(there, key=lambda donor: busy[donor])

    def late() -> list[asyncio.Task[None]]:
        """What is under way while nothing is left to do, though somebody idle would have given it several times."""
        idle = [max(took_s[donor]) for donor in able() if took_s[donor]]
        if todo or not idle:
            return []
        due = time.monotonic() - max(LATE_TIMES * min(idle), LOOK_S)
        return [task for task, (donor, _, asked_at) in running.items() if asked_at < due and not took_s[donor]]

    try:
        while True:
            while todo and (free := able()):
                donor, piece = free[0], todo.popleft()
                busy[donor] += 1
                running[asyncio.ensure_future(one(donor, piece))] = donor, piece, time.monotonic()
            if not running:
                break
            done, _ = await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del running[task]
                task.result()
            for task in late():
                donor, piece, _ = running.pop(task)
                failed.add(donor)
                todo.append(piece)
                task.cancel()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if todo:
        raise last
