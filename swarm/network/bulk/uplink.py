"""How fast each connection sends, where several share a slow uplink.

TCP learns how fast a line is from what it loses there, each connection by itself. A round's messages are so short that
bbr stays at its beginning, in which it sends nearly three times as fast as anything ever came through: two connections
on 1 Mbit/s lost 2 % of their packets to a queue of seventeen, and four lost 10 to 30 % and stood still for what was
lost again. What all of them together brought through in a second or two is no secret, though. So each that has
something to send has its share of a little more than the most of that (SO_MAX_PACING_RATE, socket(7) of Linux).

Of the most, and not of what comes through now: who has its share sends no faster, and where one of two goes to a peer
whose own line is slower, all would become slower by that, and slower again. A line that has become slower in truth
loses packets as it would without a pace, until the most is forgotten.
"""

import asyncio
import contextlib
import math
import socket
from collections import deque
from typing import Protocol

_SO_MAX_PACING_RATE = 47
"""Linux; Python has no name for it."""
LOOK_S = 0.05
WINDOW_S = 2.0
"""In which the queue's 0.2 s, whose packets may have been sent before, are little."""
PACE = 1.5
"""Of the most that came through: what is faster now shows within seconds."""
KEPT_WINDOWS = 450
"""Of which the most counts: those of a quarter of an hour in which all the time something went."""
SLOW_BYTES_PER_S = 1e6
"""A faster line has so many lanes that each message takes many round trips, by which bbr knows its share."""
LEAST_BYTES = 4 * 1448
"""What TCP sends in one go anyway counts for nothing."""


class PacedStream(Protocol):
    """One of those that share the uplink."""

    @property
    def waiting_bytes(self) -> int:
        """Ciphertext that was taken to be sent, and that the other end does not have."""

    def pace(self, bytes_per_s: float) -> None: ...


class Uplink:
    """All that this process sends by sealed sockets. For the one event loop that uses them."""

    def __init__(self) -> None:
        self._sending: dict[PacedStream, int] = {}
        """Who has something to send, and how much of that was there when last looked."""
        self._moved = 0
        self._windows: deque[float] = deque(maxlen=KEPT_WINDOWS)
        """Bytes a second that came through."""
        self.bytes_per_s: float | None = None
        """The most of them; None while that is not known."""
        self._window: tuple[float, int] | None = None
        """Since when something goes all the time, and what had come through by then."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def took(self, stream: PacedStream, num_bytes: int) -> None:
        """The kernel has taken so much of a long record."""
        if stream not in self._sending:
            self._sending[stream] = 0
            self._share()
        self._sending[stream] += num_bytes
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._window = loop, None
            loop.call_later(LOOK_S, self._look)

    def left(self, stream: PacedStream) -> None:
        """It is closed."""
        if self._sending.pop(stream, None) is not None:
            self._share()

    def _look(self) -> None:
        before = len(self._sending)
        for stream, known in list(self._sending.items()):
            waiting = stream.waiting_bytes
            self._moved += max(0, known - waiting)
            self._sending[stream] = waiting
            if not waiting:
                del self._sending[stream]
        if not self._sending:
            self._loop = self._window = None
            return
        assert self._loop is not None
        self._loop.call_later(LOOK_S, self._look)
        if self._measures(self._loop.time()) or len(self._sending) != before:
            self._share()

    def _measures(self, now: float) -> bool:
        """Whether a window has ended."""
        if self._window is None:
            self._window = (now, self._moved)
        began, moved = self._window
        if now < began + WINDOW_S:
            return False
        self._windows.append((self._moved - moved) / (now - began))
        self.bytes_per_s = max(self._windows)
        self._window = (now, self._moved)
        return True

    def _share(self) -> None:
        is_slow = self.bytes_per_s is not None and self.bytes_per_s < SLOW_BYTES_PER_S
        for stream in self._sending:
            stream.pace(PACE * self.bytes_per_s / len(self._sending) if is_slow and self.bytes_per_s else math.inf)


UPLINK = Uplink()


def set_pace(connection: socket.socket, bytes_per_s: float) -> None:
    """As fast as that, and no faster; infinite: as it likes. Where the system knows no such thing, nothing happens."""
    rate = min(bytes_per_s, float((1 << 32) - 1))
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(rate).to_bytes(4, "little"))
