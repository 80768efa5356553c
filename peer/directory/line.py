"""The owner's line to the Internet, as far as it may be used: megabits a second each way, of all peers of a daemon."""

import asyncio
import time
from collections.abc import Callable

from swarm.core.plan import HEADERS

SMALL_BYTES = 4 << 10
"""A message whose body is no longer overtakes bulk: bulk waits as much longer."""
BURST_S = 1.0
"""What was not used may be used later, up to so many seconds' worth at once."""


class Meter:
    """Lets bytes through at a rate on average, in the order in which they are taken for, whoever takes."""

    def __init__(self, mbit: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`mbit` None: at any rate."""
        self._clock = clock
        self._free_at = clock()
        self.set_rate(mbit)

    def set_rate(self, mbit: float | None) -> None:
        """Keep to another rate from now on; what was taken for at the old one is through."""
        self._bytes_per_s = None if mbit is None else mbit * 125_000
        self._free_at = self._clock()

    def takes_s(self, line_bytes: float) -> float:
        """Seconds between such bytes, one after the other; 0 without a rate."""
        return 0.0 if self._bytes_per_s is None else line_bytes / self._bytes_per_s

    def book(self, line_bytes: float) -> float:
        """Seconds until so many bytes of the line may move; they count from now on."""
        if self._bytes_per_s is None:
            return 0.0
        now = self._clock()
        self._free_at = max(self._free_at, now - BURST_S) + line_bytes / self._bytes_per_s
        return self._free_at - now

    def give_back(self, line_bytes: float) -> None:
        """They were booked, and will not move."""
        self._free_at -= self.takes_s(line_bytes)


class Line:
    """A meter each way. Whoever moves bytes over it takes for them through a `Taker`."""

    def __init__(
        self, *, upload_mbit: float | None = None, download_mbit: float | None = None, num_peers: int = 1
    ) -> None:
        self.up, self.down = Meter(upload_mbit), Meter(download_mbit)
        self.num_peers = num_peers
        """That use it now, each as much as the others as far as it can."""

    def set_rates(self, *, upload_mbit: float | None, download_mbit: float | None) -> None:
        """Keep to other megabits a second from now on."""
        self.up.set_rate(upload_mbit)
        self.down.set_rate(download_mbit)


class Taker:
    """One transport's way through a meter.

    A body is taken for before it moves; what moved besides (headers, the unasked) is told by `moved`, the transport's
    own count, and made up for.
    """

    def __init__(self, meter: Meter, moved: Callable[[], int]) -> None:
        self._meter = meter
        self._moved = moved
        self._moved_before = moved()
        self._taken = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes of a message's body may move. A small one waits for none: it counts, no more."""
        wait_s = self.book(size_bytes)
        if size_bytes > SMALL_BYTES and wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:  # they will not move
                self._taken -= size_bytes * HEADERS
                self._meter.give_back(size_bytes * HEADERS)
                raise

    def takes_s(self, size_bytes: int) -> float:
        """Seconds between such bodies, one after the other."""
        return self._meter.takes_s(size_bytes * HEADERS)

    def book(self, size_bytes: int) -> float:
        """Seconds until these bytes may move; they count from now on."""
        on_line = size_bytes * HEADERS
        unforeseen = max(0.0, (self._moved() - self._moved_before) * HEADERS - self._taken)
        self._taken += unforeseen + on_line
        return self._meter.book(unforeseen + on_line)
