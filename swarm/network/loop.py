"""A program's event loop, started and stopped: uvloop where there is one, and signals as a request.

SIGINT and SIGTERM only set `stop`; main drains and returns. A second signal cancels main, and so does the end of the
time that who ends a service, or a machine, gives. While it runs, the garbage
collector leaves alone what the program has loaded, and looks through what is new less often: walking through the
libraries' objects again and again took more than half of the loop's time in an averaging round, and through those of
the round itself a tenth of what was left.
"""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

SETTLE_S = (10.0, 50.0)
"""After these pauses from the start the program has loaded more: its libraries come when they are needed. Only that is
looked through then."""
YOUNG_OBJECTS = 20_000
"""So many new containers outlive their functions before the collector looks for rings among them."""
SETTLE_AGAIN_S = 3600.0
"""And what was loaded and dropped since is collected."""
OPEN_FILES = 4096
"""A peer in touch with many has over a thousand streams, and the system's usual limit is 1024: past it a program can
neither call nor be called."""


def run(main: Callable[[asyncio.Event], Awaitable[Result]], *, terminated_s: float | None = None) -> Result:
    """Run `main(stop)` to its end and return its result. Raises KeyboardInterrupt if a second signal cancelled it.

    `terminated_s`: so long after SIGTERM it is cancelled: nobody is there to send a second one. None: never.
    """
    _allow_open_files()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(_until_stopped(main, terminated_s))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _allow_open_files() -> None:
    """As many as are needed, or as the system lets this user have."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop does not exist (Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[Result]], terminated_s: float | None) -> Result:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    settling = asyncio.ensure_future(_settle())
    task = asyncio.ensure_future(main(stop))

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            task.cancel()
        elif number == signal.SIGTERM and terminated_s is not None:
            loop.call_later(terminated_s, task.cancel)
        stop.set()

    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            loop.add_signal_handler(number, on_signal, number)
            handled.append(number)
    try:
        return await task
    finally:
        settling.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # at the end libraries count what was not collected
        for number in handled:
            loop.remove_signal_handler(number)


async def _settle() -> None:
    for pause_s in (0.0, *SETTLE_S):
        await asyncio.sleep(pause_s)
        gc.collect()
        gc.freeze()
    while True:
        await asyncio.sleep(SETTLE_AGAIN_S)
        gc.unfreeze()
        gc.collect()
        gc.freeze()


async def happened(event: asyncio.Event, *, within_s: float) -> bool:
    """Whether the event was set within the time.

    Not `asyncio.wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
    """
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def in_thread_to_its_end(work: Callable[..., Result], *arguments: object) -> Result:
    """As `asyncio.to_thread`, but who is cancelled meanwhile waits: nothing that the work does comes after that."""
    done = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.gather(done, return_exceptions=True)
        raise
