"""This is where a peer finds out how long a microbatch would wait at it, which it says to whoever asks."""

from dataclasses import dataclass


@dataclass
class Room:
    """The room of one peer, which computes one thing at a time.

    What waits is not all: of each microbatch that went forward the backward comes back, most of its work, and later by
    the trip through all stages that follow. A newcomer that took all it could send on would be swamped one trip later.
    So a peer takes microbatches at the pace at which it can do them whole.
    """

    _paced_until: float = 0.0

    def taken(self, visit_s: float, *, now: float) -> None:
        """A microbatch has come, whose forward and backward together take `visit_s` here."""
        self._paced_until = max(now, self._paced_until) + visit_s

    def waits_s(self, backlog_s: float, *, now: float) -> float:
        """How long another would wait, where what is here takes `backlog_s`."""
        return max(0.0, backlog_s, self._paced_until - now)
