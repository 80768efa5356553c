"""Work that goes on beside whoever began it, while a peer is at a stage."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import StageIndex

log = logging.getLogger(__name__)


class Tasks:
    """What others do wrong is logged; what breaks here is told to the supervisor."""

    def __init__(self, stage: StageIndex) -> None:
        self._stage = stage
        self._running: set[asyncio.Task[None]] = set()
        self.is_stopped = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when something broke that this peer cannot mend: its supervisor must end it."""

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin this; nothing is begun once all was stopped."""
        if self.is_stopped:
            work.close()
            return
        task = asyncio.ensure_future(self._guarded(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would never be awaited

    async def stop(self) -> None:
        """End all work; nothing is begun after it."""
        self.is_stopped = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except (TransientError, RemoteError) as error:
            log.info("stage %d: %s", self._stage, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a service that dies tells its supervisor
            of_the_program = not isinstance(error, OSError)  # else of the disk, which the message names
            log.error("stage %d: the round cannot go on: %s", self._stage, error, exc_info=of_the_program)
            if not self.failure.done():
                self.failure.set_exception(error)
