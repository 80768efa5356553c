"""How fast each connection sends, where several share a slow uplink.

TCP learns how fast a line is from what it loses there, each connection by itself. A round's messages are so short that
bbr stays at its beginning, in which it sends nearly three times as fast as anything ever came through: two connections
on 1 Mbit/s lost 2 % of their packets to a queue of seventeen, and four lost 10 to 30 % and stood still for what was
lost again. What all of them together brought through in a second or two is no secret, though. So each that has
something to send has its share of a little more than the most of that (SO_MAX_PACING_RATE, socket(7) of Linux); of the
more the less, the more is lost all the same.

Of the most, and not of what comes through now: who has its share sends no faster, and where one of two goes to a peer
whose own line is slower, all would become slower by that, and slower again. It is forgotten where packets are lost
though the pace is the least, and none comes near its share: the line itself has become slower.
"""

import asyncio
import contextlib
import math
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_SO_MAX_PACING_RATE = 47
"""Linux; Python has no name for it."""
_TCP_INFO = struct.Struct("100xI52xI")
"""Of Linux's `struct tcp_info`: segments sent again, and all with data."""
LOOK_S = 0.05
WINDOW_S = 2.0
"""In which the queue's 0.2 s, whose packets may have been sent before, are little."""
LEAST_PACE, MOST_PACE = 0.9, 1.5
"""Of the most that came through. While one message's answer is awaited others go, which have grown used to less; and
what is faster now shows within seconds."""
SLOWER, FASTER = 0.9, 1.03
"""By a window in which more than `MOST_LOST` of all segments were sent again, and by any other."""
MOST_LOST = 0.02
KEPT_WINDOWS = 450
"""Of which the most counts: those of a quarter of an hour in which all the time something went."""
KEPT_IF_SLOWER = 5
NEAR = 0.7
"""Of its share; of a connection that sends for `NEAR_LOOKS` of a window at least."""
NEAR_LOOKS = 10
SLOW_BYTES_PER_S = 1e6
"""A faster line has so many lanes that each message takes many round trips, by which bbr knows its share."""
UNSENT_S, LEAST_UNSENT_BYTES = 0.1, 8 << 10
"""So much a paced connection's kernel holds besides what is on its way."""
LEAST_BYTES = 4 * 1448
"""What TCP sends in one go anyway counts for nothing."""


class Segments(NamedTuple):
    """Of a connection, with data."""

    again: int = 0
    all: int = 0


class PacedStream(Protocol):
    """One of those that share the uplink."""

    @property
    def waiting_bytes(self) -> int:
        """Ciphertext that was taken to be sent, and that the other end does not have."""

    @property
    def segments(self) -> Segments:
        """That it has sent since its beginning."""

    def pace(self, bytes_per_s: float) -> None: ...


@dataclass
class _Seen:
    """Of a stream, when last looked."""

    waiting_bytes: int
    segments: Segments
    pace: float = math.inf
    moved: int = 0
    looks: int = 0
    """In this window, with this pace."""

    def looked(self, waiting_bytes: int, segments: Segments) -> tuple[int, Segments]:
        """What has come through since, and what was sent."""
        moved = max(0, self.waiting_bytes - waiting_bytes)
        again, all_sent = (max(0, now - before) for now, before in zip(segments, self.segments, strict=True))
        self.waiting_bytes, self.segments = waiting_bytes, segments
        self.moved += moved
        self.looks += 1
        return moved, Segments(again, all_sent)

    @property
    def is_near(self) -> bool:
        """Whether it sends as fast as it may; also where that is not known yet."""
        return self.looks < NEAR_LOOKS or self.moved >= NEAR * self.pace * self.looks * LOOK_S


class Uplink:
    """All that this process sends by sealed sockets. For the one event loop that uses them."""

    def __init__(self) -> None:
        self._sending: dict[PacedStream, _Seen] = {}
        """Who has something to send."""
        self._moved = 0
        self._segments = Segments()
        """Of this window."""
        self._pace = MOST_PACE
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
            self._sending[stream] = _Seen(0, stream.segments)
            self._share()
        self._sending[stream].waiting_bytes += num_bytes
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._window = loop, None
            loop.call_later(LOOK_S, self._look)

    def left(self, stream: PacedStream) -> None:
        """It is closed."""
        if self._sending.pop(stream, None) is not None:
            self._share()

    def _look(self) -> None:
        num_before = len(self._sending)
        for stream, seen in list(self._sending.items()):
            moved, sent = seen.looked(stream.waiting_bytes, stream.segments)
            self._moved += moved
            self._segments = Segments(self._segments.again + sent.again, self._segments.all + sent.all)
            if not seen.waiting_bytes:
                del self._sending[stream]
        if not self._sending:
            self._loop = self._window = None
            return
        assert self._loop is not None
        self._loop.call_later(LOOK_S, self._look)
        if self._measures(self._loop.time()) or len(self._sending) != num_before:
            self._share()

    def _measures(self, now: float) -> bool:
        """Whether a window has ended."""
        if self._window is None:
            self._window = (now, self._moved)
        began, moved = self._window
        if now < began + WINDOW_S:
            return False
        self._windows.append((self._moved - moved) / (now - began))
        is_lossy = self._segments.again > MOST_LOST * self._segments.all
        if is_lossy and self._pace == LEAST_PACE and not any(seen.is_near for seen in self._sending.values()):
            self._windows = deque(list(self._windows)[-KEPT_IF_SLOWER:], maxlen=KEPT_WINDOWS)
        self._pace = min(MOST_PACE, max(LEAST_PACE, self._pace * (SLOWER if is_lossy else FASTER)))
        self._segments = Segments()
        for seen in self._sending.values():
            seen.moved = seen.looks = 0
        self.bytes_per_s = max(self._windows)
        self._window = (now, self._moved)
        return True

    def _share(self) -> None:
        is_slow = self.bytes_per_s is not None and self.bytes_per_s < SLOW_BYTES_PER_S
        for stream, seen in self._sending.items():
            pace = self._pace * self.bytes_per_s / len(self._sending) if is_slow and self.bytes_per_s else math.inf
            if pace != seen.pace:
                seen.pace, seen.moved, seen.looks = pace, 0, 0
            stream.pace(pace)


UPLINK = Uplink()


def set_pace(connection: socket.socket, bytes_per_s: float) -> None:
    """As fast as that, and no faster, and little of it in the kernel's hands before it can go: so it is known when a
    message has gone. Infinite: as it likes. Where the system knows no such thing, nothing happens."""
    is_paced = math.isfinite(bytes_per_s)
    rate = int(bytes_per_s) if is_paced else (1 << 32) - 1
    unsent = max(LEAST_UNSENT_BYTES, int(UNSENT_S * bytes_per_s)) if is_paced else 0
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate.to_bytes(4, "little"))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)


def segments_of(connection: socket.socket) -> Segments:
    """Of a TCP connection; none where the system does not say."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        return Segments(*_TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)))
    return Segments()
