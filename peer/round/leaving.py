"""How a peer leaves in good order: what it has in flight ends, its work is averaged, and others have what it made.

On a home line a round of a large stage takes minutes, and whoever goes in the middle of one makes all others wait. So
no part of it has a fixed time: each is given up where nothing moves.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

from peer.round.rounds import StageRounds
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId

LOOK_EVERY_S = 0.05
ASK_EVERY_S = 0.5


class Leaving:
    """One peer's leaving of its stage, once it begins nothing more."""

    def __init__(
        self,
        rounds: StageRounds,
        others: Callable[[], Collection[PeerId]],
        in_flight: Callable[[], int],
        num_given: Callable[[], int],
    ) -> None:
        """`others`: peers of the stage that answer; `in_flight`: microbatches that have begun here and not ended;
        `num_given`: parts, results and chunks of states that others were given on asking."""
        self._rounds = rounds
        self._others = others
        self._in_flight = in_flight
        self._num_given = num_given
        self.waits_for = ""
        """In words for the owner; empty while nothing is waited for."""

    async def done(self, *, quiet_s: float, most_s: float) -> None:
        """Until nothing is owed any more, or nothing of it has moved for `quiet_s`, or `most_s` have passed."""
        give_up_at = time.monotonic() + most_s
        await self._until(self._is_averaged, LOOK_EVERY_S, quiet_s, give_up_at)
        steps = self._rounds.steps
        made, lacking = int(steps.version), set(self._others()) & set(steps.chain.members)

        async def is_handed_on() -> bool:
            behind = await asyncio.gather(*(self._is_behind(peer, made) for peer in lacking))
            lacking.intersection_update([peer for peer, lacks in zip(lacking, behind, strict=True) if lacks])
            self.waits_for = f"version {made} is fetched by {len(lacking)} others"
            return not lacking

        if steps.is_member:
            await self._until(is_handed_on, ASK_EVERY_S, quiet_s, give_up_at)
        self.waits_for = ""

    async def _until(
        self, is_done: Callable[[], Awaitable[bool]], every_s: float, quiet_s: float, give_up_at: float
    ) -> None:
        """Or until nothing moves any more, or the time is up."""
        moved: object = None
        moved_at = time.monotonic()
        while not await is_done() and time.monotonic() < min(moved_at + quiet_s, give_up_at):
            now_moved = (self._in_flight(), self._rounds.moved(), self._num_given())
            if now_moved != moved:
                moved, moved_at = now_moved, time.monotonic()
            await asyncio.sleep(every_s)

    async def _is_averaged(self) -> bool:
        """What this peer has computed."""
        steps = self._rounds.steps
        closed = self._rounds.moved()
        self.waits_for = (
            f"the round of step {steps.version} is finished first" if closed else "what has begun is finished"
        )
        return not self._in_flight() and not steps.owes_work()

    async def _is_behind(self, peer: PeerId, version: int) -> bool:
        """Whether it answers, and has not made the version yet."""
        try:
            return await self._rounds.version_of(peer) < version
        except (TransientError, RemoteError):
            return False
