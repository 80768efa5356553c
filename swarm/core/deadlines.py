"""This is where waits learn how long to be: from what was measured, never past the configured limit."""

from collections import deque
from statistics import median


class AdaptiveDeadline:
    """`factor` times the median of recent durations, between a floor and a limit; the limit until measured."""

    def __init__(self, *, limit_s: float, floor_s: float, factor: float = 5.0, window: int = 32) -> None:
        assert 0 < floor_s <= limit_s
        self._limit_s = limit_s
        self._floor_s = floor_s
        self._factor = factor
        self._recent_s: deque[float] = deque(maxlen=window)

    def observe(self, duration_s: float) -> None:
        """A wait of this kind ended well after `duration_s`."""
        self._recent_s.append(duration_s)

    @property
    def seconds(self) -> float:
        if len(self._recent_s) < 3:
            return self._limit_s
        return min(self._limit_s, max(self._floor_s, self._factor * median(self._recent_s)))
