"""A microbatch that goes on when the call that brought it breaks, until somebody asks for it again.

A lost peer's work is computed once more by another, which sends it to whoever holds what the lost one had sent. So the
stages after it compute nothing twice.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from peer.pipeline.downstream import Refused
from swarm.core.ids import PeerId
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

NOTICE_S = 1.0
"""A caller that still lives so long after its call broke has let go of the microbatch; until then it may be dead."""
MOST_WAITING = 4
"""Callers that wait for one passage, each with an activation in memory."""


@dataclass(frozen=True)
class Arrival:
    """A microbatch as a call brought it."""

    sender: PeerId
    birth: BirthRecord
    header: HopHeader
    activation: memoryview
    """Encoded."""
    targets: memoryview

    def exchange(self, gradient: HopHeader | None = None, answer: Bytes = b"") -> Exchange:
        """The call, and what it is answered with."""
        return Exchange(
            birth=self.birth,
            forward=self.header,
            gradient=gradient,
            activation=self.activation,
            targets=self.targets,
            answer=answer,
        )


@dataclass(frozen=True)
class Passed:
    """What came of a microbatch: the same bytes for all who brought it, each under a header of its own."""

    loss_sum: float
    num_targets: int
    gradient: memoryview
    """Of x, encoded."""
    header: HopHeader
    """Of the gradient, to the one whose activation it was computed from."""


@dataclass(eq=False)
class Passage:
    """A microbatch's way through this peer, from one arrival to what comes of it."""

    arrival: Arrival
    task: asyncio.Task[Passed]
    num_waiting: int = 0
    ends: asyncio.TimerHandle | None = field(default=None, repr=False)
    """When nobody waits for it."""

    @property
    def is_orphan(self) -> bool:
        return not self.num_waiting and not self.task.done()


class Passages:
    """Those under way, and the last that came to something; each of a birth record, whoever brings it.

    One for which nobody waits any more goes on while its last caller may be dead: at most `longest_s`, and of at most
    `most_orphans`. `lives` says whether a peer of the stage before is there.
    """

    def __init__(self, *, longest_s: float, most_orphans: int, most_done: int, lives: Callable[[PeerId], bool]) -> None:
        self._longest_s = longest_s
        self._most_orphans = most_orphans
        self._most_done = most_done
        self._lives = lives
        self._held: dict[bytes, Passage] = {}
        """By the digest of the birth record, in the order in which they began."""

    @property
    def num_orphans(self) -> int:
        return sum(passage.is_orphan for passage in self._held.values())

    def of(self, birth_digest: bytes) -> Passage | None:
        return self._held.get(birth_digest)

    def begin(self, arrival: Arrival, work: Coroutine[Any, Any, Passed]) -> Passage:
        """The only one of its birth record. It is to be waited for at once: else it would be an orphan."""
        key = arrival.birth.digest()
        assert key not in self._held
        passage = self._held[key] = Passage(arrival, asyncio.ensure_future(work))
        passage.task.add_done_callback(lambda _: self._ended(key, passage))
        return passage

    async def wait(self, passage: Passage, caller: PeerId) -> Passed | None:
        """What came of it, for `caller`; None if it was given up. Raises what it came to instead, and Refused."""
        if passage.num_waiting >= MOST_WAITING:
            raise Refused("busy", f"{passage.num_waiting} callers wait for this microbatch")
        passage.num_waiting += 1
        if passage.ends is not None:
            passage.ends.cancel()
        try:
            await asyncio.wait({passage.task})
        finally:
            passage.num_waiting -= 1
            if passage.is_orphan:
                self._leave(passage, caller)
        return None if passage.task.cancelled() else passage.task.result()

    def give_up(self, passage: Passage) -> None:
        """Nobody is to find it any more; it ends, if nobody waits for it."""
        key = passage.arrival.birth.digest()
        if self._held.get(key) is passage and not passage.num_waiting:
            del self._held[key]
            passage.task.cancel()

    def forget(self, version: int) -> None:
        """The stage is at `version`: steps before it are over."""
        for passage in list(self._held.values()):
            if int(passage.arrival.birth.step) < version:
                self.give_up(passage)

    async def stop(self) -> None:
        """Give up all."""
        tasks = [passage.task for passage in self._held.values()]
        self._held.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, passage: Passage, caller: PeerId) -> None:
        """The last call that waited for it is broken."""
        if self.num_orphans > self._most_orphans:
            self.give_up(passage)
            return
        birth = passage.arrival.birth
        log.info("microbatch %d goes on, though %s is gone", birth.microbatch_id, caller[-6:])
        loop = asyncio.get_running_loop()

        def look_again() -> None:
            if self._lives(caller):
                self.give_up(passage)
            else:
                passage.ends = loop.call_later(self._longest_s - NOTICE_S, self.give_up, passage)

        passage.ends = loop.call_later(min(NOTICE_S, self._longest_s), look_again)

    def _ended(self, key: bytes, passage: Passage) -> None:
        if passage.ends is not None:
            passage.ends.cancel()
        is_held = self._held.get(key) is passage
        of_a_source = passage.arrival.sender == passage.arrival.birth.source  # whose place nobody takes
        # What it raised is looked at in any case: nobody else may be there to do so.
        failed = passage.task.cancelled() or passage.task.exception() is not None
        if of_a_source or failed:
            if is_held:
                del self._held[key]
            return
        done = [other for other, held in self._held.items() if held.task.done()]
        for other in done[: max(0, len(done) - self._most_done)]:
            del self._held[other]
