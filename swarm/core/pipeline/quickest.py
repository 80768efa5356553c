"""How long one thing takes at the least, where most of what is seen of it is waiting."""

from collections import deque
from dataclasses import dataclass, field

KEPT = 64
LEAST = 4
"""Before so many are seen nothing is said."""


@dataclass
class Quickest:
    """The quickest but one of the last that were seen: one alone may have been measured wrongly."""

    _seen_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def observe(self, seconds: float) -> None:
        self._seen_s.append(seconds)

    @property
    def seconds(self) -> float:
        """0: not known yet."""
        return sorted(self._seen_s)[1] if len(self._seen_s) >= LEAST else 0.0
