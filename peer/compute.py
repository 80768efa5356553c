"""This is where heavy work runs in order of urgency on one thread, off the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from swarm.core.errors import TransientError

Result = TypeVar("Result")


class Urgency(IntEnum):
    """Lower goes first: backward frees memory and unblocks others, evaluation can wait."""

    ROUND = 0
    BACKWARD = 1
    FORWARD = 2
    EVALUATE = 3
    AUDIT = 4


PATIENCE = 8
"""One job in this many is the least urgent that waits, so that evaluation goes on under full load."""


@dataclass(frozen=True)
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class WorkThread:
    """One thread that runs jobs, most urgent first, first come first served within an urgency.

    A job whose waiter was cancelled before it began is skipped. `busy_s` is the time spent in jobs so far.
    """

    def __init__(self, name: str, *, on_start: Callable[[], None] | None = None) -> None:
        self.busy_s = 0.0
        self._waiting: dict[Urgency, deque[_Job]] = {urgency: deque() for urgency in Urgency}
        self._num_taken = 0
        self._wake = threading.Condition()
        self._closing = False
        self._on_start = on_start
        self.may_begin: Callable[[Urgency], bool] = lambda urgency: True
        """Whether jobs of an urgency are begun now; call `wake` when it may have changed."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, urgency: Urgency, job: Callable[[], Result]) -> Result:
        """The job's result, or its exception. Raises TransientError when the thread is closing."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._wake:
            if self._closing:
                raise TransientError("this peer is shutting down")
            self._waiting[urgency].append(_Job(job, future, loop))
            self._wake.notify()
        return await future

    def close(self, *, timeout_s: float) -> None:
        """Finish the running job, drop the others."""
        with self._wake:
            self._closing = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            for jobs in self._waiting.values():
                jobs.clear()
            self._wake.notify()
        for job in dropped:
            job.loop.call_soon_threadsafe(_settle, job.future, None, TransientError("this peer is shutting down"))
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """Look again at what may begin."""
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while True:
            with self._wake:
                while (job := self._next()) is None and not self._closing:
                    self._wake.wait()
            if job is None:
                return
            if job.future.cancelled():
                continue
            started = time.perf_counter()
            result, error = None, None
            try:
                result = job.call()
            except BaseException as caught:  # noqa: BLE001 - handed to the waiter, who decides
                error = caught
            self.busy_s += time.perf_counter() - started
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del job, result, error  # a finished job must not keep its tensors alive until the next comes

    def _next(self) -> _Job | None:
        held = [jobs for urgency, jobs in sorted(self._waiting.items()) if jobs and self.may_begin(urgency)]
        if not held:
            return None
        self._num_taken += 1
        return held[-1 if self._num_taken % PATIENCE == 0 else 0].popleft()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
