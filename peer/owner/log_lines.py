"""The daemon's last log lines, kept in memory, and handed to whoever follows them."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

KEPT_LINES = 2000
QUEUED_LINES = 256
"""For each follower; when it takes them more slowly than they come, the oldest are skipped and counted."""
MAX_FOLLOWERS = 16
MAX_LINE_CHARACTERS = 2000


class LogLines(logging.Handler):
    """Made on the event loop; records may come from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._followers: list[_Follower] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:MAX_LINE_CHARACTERS]
            self._loop.call_soon_threadsafe(self._take, text)
        except RuntimeError:  # the loop is closed: nobody follows
            return

    def _take(self, text: str) -> None:
        self._kept.append(text)
        for follower in self._followers:
            follower.put(text)

    async def lines(self, last: int, *, follow: bool) -> AsyncIterator[tuple[str, int]]:
        """(line, lines skipped before it): the last ones, then those that come."""
        follower = _Follower()
        if follow and len(self._followers) < MAX_FOLLOWERS:
            self._followers.append(follower)
        try:
            for text in list(self._kept)[len(self._kept) - min(last, len(self._kept)) :]:
                yield text, 0
            while follow and follower in self._followers:
                yield await follower.take()
        finally:
            if follower in self._followers:
                self._followers.remove(follower)


class _Follower:
    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._skipped = 0
        self._came = asyncio.Event()

    def put(self, text: str) -> None:
        if len(self._waiting) == QUEUED_LINES:
            self._waiting.popleft()
            self._skipped += 1
        self._waiting.append(text)
        self._came.set()

    async def take(self) -> tuple[str, int]:
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        skipped, self._skipped = self._skipped, 0
        return self._waiting.popleft(), skipped
