"""Heavy work in order of urgency on one thread, off the event loop."""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol, TypeVar

from swarm.core.errors import MemoryFullError, TransientError
from swarm.memory.out_of_memory import is_of_device, is_out_of_memory

Result = TypeVar("Result")


class Urgency(IntEnum):
    """Lower goes first, but what has come goes by turns, forward or backward: of a step that ends, the last that come
    forward have the longest way before them."""

    ROUND = 0
    CODEC = 1
    """What came is checked and decoded, or what goes encoded: quickly done, and others wait for it."""
    BACKWARD = 2
    FORWARD = 3
    BIRTH = 4
    """A source's next forward."""
    EVALUATE = 5
    AUDIT = 6


PATIENCE = 8
"""One job in this many is the least urgent that waits, so that evaluation goes on under full load."""

TRIES, RETRY_S = 5, 0.5
"""Of a round's job for which there is no memory: what a microbatch holds meanwhile is soon free."""

Rank = tuple[int, int, Urgency]
"""Lower goes first: of what comes and goes on hops what belongs to the older step, so that steps end."""


@dataclass(frozen=True)
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    urgency: Urgency
    since: float


class OutOfMemory(Protocol):
    """Told where memory gave out."""

    def gave_out(self, urgency: Urgency, place: Literal["host", "device"], said: str) -> None:
        """(on the thread) A job of that urgency has ended with it, and what it held is free again."""


class WorkThread:
    """One thread that runs jobs, most urgent first, of hops those of the older step, then first come first served.

    A job whose waiter was cancelled before it began is skipped. `busy_s` is the time spent in jobs so far.
    """

    def __init__(
        self,
        name: str,
        *,
        before_job: Callable[[], None] | None = None,
        may_begin: Callable[[Urgency], bool] | None = None,
        audits_wait_s: float = 0.0,
        memory: OutOfMemory | None = None,
    ) -> None:
        """`before_job` is called on the thread before each job, and must not fail.

        `may_begin`: whether jobs of an urgency are begun now; call `wake` when it may have changed. None: all are.
        Audits younger than `audits_wait_s` are made only when nothing else waits. `memory` is told where it gave out.
        """
        self.busy_s = 0.0
        self._waiting: defaultdict[Rank, deque[_Job]] = defaultdict(deque)
        self._mean_s: dict[Urgency, float] = {}
        self._running: Urgency | None = None
        self._num_taken = 0
        self._wake = threading.Condition()
        self._closing = False
        self._before_job = before_job
        self._may_begin = may_begin
        self._audits_wait_s = audits_wait_s
        self._memory = memory
        self._thread = self._started(name)

    def _started(self, name: str) -> threading.Thread | None:
        """What runs the jobs; None: somebody else does, one at a time."""
        thread = threading.Thread(target=copy_context().run, args=(self._work,), name=name, daemon=True)
        thread.start()
        return thread

    @property
    def backlog_s(self) -> float:
        """Seconds until a microbatch that came now would begin, by what such jobs have taken so far."""
        with self._wake:
            ahead = [job.urgency for jobs in self._waiting.values() for job in jobs if job.urgency <= Urgency.FORWARD]
            if self._running is not None:
                ahead.append(self._running)
            return sum((self._mean_s.get(urgency, 0.0) for urgency in ahead), 0.0)

    @property
    def visit_s(self) -> float:
        """Seconds that a microbatch takes, forward and backward, by what such jobs have taken so far."""
        return sum(self._mean_s.get(part, 0.0) for part in (Urgency.BIRTH, Urgency.FORWARD, Urgency.BACKWARD))

    async def run(self, urgency: Urgency, job: Callable[[], Result], *, step: int = 0) -> Result:
        """The job's result, or its exception. Raises TransientError when the thread is closing.

        Raises MemoryFullError where memory gave out. A round's jobs are tried again before that, a few times: they can
        be done over.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._wake:
            if self._closing:
                raise TransientError("this peer is shutting down")
            self._waiting[_rank(urgency, step)].append(_Job(job, future, loop, urgency, time.monotonic()))
            self._wake.notify()
        return await future

    async def owed(self, job: Callable[[], Result], *, within_s: float, still: Callable[[], bool]) -> Result:
        """A job of the round that must be done sooner or later: while memory is full it is tried again for so long,
        where it is `still` wanted. Raises as `run`."""
        give_up_at = time.monotonic() + within_s
        while True:
            try:
                return await self.run(Urgency.ROUND, job)
            except MemoryFullError:
                if time.monotonic() > give_up_at or not still():
                    raise

    def close(self, *, timeout_s: float) -> None:
        """Finish the running job, drop the others."""
        with self._wake:
            self._closing = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._wake.notify()
        for job in dropped:
            job.loop.call_soon_threadsafe(_settle, job.future, None, TransientError("this peer is shutting down"))
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Look again at what may begin."""
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while (job := self._next()) is None and not self._closing:
                    self._wake.wait()
            if job is None:
                return
            try:
                self._do(job)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del job  # a finished job must not keep its tensors alive until the next comes

    def _do(self, job: _Job) -> None:
        """Raises RuntimeError if its loop is closed."""
        if job.future.cancelled():
            return
        self._running = job.urgency
        if self._before_job is not None:
            self._before_job()
        started = time.perf_counter()
        result, error = self._outcome(job)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        self._mean_s[job.urgency] = 0.8 * self._mean_s.get(job.urgency, seconds) + 0.2 * seconds
        self._running = None
        job.loop.call_soon_threadsafe(_settle, job.future, result, error)

    def _outcome(self, job: _Job) -> tuple[Any, BaseException | None]:
        """What comes of a job, and what it raised instead."""
        for tries_left in reversed(range(TRIES if job.urgency == Urgency.ROUND else 1)):
            try:
                return job.call(), None
            except BaseException as caught:  # noqa: BLE001 - handed to the waiter, who decides
                if not is_out_of_memory(caught):
                    return None, caught
                place: Literal["host", "device"] = "device" if is_of_device(caught) else "host"
                said = str(caught) or type(caught).__name__
            # The exception is gone, and with it the frames that held what the job had made so far.
            if self._memory is not None:
                self._memory.gave_out(job.urgency, place, said)
            if tries_left and not self._closing:
                time.sleep(RETRY_S)
        return None, MemoryFullError(f"out of memory: {said[:200]}")

    def _next(self) -> _Job | None:
        held = [rank for rank in sorted(self._waiting) if self._may_begin is None or self._may_begin(rank[2])]
        if not held:
            return None
        self._num_taken += 1
        rank = held[0]
        if self._num_taken % PATIENCE == 0:
            young = time.monotonic() - self._audits_wait_s
            rank = next(
                (it for it in reversed(held) if it[2] != Urgency.AUDIT or self._waiting[it][0].since <= young), rank
            )
        jobs = self._waiting[rank]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[rank]
        return job


def _rank(urgency: Urgency, step: int) -> Rank:
    if urgency == Urgency.BIRTH:  # of its step the last, but before what has come of a later one
        return int(Urgency.BACKWARD), step, urgency
    in_turn = Urgency.BACKWARD if urgency == Urgency.FORWARD else urgency
    return int(in_turn), step, in_turn


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
