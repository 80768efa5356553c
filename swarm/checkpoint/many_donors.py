"""Many pieces of one thing from several donors: each gives as many as it can, and none is asked for twice at a time."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

from swarm.core.errors import DiskFullError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import MOST_LANES, lanes_of

log = logging.getLogger(__name__)

MOST_OF_ALL = 64
"""Pieces under way at a time, of all donors together: each has its place in memory."""

LOOK_S = 1.0
LOOK_FOR_MORE_S = 20.0
"""Between two looks for donors that were cut off and are back, or are new: a state is on its way for many minutes."""
FAR_BELOW = 0.25
"""Of what the others give on average: who gives less, with all that is under way, makes room for somebody new. Else
strangers could hold all places, and let bytes drip."""
LOOKED_BACK_S = 4 * LOOK_FOR_MORE_S
"""What a donor gave before counts half: one that was fast may drip now."""
MOST_VAIN_LOOKS = 3
"""In a row, nobody being left: a home line that was cut off is back within a minute, or not soon."""
MOST_FAILURES = 4
LATE_TIMES = 4.0
"""At the end a piece is asked of another donor if the first has not given it in so many times as long as any took
either: what came of it is lost, and all the rest need not wait for a line that carries next to nothing."""

Piece = TypeVar("Piece")
Fetch = Callable[[PeerId, Piece], Awaitable[int]]
"""Have a piece of one donor here; its bytes. Raises TransientError or RemoteError where it does not give it."""
More = Callable[[Collection[PeerId], Collection[PeerId]], Awaitable[Iterable[PeerId]]]
"""Who gives pieces, too, in places that the first leave free: those that were cut off and are back among them, but none
of the second, who gave something else or are to be replaced. Raises TransientError where nobody will."""


async def from_donors(
    donors: Sequence[PeerId], wanted: Iterable[Piece], fetch: Fetch[Piece], *, more: More | None = None
) -> None:
    """Have all pieces here, in about this order, the first donors' first.

    Each is asked for one at first, and for more as fast as they come. A donor that fails is asked no more, unless
    `more` names it again; where it gave some before, or another piece came meanwhile, for half as many at a time, and
    one more each time that it gave so many, until it has failed `MOST_FAILURES` times running. Raises the last one's
    error when pieces are left and nobody is: with `more`, when `MOST_VAIN_LOOKS` have then brought no piece. Raises
    DiskFullError at once: that is no donor's fault.
    """
    todo, failed, busy, came = deque(wanted), set[PeerId](), Counter[PeerId](), Counter[PeerId]()
    false = set[PeerId]()
    """Who gave something else, or refused: nobody asks them again."""
    slowest_s: dict[PeerId, float] = {}
    """Of the pieces that a donor gave."""
    failures, failed_at = Counter[PeerId](), dict[PeerId, float]()
    came_at, vain_looks, nobody_is_left = -math.inf, 0, asyncio.Event()
    largest = 0
    most = dict.fromkeys(donors, float(MOST_LANES))
    began = dict.fromkeys(donors, time.monotonic())
    running: dict[asyncio.Task[None], tuple[PeerId, Piece, float]] = {}
    last: TransientError | RemoteError = TransientError(f"none of {len(donors)} donors is left")

    async def one(donor: PeerId, piece: Piece) -> None:
        nonlocal last, came_at, vain_looks, largest
        asked_at = time.monotonic()
        try:
            num_bytes = await fetch(donor, piece)
            came[donor] += num_bytes
            largest = max(largest, num_bytes)
            came_at, vain_looks = time.monotonic(), 0
            slowest_s[donor] = max(came_at - asked_at, slowest_s.get(donor, 0.0))
            failures[donor] = 0
            most[donor] = min(MOST_LANES, most[donor] + 1 / most[donor])
        except DiskFullError:
            raise
        except (TransientError, RemoteError) as error:
            if asked_at >= failed_at.get(donor, -math.inf):  # what fails together has failed once
                failures[donor] += 1
                failed_at[donor] = time.monotonic()
                most[donor] = max(1.0, min(most[donor], busy[donor]) // 2)  # a line had too much to carry
            lives = donor in slowest_s or came_at > asked_at
            if not isinstance(error, TransientError) or not lives or failures[donor] >= MOST_FAILURES:
                failed.add(donor)
                if isinstance(error, RemoteError):
                    false.add(donor)
            todo.appendleft(piece)
            last = error
        finally:
            busy[donor] -= 1

    def able() -> list[PeerId]:
        """Who may be asked for one more; those first who did not fail, and have the fewest under way."""
        if len(running) >= MOST_OF_ALL:
            return []
        now = time.monotonic()
        there = [donor for donor in most if donor not in failed and busy[donor] < room(donor, now)]
        return sorted(there, key=lambda donor: (failures[donor], busy[donor]))

    def room(donor: PeerId, now: float) -> int:
        return min(int(most[donor]), lanes_of(came[donor] / max(now - began[donor], 1e-3), most=MOST_LANES))

    async def look_for_more(find: More) -> None:
        nonlocal vain_looks
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_FOR_MORE_S):
                    await (nobody_is_left.wait() if not vain_looks else asyncio.sleep(LOOK_FOR_MORE_S))
            nobody_is_left.clear()
            vain_looks += not running
            if vain_looks > MOST_VAIN_LOOKS:
                return
            slow = far_below(time.monotonic())
            found = set(await find(most.keys() - failed - slow, false | slow)) - false - slow
            for donor in found:
                log.info("%s gives pieces, too", donor[-6:])
                failed.discard(donor)
                failures[donor] = 0
                most[donor], began[donor], came[donor] = MOST_LANES, time.monotonic(), 0
            for donor in slow if found else ():
                log.info("%s gives far less than others: it makes room for one", donor[-6:])
                failed.add(donor)
                for task in [one for one, (who, _, _) in running.items() if who == donor and not one.done()]:
                    todo.appendleft(running.pop(task)[1])
                    task.cancel()

    def far_below(now: float) -> set[PeerId]:
        """The slowest of those who give, if it is far below the others; nobody else."""
        for donor in most if todo else ():
            if now - began[donor] > LOOKED_BACK_S:
                began[donor], came[donor] = (began[donor] + now) / 2, came[donor] // 2
        giving = [donor for donor in most if donor not in failed and now - began[donor] >= LOOK_FOR_MORE_S]
        rates = {donor: came[donor] / (now - began[donor]) for donor in giving}
        at_best = {donor: (came[donor] + largest * busy[donor]) / (now - began[donor]) for donor in giving}
        if not todo or len(giving) < 2:
            return set()
        slowest = min(giving, key=lambda donor: at_best[donor])
        others = (sum(rates.values()) - rates[slowest]) / (len(giving) - 1)
        return {slowest} if at_best[slowest] < FAR_BELOW * others else set()

    def late() -> asyncio.Task[None] | None:
        """What is under way, nothing else being left, though another who is idle would have given it several times."""
        idle_s = {donor: slowest_s[donor] for donor in able() if donor in slowest_s}
        for task, (donor, _, asked_at) in running.items() if not todo else ():
            others_s = [slowest for other, slowest in idle_s.items() if other != donor]
            least_s = max(min(others_s, default=math.inf), slowest_s.get(donor, 0.0))
            if time.monotonic() > asked_at + max(LATE_TIMES * least_s, LOOK_S) and not task.done():
                return task
        return None

    looking = asyncio.ensure_future(look_for_more(more)) if more is not None else None
    try:
        while True:
            while todo and (free := able()):
                donor, piece = free[0], todo.popleft()
                busy[donor] += 1
                running[asyncio.ensure_future(one(donor, piece))] = donor, piece, time.monotonic()
            if not running and (not todo or looking is None or looking.done()):
                break
            if not running:
                nobody_is_left.set()
            under_way = [*running] or [task for task in (looking,) if task is not None]
            done, _ = await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running.keys():  # not those whose donor has made room meanwhile
                del running[task]
                task.result()
            if looking is not None and looking.done():
                looking.result()
            if (overdue := late()) is not None:
                donor, piece, _ = running.pop(overdue)
                failed.add(donor)
                todo.append(piece)
                overdue.cancel()
    finally:
        under_way = [*running, *([looking] if looking is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    if todo:
        raise last
