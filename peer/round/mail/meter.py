"""How fast a line is, while messages go over it."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from peer.round.mail.lanes import ANOTHER_LINE, Lanes
from swarm.core.transfers import lanes_of

SMOOTHING = 0.5
"""Share of the newest rate in the average."""
MIN_MEASURED_BYTES = 1 << 20
"""Less than this, sent in one go in less than `LOOK_AFTER_S`, measures nothing but delays."""
LOOK_AFTER_S = 1.0
"""A line that is busy for longer is measured while it is."""
MOMENT_S = 0.1
"""Between two messages of a line that is busy: one lane, whose next message goes to somebody else, is never so for
long, and an uplink that was slow for a moment would have that one for good."""
FULL = 0.9
"""Of what a line was held for: one that carried so much, though others were kept from it, may be measured by it."""
UNKNOWN_BYTES_PER_S = 125_000.0
"""Of a line by which nothing was fetched yet."""


@dataclass
class Meter:
    """How much goes at a time, and how fast."""

    bytes_per_s: float | None = None
    busy: int = 0
    """Messages under way."""
    is_known: bool = False
    """Measured since it is busy."""
    moved: Callable[[], int] | None = None
    """All bytes that the line has carried, of whatever is sent over it: it is as fast as all of it, and not as what is
    measured here alone, which would make room for the rest and be measured again as less. None: nothing else goes."""
    lanes: Lanes | None = None
    """Tried on it."""
    is_kept_from: bool = False
    """Others were, since it is busy or was measured: it carried less than it could. To be set by who keeps them. They
    may have a share of what it is held for, and would have less each time, for it carried less by that."""
    most: Callable[[], float] | None = None
    """Bytes a second that it carries at most, whatever `moved` counts: what another program takes to carry it may wait
    there for long."""
    _moved_before: int = 0
    _last_rate: float = 0.0
    _busy_since: float = 0.0
    _ended_at: float = -math.inf
    """When its last message did."""
    _sent_bytes: int = 0
    """Since it is busy, or was measured."""

    def begin(self, now: float) -> None:
        """One message more."""
        if not self.busy:
            self.is_known = False
            if now > self._ended_at + MOMENT_S:
                self.begin_anew(now)
        self.busy += 1

    def gone(self, num_bytes: int, now: float) -> None:
        """Something has gone: a slow line is known long before it is idle, and a fast one soon is."""
        if self.moved is not None:
            moved = self.moved()
            self._moved_before, num_bytes = moved, max(0, moved - self._moved_before)
        self._sent_bytes += num_bytes
        if self.lanes is not None and self.lanes.runs_in(now):
            self._begin_window(now)
        is_time = now >= self._busy_since + LOOK_AFTER_S or self._sent_bytes >= 4 * MIN_MEASURED_BYTES
        if is_time and (self.lanes is None or self.lanes.is_decided(now)):
            self._measure(now)
            self._begin_window(now)

    def end(self, now: float) -> None:
        """One message less."""
        self.busy -= 1
        if not self.busy:
            self._ended_at = now
            self._measure(now)

    def hangs(self, now: float) -> None:
        """One message less that nothing was heard of: the time that it took tells nothing of the line."""
        self.busy -= 1
        self.begin_anew(now)

    def begin_anew(self, now: float) -> None:
        """Nothing of before counts."""
        self._begin_window(now)
        if self.lanes is not None:
            self.lanes.forget(now)
        self._moved_before = self.moved() if self.moved is not None else 0

    def _begin_window(self, now: float) -> None:
        self._busy_since, self._sent_bytes, self.is_kept_from = now, 0, False

    def _measure(self, now: float) -> None:
        """It has nothing to send any more, or has sent for long. What tells too little is counted with what comes."""
        is_long = now >= self._busy_since + LOOK_AFTER_S
        is_enough = self._sent_bytes >= MIN_MEASURED_BYTES or (is_long and self._sent_bytes > 0)
        if is_enough and now > self._busy_since:
            rate = self._sent_bytes / (now - self._busy_since)
            if self.is_kept_from and rate < FULL * (self.bytes_per_s or 0.0):
                self.begin_anew(now)
                return
            shown = None
            if self.lanes is not None and self.lanes.is_decided(now):
                shown = self.lanes.measured(rate, self.bytes_per_s, self.busy, now)
            before = rate if self.bytes_per_s is None else self.bytes_per_s
            # Of seconds a byte: a line that has become slow is known at once, one that is fast again soon enough.
            self.bytes_per_s = 1 / (SMOOTHING / rate + (1 - SMOOTHING) / before)
            twice, self._last_rate = min(rate, self._last_rate), rate
            if twice > ANOTHER_LINE * before:  # it was dead, or stood behind something else; once may be chance
                self.bytes_per_s = twice
            if shown is not None:
                self.bytes_per_s = max(shown, self.bytes_per_s)
            if self.most is not None:
                self.bytes_per_s = min(self.most(), self.bytes_per_s)
            self.is_known = True
            self._begin_window(now)


class Turns:
    """What one peer fetches at a time, of all others together: as much as its line carries side by side."""

    def __init__(self, *, most: int, moved: Callable[[], int] | None = None) -> None:
        """`moved`: as a `Meter` has it."""
        self._most = most
        self._meter = Meter(moved=moved)
        self._ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[int], None]]:
        """Gives what is to be told how many bytes have come."""
        while self._meter.busy >= lanes_of(self._meter.bytes_per_s or UNKNOWN_BYTES_PER_S, most=self._most):
            self._ended.clear()
            await self._ended.wait()
        self._meter.begin(time.monotonic())
        try:
            yield lambda num_bytes: self._meter.gone(num_bytes, time.monotonic())
        finally:
            self._meter.end(time.monotonic())
            self._ended.set()
