"""How fast each connection sends, where several share a slow uplink.

TCP learns how fast a line is from what it loses there, each connection by itself. A round's messages are so short that
bbr stays at its beginning, in which it sends nearly three times as fast as anything ever came through: two connections
on 1 Mbit/s lost 2 % of their packets to a queue of seventeen, and four lost 10 to 30 % and stood still for what was
lost again. What all of them together brought through in a few seconds is no secret, though. So each that has something
to send has its share of a little more than the most of that (SO_MAX_PACING_RATE, socket(7) of Linux); of the more the
less, the more is lost all the same.

What is sent for less than an equal share has that, and the others have the rest (`Uplink.holding`). It tells nothing
of lines.

A connection that brings less than half of what others do, though these use their whole shares or the line carries less
than it did, goes to who has a slower one; so does, or this line has become slower, what loses packets where the line
carries less. It has a little more than what it takes, and the others have the rest. Nothing else tells of a slow one:
short messages never send quite as fast as they may, and all that share a full line send less.
"""

import asyncio
import contextlib
import math
import socket
import statistics
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

_SO_MAX_PACING_RATE = 47
"""Linux; Python has no name for it."""
_TCP_INFO = struct.Struct("=24xI72xI16xQ16xI8xI")
"""Of Linux's `struct tcp_info`: segments under way, segments sent again, bytes acknowledged, bytes that were not sent
yet, all segments with data."""
LOOK_S = 0.05
WINDOW_S = 3.0
"""While something goes; in which the queue's 0.2 s, whose packets may have been sent before, are little."""
LEAST_PACE, MOST_PACE = 0.9, 1.5
"""Of the most that came through. While one message's answer is awaited others go, which have grown used to less; and
what is faster now shows within seconds."""
SLOWER, FASTER = 0.9, 1.05
"""By a window in which more than `MOST_LOST` of all segments were sent again, and by any other."""
MOST_LOST, MANY_SEGMENTS = 0.02, 50
"""Of a single connection, as many are waited for: of twenty, one is lost by chance."""
CHANCE = 2.0
"""Standard deviations: of fifty packets two are lost by chance in every fourth window of a line that loses one of a
hundred, as one does that is full, and one of three was held at a tenth of its share for that."""
TRIES_AFTER, TRIED_PACE = 10, 1.1
"""After so many windows of the least pace: what is lost all the same is not lost by it."""
FULL, NEARLY_FULL, MORE_THAN_EVER, NEAR, KNOWN_S = 0.5, 0.9, 1.02, 0.9, 0.5
"""Shares of what the line carried at most (all wait for answers, or for a processor, now and then; it is filled between
the second and the third, as before), and of what a connection may send, if it had so long more to send."""
BEHIND = 0.5
"""Of what others bring that use their whole shares, or else of what all others do: who brings less is slow."""
MORE_THAN_TAKEN, LEAST_SHARE, BACK = 1.25, 1 / 16, 2.0
"""May who takes less than its share and loses packets, and a sixteenth of that at least; if it takes all of it, so many
times as much: it may have hung."""
LEAST_WITHOUT_LOSS = 1 / 2
"""Of an equal share, may who takes less and loses nothing, beside what others have of it: short messages, whose
acknowledgements wait behind what their peer sends, seem slow for a moment, and would be by what they may send then. On
a line of 118 KB/s two connections were held at 12 and 19, of which TCP knew the first for one of 38."""
NARROW, MORE_AGAIN = 1 / 4, 0.1
"""Who takes less than so much of what others do, and loses packets, has a line that carries no more: it may send what
it takes, and a tenth more after a window without losses, two tenths after the next, then four, up to `BACK`. Sent
`MORE_THAN_TAKEN` all the time it would lose a fifth of that for good."""
OTHERS_LOSSES = 3.0
"""A connection loses too much by itself that loses so many times as much of what it sends as the others do: a full
uplink drops packets of all of them alike."""
JUDGED_AFTER, FEW_SEGMENTS = 3, 10
"""Windows with so many, or after `MANY_SEGMENTS`: on one held at 4 KB/s these are 17 s."""
MANY_WINDOWS = 8
"""After which there is nothing more to double."""
KEPT_WINDOWS = 300
"""Of which the most counts: those of a quarter of an hour in which all the time something went."""
LATELY_S = 60.0
SLOW_BYTES_PER_S = 1e6
"""A faster line has so many lanes that each message takes many round trips, by which bbr knows its share."""
UNSENT_S, LEAST_UNSENT_BYTES = 0.3, 16 << 10
"""So much a paced connection's kernel holds besides what is on its way."""
LEAST_BYTES = 4 * 1448
"""What TCP sends in one go anyway counts for nothing."""


class Tcp(NamedTuple):
    """Of a connection, since its beginning: data segments sent again, and all; bytes that have come through. And now:
    segments that are under way, bytes that have not been sent yet."""

    again: int = 0
    all: int = 0
    acknowledged_bytes: int = 0
    under_way: int = 0
    unsent_bytes: int = 0

    @property
    def is_sending(self) -> bool:
        return bool(self.under_way or self.unsent_bytes)


class PacedStream(Protocol):
    """One of those that share the uplink."""

    @property
    def tcp(self) -> Tcp: ...

    def pace(self, bytes_per_s: float) -> None: ...


@dataclass
class _Seen:
    """Of a stream, when last looked; and of this window."""

    tcp: Tcp
    pace: float = math.inf
    again_before: int = 0
    all_before: int = 0
    """Segments of windows before, since it was judged by what was lost of them."""
    windows_before: int = 0
    """That were so."""
    again: int = 0
    all: int = 0
    more_s: float = 0.0
    """While it had more to send: what it waits for is no answer, and no message of its own."""
    moved: int = 0
    allowed: float = 0.0
    was_held: bool = False
    """For a part of the window: what it brought tells nothing of its line."""
    silent_s: float = 0.0
    """Since it began to send; negative infinity once something of that was acknowledged: its way takes as long."""

    def looked(self, tcp: Tcp, after_s: float) -> int:
        """Bytes that have come through since."""
        moved = max(0, tcp.acknowledged_bytes - self.tcp.acknowledged_bytes)
        is_heard = not 0.0 <= self.silent_s <= KNOWN_S
        self.silent_s = -math.inf if moved else self.silent_s + after_s
        if self.tcp.unsent_bytes and tcp.unsent_bytes and is_heard:
            self.more_s += after_s
            self.moved += moved
            self.allowed += self.pace * after_s
        self.again += max(0, tcp.again - self.tcp.again)
        self.all += max(0, tcp.all - self.tcp.all)
        self.tcp = tcp
        return moved

    def of_next_window(self) -> "_Seen":
        before = (0, 0, 0)
        if not self.is_judged:
            before = (self.again_before + self.again, self.all_before + self.all, self.windows_before + bool(self.all))
        return _Seen(self.tcp, self.pace, *before, silent_s=self.silent_s)

    @property
    def is_known(self) -> bool:
        return self.more_s >= KNOWN_S

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.moved / self.more_s

    @property
    def is_near(self) -> bool:
        """It sends as fast as it may."""
        return self.is_known and self.moved >= NEAR * self.allowed

    @property
    def is_lossy(self) -> bool:
        return self.loses_more_than(MOST_LOST)

    def loses_more_than(self, share: float) -> bool:
        """And not by chance."""
        usual = share * (self.all_before + self.all)
        return self.is_judged and self.again_before + self.again > usual + CHANCE * math.sqrt(usual)

    @property
    def loses(self) -> bool:
        """It may be lossy."""
        return self.again_before + self.again > MOST_LOST * (self.all_before + self.all)

    @property
    def is_judged(self) -> bool:
        """So much was sent that what was lost of it is not chance, or it was sent for so long."""
        num = self.all_before + self.all
        return num >= MANY_SEGMENTS or (num >= FEW_SEGMENTS and self.windows_before + 1 >= JUDGED_AFTER)


class Uplink:
    """All that this process sends by sealed sockets. For the one event loop that uses them."""

    def __init__(self) -> None:
        self._sending: set[PacedStream] = set()
        """Who has something to send."""
        self._seen: WeakKeyDictionary[PacedStream, _Seen] = WeakKeyDictionary()
        """Who has it, or had: what is lost of few packets at a time, with rests between, is counted together."""
        self._takes: WeakKeyDictionary[PacedStream, float] = WeakKeyDictionary()
        """Bytes a second of who takes less than its share."""
        self._lossy: WeakSet[PacedStream] = WeakSet()
        """Who lost packets when it was last known, or has a narrow line."""
        self._held: WeakKeyDictionary[PacedStream, Callable[[], float]] = WeakKeyDictionary()
        """What those may send that are to have less, in bytes a second."""
        self._since_lost: WeakKeyDictionary[PacedStream, int] = WeakKeyDictionary()
        """Windows without losses, of who has a narrow line; below zero, those with losses, one after the other."""
        self._busy_s, self._moved = 0.0, 0
        """Of this window."""
        self._pace = MOST_PACE
        self._at_least = 0
        """Windows of the least pace, one after the other."""
        self._windows: deque[tuple[float, float]] = deque(maxlen=KEPT_WINDOWS)
        """When each ended, and the bytes a second that came through."""
        self.bytes_per_s: float | None = None
        """The most of them; None while that is not known."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked_at = 0.0

    def sends(self, stream: PacedStream) -> None:
        """Some of a long record, now."""
        if stream in self._sending:
            return
        self._sending.add(stream)
        tcp = stream.tcp
        seen = self._seen.setdefault(stream, _Seen(tcp))
        seen.tcp, seen.silent_s = tcp, 0.0
        self._share()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._looked_at = loop, loop.time()
            loop.call_later(LOOK_S, self._look)

    @contextlib.contextmanager
    def holding(self, stream: PacedStream, most: Callable[[], float]) -> Iterator[None]:
        """While what is sent is to have no more than so many bytes a second, where the uplink is slow."""
        self._held[stream] = most
        if stream in self._sending:
            self._share()
        try:
            yield
        finally:
            del self._held[stream]

    def left(self, stream: PacedStream) -> None:
        """It is closed."""
        self._seen.pop(stream, None)
        if stream in self._sending:
            self._sending.remove(stream)
            self._share()

    def _look(self) -> None:
        """The last one, when all has gone, tells nothing: a message takes no time on a fast line."""
        if self._loop is None:
            return
        num_before, now, moved = len(self._sending), self._loop.time(), 0
        after_s, self._looked_at = now - self._looked_at, now
        for stream in list(self._sending):
            seen = self._seen[stream]
            moved += seen.looked(stream.tcp, after_s)
            if not seen.tcp.is_sending:
                self._sending.remove(stream)
                stream.pace(self.budget)
        if not self._sending:
            self._loop = None
            return
        self._loop.call_later(LOOK_S, self._look)
        self._busy_s += after_s
        self._moved += moved
        is_over = self._busy_s >= WINDOW_S
        if is_over:
            self._measure()
        if is_over or len(self._sending) != num_before:
            self._share()

    def _measure(self) -> None:
        """At a window's end."""
        rate, before = self._moved / self._busy_s, self.bytes_per_s or 0.0
        self._windows.append((self._looked_at, rate))
        self.bytes_per_s = max(rate for _, rate in self._windows)
        is_full = rate >= FULL * self.bytes_per_s
        near = {stream: seen for stream, seen in self._seen.items() if seen.is_near and not seen.was_held}
        self._judge(near or self._seen, is_full=is_full)
        is_filled = NEARLY_FULL * before <= rate <= MORE_THAN_EVER * before
        self._tell_the_slow(near, is_full=is_full, is_filled=is_filled)
        equal = self._equal
        for stream in [stream for stream, takes in self._takes.items() if takes >= equal]:
            del self._takes[stream]
            self._since_lost.pop(stream, None)
        self._seen = WeakKeyDictionary({stream: seen.of_next_window() for stream, seen in self._seen.items()})
        self._busy_s, self._moved = 0.0, 0

    def _judge(self, of: Mapping[PacedStream, _Seen], *, is_full: bool) -> None:
        """Whether too much is lost: of who sends as fast as it may, if anybody does. Others' lines may lose as well."""
        again = sum(seen.again for seen in of.values())
        is_lossy = is_full and again > MOST_LOST * sum(seen.all for seen in of.values())
        self._pace = min(MOST_PACE, max(LEAST_PACE, self._pace * (SLOWER if is_lossy else FASTER)))
        self._at_least = self._at_least + 1 if self._pace == LEAST_PACE else 0
        if self._at_least > TRIES_AFTER:
            self._pace, self._at_least = TRIED_PACE, 0

    def _tell_the_slow(self, near: Collection[PacedStream], *, is_full: bool, is_filled: bool) -> None:
        """Who takes less than its share. Nobody can tell where this line is full, as it is if it `is_filled` as much as
        before; it is not where others have their whole shares and use them, and it carries less, or more than ever."""
        known = {stream: seen for stream, seen in self._seen.items() if seen.is_known and not seen.was_held}
        whole = [known[stream] for stream in near if stream not in self._takes]
        has_room = (bool(whole) and not is_filled) or not is_full
        for stream, seen in known.items():
            rates = [other.rate for other in whole or known.values() if other is not seen]
            usual = sum(rates) / len(rates) if rates else 0.0
            loses_alone = seen.is_lossy and bool(whole) and not any(other.loses for other in whole)
            may_be_slow = stream in self._takes or seen.moved < BEHIND * seen.allowed
            is_slow = seen.rate < BEHIND * usual and may_be_slow and (has_room or loses_alone)
            takes_less = stream not in near and (is_slow or (seen.is_lossy and not is_full))
            if stream in self._since_lost and not seen.is_judged:
                continue
            if seen.is_lossy:
                self._lossy.add(stream)
            elif stream not in self._since_lost:
                self._lossy.discard(stream)
            is_narrow = seen.rate < NARROW * usual
            if not is_narrow or self._since_lost.get(stream, 0) < -TRIES_AFTER:  # sending less does not help
                self._since_lost.pop(stream, None)
            by_itself = stream in self._since_lost or seen.loses_more_than(_lost_beside(seen, whole))
            if is_narrow and seen.is_lossy and by_itself and (takes_less or stream in self._since_lost):
                self._takes[stream] = seen.rate
                self._since_lost[stream] = min(0, self._since_lost.get(stream, 0)) - 1
            elif takes_less:
                self._takes[stream] = MORE_THAN_TAKEN * seen.rate
            elif stream in self._takes and (stream in near or not (is_slow or seen.is_lossy)):
                is_alone = len(known) == 1 and not seen.is_lossy
                more = self._back(stream) * (seen.pace if is_alone else seen.rate)
                self._takes[stream] = max(self._takes[stream], more)

    def _back(self, stream: PacedStream) -> float:
        """So many times what it takes it may send now."""
        windows = self._since_lost.get(stream)
        if windows is None:
            return BACK
        self._since_lost[stream] = windows = max(0, windows) + 1
        return min(BACK, 1 + MORE_AGAIN * 2.0 ** min(windows - 1, MANY_WINDOWS))

    @property
    def budget(self) -> float:
        """Bytes a second that all together may send; infinite where nobody knows, or it matters to nobody."""
        return self._pace * self.carries_at_most

    @property
    def carries_at_most(self) -> float:
        """Bytes a second, as far as is known; infinite as above."""
        most = self.bytes_per_s
        return most if most and most < SLOW_BYTES_PER_S else math.inf

    @property
    def lately(self) -> float:
        """Bytes a second, the median of the last minute's windows: what goes to somebody in the same house now and then
        counts for little. 0 where nobody knows, or it matters to nobody."""
        since = asyncio.get_running_loop().time() - LATELY_S
        rates = [rate for _, rate in takewhile(lambda window: window[0] > since, reversed(self._windows))]
        usual = statistics.median(rates) if rates else 0.0
        return usual if usual < SLOW_BYTES_PER_S else 0.0

    def _held_now(self) -> dict[PacedStream, float]:
        """What those may send that have something to send, and are to have less than an equal share."""
        equal = self.budget / max(1, len(self._sending))
        if math.isinf(equal):
            return {}
        held = {stream: self._held[stream]() for stream in self._sending if stream in self._held}
        return {stream: most for stream, most in held.items() if most < equal}

    @property
    def _equal(self) -> float:
        """Bytes a second of each that is not held, if all those have the same."""
        held = self._held_now()
        return (self.budget - sum(held.values())) / max(1, len(self._sending) - len(held))

    def _share(self) -> None:
        held = self._held_now()
        budget, free = self.budget - sum(held.values()), self._sending - held.keys()
        equal = budget / max(1, len(free))
        less = {stream: takes for stream in free if (takes := self._takes.get(stream, equal)) < equal}
        less = {stream: max(LEAST_SHARE * equal, takes) for stream, takes in less.items()}
        others = len(free) - len(less)
        share = (budget - sum(less.values())) / others if others else 0.0
        for stream in self._sending:
            least = 0.0 if stream in self._lossy else LEAST_WITHOUT_LOSS * equal
            pace = max(least, less.get(stream, share)) if math.isfinite(budget) else math.inf
            pace = held.get(stream, pace)
            seen = self._seen[stream]
            seen.pace, seen.was_held = pace, seen.was_held or stream in held
            stream.pace(pace)


def _lost_beside(seen: _Seen, whole: Collection[_Seen]) -> float:
    """The share that one loses at most whose losses are of the line that it shares with these."""
    others = [other for other in whole if other is not seen]
    return OTHERS_LOSSES * sum(other.again for other in others) / max(MANY_SEGMENTS, sum(other.all for other in others))


UPLINK = Uplink()


def set_pace(connection: socket.socket, bytes_per_s: float) -> None:
    """As fast as that, and no faster, and little of it in the kernel's hands before it can go: so it is known when a
    message has gone. Infinite: as it likes. Where the system knows no such thing, nothing happens."""
    is_paced = math.isfinite(bytes_per_s)
    rate = max(1, int(bytes_per_s)) if is_paced else (1 << 32) - 1
    unsent = max(LEAST_UNSENT_BYTES, int(UNSENT_S * bytes_per_s)) if is_paced else 0
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate.to_bytes(4, "little"))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)


def tcp_of(connection: socket.socket) -> Tcp:
    """Of a TCP connection; nothing where the system does not say."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        under_way, again, acknowledged_bytes, unsent_bytes, all_segments = _TCP_INFO.unpack(info)
        return Tcp(again, all_segments, acknowledged_bytes, under_way, unsent_bytes)
    return Tcp()
