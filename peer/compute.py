"""This is where heavy work runs in order of urgency on one thread, off the event loop."""

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
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


class WorkThread:
    """One thread that runs jobs, most urgent first, first come first served within an urgency.

    A job whose waiter was cancelled before it began is skipped. `busy_s` is the time spent in jobs so far.
    """

    def __init__(self, name: str, *, on_start: Callable[[], None] | None = None) -> None:
        self.busy_s = 0.0
        self._jobs: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closing = False
        self._on_start = on_start
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, urgency: Urgency, job: Callable[[], Result]) -> Result:
        """The job's result, or its exception. Raises TransientError when the thread is closing."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._wake:
            if self._closing:
                raise TransientError("this peer is shutting down")
            heapq.heappush(self._jobs, (urgency, next(self._numbers), job, future, loop))
            self._wake.notify()
        return await future

    def close(self, *, timeout_s: float) -> None:
        """Finish the running job, drop the others."""
        with self._wake:
            self._closing = True
            dropped, self._jobs = self._jobs, []
            self._wake.notify()
        for *_, future, loop in dropped:
            loop.call_soon_threadsafe(_settle, future, None, TransientError("this peer is shutting down"))
        self._thread.join(timeout_s)

    def _work(self) -> None:

        if self._on_start is not None:
            self._on_start()
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                _, _, job, future, loop = heapq.heappop(self._jobs)
            if future.cancelled():
                continue
            started = time.perf_counter()
            result, error = None, None
            try:
                result = job()
            except BaseException as caught:  # noqa: BLE001 - handed to the waiter, who decides
                error = caught
            self.busy_s += time.perf_counter() - started
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del job, future, result, error  # a finished job must not keep its tensors alive until the next comes


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
