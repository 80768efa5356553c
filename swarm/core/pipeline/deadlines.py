"""How long waits are: from what was measured, never past the configured limit."""

from collections import deque
from statistics import median


class AdaptiveDeadline:
    """`factor` times the median of recent durations, between a floor and a limit; the limit until measured.

    A wait that is cut off is never measured, so each one doubles the deadline, and waits that end well bring it back
    slowly: otherwise peers that all became slower together would be cut off for ever.
    """

    def __init__(self, *, limit_s: float, floor_s: float, factor: float = 5.0, window: int = 32) -> None:
        assert 0 < floor_s <= limit_s
        self._limit_s = limit_s
        self._floor_s = floor_s
        self._factor = factor
        self._recent_s: deque[float] = deque(maxlen=window)
        self._stretch = 1.0

    def observe(self, duration_s: float) -> None:
        """A wait of this kind ended well after `duration_s`."""
        self._recent_s.append(duration_s)
        self._stretch = max(1.0, self._stretch * 0.95)

    def missed(self) -> None:
        """A wait of this kind was cut off at the deadline."""
        if self.seconds < self._limit_s:
            self._stretch *= 2

    @property
    def seconds(self) -> float:
        if len(self._recent_s) < 3:
            return self._limit_s
        return min(self._limit_s, self._stretch * max(self._floor_s, self._factor * median(self._recent_s)))
