"""How much each connection may have under way to here, where several share a narrow line.

Nobody who sends knows who else does. TCP keeps at least four packets of each connection under way (bbr), whatever is
lost, and a line of 0.5 Mbit/s queues ten: of what three connections sent there an eighth to a fifth was dropped and
sent again, and with six a third. Who receives knows them all. So each has its share of what such a line carries in a
queue's time and a round trip, as its TCP receive window.

A line is narrow when little comes through it, but as much as it was seen to carry, and by many connections out of its
order, for what should have come before was dropped. Rates alone say nothing: little comes also from who has little to
send; nor does disorder, for what comes over senders' full uplinks comes so as well. After that more may be under way
from one window of time to the next, until something is dropped again, or a line as wide as any that matters has it.
Where as much is dropped however little is under way, it is dropped elsewhere.
"""

import asyncio
import contextlib
import math
import socket
import struct
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

_SO_BUF_LOCK = 72
"""Linux 5.14; Python has no name for it."""
_TCP_INFO = struct.Struct("=128xQ12xII68xI")
"""Of Linux's `struct tcp_info`: bytes that came, the least round trip in microseconds, segments with data that came,
those of them that came before others which were sent earlier."""
LOOK_S = 0.2
ACTIVE_S = 1.0
"""After its last bytes a connection still counts among those that share the line: its next message may be under way."""
WINDOW_S = 3.0
"""While something comes, in which the line is looked at."""
NARROW_BYTES_PER_S, KNOWN_WINDOWS = 128e3, 40
"""A wider line queues what many connections have under way at least. What came in one of so many windows of time, the
line carries."""
MOST_DISORDERED = 0.05
"""Of a connection's segments. One that is dropped lets some that were under way behind it come out of order."""
SHARE_DISORDERED = 1 / 3
"""Of all segments come by connections with more than that: one that is out of order on purpose narrows nothing."""
QUEUE_S = 0.2
"""Modems hold as much, and all of them some packets."""
LEAST_TOGETHER = 8 * 1448
FULL, LEAST_OF_IT = 0.8, 0.5
"""Of the most that came in one of those: a line that carries less drops nothing. Who came back from a cut had 5 to 18
KB/s of two senders, for minutes, whose own lines were full: what these dropped left its window as wide as that. And of
what such a line has under way at that rate, so much stays."""
NARROWED, WIDENED, OPENED = 0.85, 1.05, 1.5
"""After a window of time with losses, at least; after one without; and after one in which the line was not full."""
IN_VAIN, RESTS = 5, 100
"""After so many windows of time with losses, one after the other, though less and less was under way, they are not this
line's: senders' own uplinks lose as well. Then it is not narrow for so many."""
LEAST_WINDOW, IDLE_WINDOW, WINDOW_STEP = 1 << 10, 2 << 10, 1 << 10
"""Windows are told in such steps (RFC 7323, for buffers of some MiB). `IDLE_WINDOW`: of who sends nothing at the
moment, for what it begins with."""
HELD_BYTES = 128 << 10
"""The kernel's buffer of a connection with a window: it must hold small packets at their full cost."""
NO_WINDOW = 1 << 30


class Came(NamedTuple):
    """By a connection, since its beginning: bytes, the segments they came in, and those of them out of their order."""

    num_bytes: int = 0
    all: int = 0
    disordered: int = 0
    round_trip_s: float = 0.0
    """The least that was seen; 0 where nobody knows."""


class SharingStream(Protocol):
    """One of those that share the downlink."""

    @property
    def came(self) -> Came: ...

    def limit(self, window_bytes: float) -> None:
        """So much may be under way to here, or wait to be read; infinite: as much as the system likes."""


@dataclass
class _Seen:
    """Of a stream."""

    began: Came
    """At the window's beginning."""
    came: Came
    """When last looked."""
    last_at: float = -math.inf
    """When something was seen to have come."""


class Downlink:
    """All that this process receives by sealed sockets. For the one event loop that uses them."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[SharingStream, _Seen] = WeakKeyDictionary()
        """Of all that are open."""
        self.together = math.inf
        """Bytes that may be under way, of all; infinite unless the line is narrow."""
        self._began_at = 0.0
        """This window."""
        self._rates: deque[float] = deque(maxlen=KNOWN_WINDOWS)
        self._num_in_vain = self._rests = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def opened(self, stream: SharingStream) -> None:
        came = stream.came
        self._seen[stream] = _Seen(came, came)
        if math.isfinite(self.together):
            stream.limit(IDLE_WINDOW)

    def left(self, stream: SharingStream) -> None:
        """It is closed."""
        self._seen.pop(stream, None)

    def received(self) -> None:
        """Something, by one of them; a long record comes for a while before anybody reads it."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._began_at = loop, loop.time()
        for seen in self._seen.values():
            seen.began = seen.came
        self._look(loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """A window in which the last connection fell silent tells nothing of the line."""
        now = loop.time()
        for stream, seen in self._seen.items():
            came = stream.came
            if came.num_bytes > seen.came.num_bytes:
                seen.last_at = now
            seen.came = came
        if now - self._began_at >= WINDOW_S:
            self._measure(now)
        active = {stream for stream, seen in self._seen.items() if now - seen.last_at <= ACTIVE_S}
        self._share(active)
        if active:
            loop.call_later(LOOK_S, self._look, loop)
        else:
            self._loop = None

    def _measure(self, now: float) -> None:
        """At a window's end."""
        moved = num_came = num_disordered = 0
        held_s = QUEUE_S
        for seen in self._seen.values():
            num_new = seen.came.all - seen.began.all
            if num_new > 0:
                num_came += num_new
                moved += seen.came.num_bytes - seen.began.num_bytes
                is_disordered = seen.came.disordered - seen.began.disordered > MOST_DISORDERED * num_new
                num_disordered += num_new if is_disordered else 0
                held_s = max(held_s, QUEUE_S + seen.came.round_trip_s)
            seen.began = seen.came
        rate = moved / (now - self._began_at)
        self._began_at = now
        self._rates.append(rate)
        most = max(self._rates)
        is_full = rate >= FULL * most
        is_lossy = num_disordered > SHARE_DISORDERED * num_came
        self._num_in_vain = self._num_in_vain + 1 if is_lossy and math.isfinite(self.together) else 0
        self._rests = RESTS if self._num_in_vain >= IN_VAIN else max(0, self._rests - 1)
        if self._rests:
            self.together = math.inf
        elif is_lossy and is_full and most < NARROW_BYTES_PER_S:
            least = max(LEAST_TOGETHER, LEAST_OF_IT * most * held_s)
            self.together = max(least, min(NARROWED * self.together, rate * held_s))
        else:
            self.together *= WIDENED if is_full else OPENED
        if self.together >= NARROW_BYTES_PER_S * held_s:
            self.together = math.inf

    def _share(self, active: Collection[SharingStream]) -> None:
        window, idle = math.inf, math.inf
        if math.isfinite(self.together):
            steps = int(self.together) // (WINDOW_STEP * max(1, len(active)))
            window, idle = max(LEAST_WINDOW, steps * WINDOW_STEP), IDLE_WINDOW
        for stream in list(self._seen):
            stream.limit(window if stream in active else idle)


DOWNLINK = Downlink()


def set_window(connection: socket.socket, window_bytes: float) -> None:
    """The most that it says it can take from now on; what it has said already still comes. Infinite: as the system
    likes. Where the system knows no such thing, nothing happens."""
    is_limited = math.isfinite(window_bytes)
    with contextlib.suppress(OSError, AttributeError):
        if is_limited:  # or the system would have the window grow again
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
        clamp = int(window_bytes) if is_limited else NO_WINDOW
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, clamp)
        if not is_limited:
            connection.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)


def came_of(connection: socket.socket) -> Came:
    """By a TCP connection; nothing where the system does not say."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_bytes, microseconds, num_segments, num_disordered = _TCP_INFO.unpack(info)
        round_trip_s = microseconds / 1e6 if microseconds < 1 << 31 else 0.0  # all bits are set where there is none
        return Came(num_bytes, num_segments, num_disordered, round_trip_s)
    return Came()
