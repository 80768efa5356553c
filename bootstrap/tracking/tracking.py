"""The host's trackers, each fed by a process of its own: nothing that a tracker does can hold the host up or end it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from bootstrap.tracking.feeding import ALL_GIVEN, Job
from swarm.network.loop import happened

START_AGAIN_S = 30.0
"""After a feeding process that ended by itself: it learns from the tracker what is there, and goes on behind it."""


class Tracking:
    """Feeds trackers for as long as the host lives."""

    def __init__(self, jobs: Sequence[Job], emit: Callable[[dict[str, Any]], None]) -> None:
        self._jobs = jobs
        self._emit = emit
        self._ended = asyncio.Event()
        self._feeding: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._feeding = [asyncio.ensure_future(self._feed(job)) for job in self._jobs]

    async def __aexit__(self, *_: object) -> None:
        """Waits for the last rows, but not for long (`LAST_ROWS_S`)."""
        self._ended.set()
        await asyncio.gather(*self._feeding)

    async def _feed(self, job: Job) -> None:
        is_well = True
        while not self._ended.is_set():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "bootstrap.tracking.feeding"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a tracker's own processes end with it
            )
            reason = "its process has ended"
            try:
                async for said in self._said(job, process):
                    if said != ALL_GIVEN:
                        reason = said
                    elif not is_well:
                        is_well = True
                        self._emit({"event": "tracked_again", "to": str(job.place)})
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if is_well and not self._ended.is_set():
                is_well = False
                self._emit({"event": "not_tracked", "to": str(job.place), "reason": reason})
            await happened(self._ended, within_s=START_AGAIN_S)

    async def _said(self, job: Job, process: asyncio.subprocess.Process) -> AsyncIterator[str]:
        """Until it ends, by itself or because the host does."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(job.to_line().encode() + b"\n")
        ending = asyncio.ensure_future(self._end(process.stdin))
        try:
            while line := await process.stdout.readline():
                yield str(json.loads(line))
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end(self, job: asyncio.StreamWriter) -> None:
        """Have the process write what is left: it ends by itself within LAST_ROWS_S, whatever its tracker does."""
        await self._ended.wait()
        job.close()
