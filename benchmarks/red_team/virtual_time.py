"""An event loop whose clock jumps to the next deadline as soon as nothing is left to do, and work without threads.

What runs in it waits for nobody: minutes of deadlines pass in no time, and the same seed gives the same run.
"""

import asyncio
import contextlib
import random
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor, Future
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack
from unittest import mock

from peer.pipeline.compute import Urgency, WorkThread
from swarm.core.errors import LocalError, TransientError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

EPOCH_S = 1.8e9
"""What the calendar says when a virtual loop begins."""
MOST_AT_ONCE = 10_000
"""Turns of the loop in which no time passes: a run has fewer than a hundred, and messages that answer each other for
ever have no last one."""
JOB_S = 0.01
"""A job of a peer's threads takes so long."""


class StandsStillError(LocalError):
    """Something goes on without end, and takes no time."""


class _Jumping(selectors.SelectSelector):
    """Nothing ever comes from outside: instead of waiting, time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._num_at_once = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise LocalError("nothing is left that could ever happen in this loop")
        self._num_at_once = self._num_at_once + 1 if timeout <= 0 else 0
        if self._num_at_once > MOST_AT_ONCE:
            raise StandsStillError(f"no time passes in {MOST_AT_ONCE} turns of the loop, at {self.now:.3f} s")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` jumps; what is handed to an executor is done at once."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> "asyncio.Future[Result]":
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 - whoever waits decides
            future.set_exception(error)
        return future


class AtOnce(Executor):
    """Does what it is given when it is given it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, fn: Callable[..., Result], /, *args: Any, **given: Any) -> "Future[Result]":
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **given))
        except BaseException as error:  # noqa: BLE001 - whoever waits decides
            future.set_exception(error)
        return future


class WorkInLoop(WorkThread):
    """Jobs in the same order as a thread's, each `JOB_S` long, in the event loop itself."""

    def _started(self, name: str) -> threading.Thread | None:
        self._is_working = False
        return None

    async def run(self, urgency: Urgency, job: Callable[[], Result], *, step: int = 0) -> Result:
        if self._closing:
            raise TransientError("this peer is shutting down")
        self._begin_soon()
        return await super().run(urgency, job, step=step)

    def wake(self) -> None:
        self._begin_soon()

    def _begin_soon(self) -> None:
        if not self._is_working:
            self._is_working = True
            asyncio.get_running_loop().call_later(JOB_S, self._one)

    def _one(self) -> None:
        self._is_working = False
        job = self._next()
        if job is not None:
            self._do(job)
            self._begin_soon()


def _calendar(loop: VirtualLoop) -> Callable[[], float]:
    return lambda: EPOCH_S + loop.time()


def _drawn_from(rng: Random) -> Callable[[], Random]:
    return lambda: Random(rng.getrandbits(64))


@contextlib.contextmanager
def clocks_of(loop: VirtualLoop, rng: Random) -> Iterator[None]:
    """Every clock of the process shows the loop's time, and its secrets come from `rng`."""
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter", loop.time),
        mock.patch.object(time, "time", _calendar(loop)),
        mock.patch.object(secrets, "token_bytes", lambda size=32: rng.randbytes(size)),
        mock.patch.object(secrets, "token_hex", lambda size=32: rng.randbytes(size).hex()),
        mock.patch.object(secrets, "randbits", rng.getrandbits),
        mock.patch.object(random, "SystemRandom", _drawn_from(rng)),
    ):
        yield


def run_virtually(
    main: Callable[[], Coroutine[Any, Any, Result]],
    *,
    rng: Random,
    on_unhandled: Callable[[Mapping[str, Any]], None],
) -> Result:
    """What `main` comes to in a virtual loop. `on_unhandled` is told of exceptions that nobody waits for."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, context: on_unhandled(context))
    try:
        with clocks_of(loop, rng):
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(main())
    finally:
        with contextlib.suppress(LocalError):
            _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
