"""How long a microbatch would wait at a peer, which it says to whoever asks."""

from dataclasses import dataclass


@dataclass
class Room:
    """The room of one peer, which computes one thing at a time and sends one after another.

    What waits is not all: of each microbatch that went forward the backward comes back, most of its work, and later by
    the trip through all stages that follow. A newcomer that took all it could send on would be swamped one trip later.
    So a peer takes microbatches at the pace at which it can do them whole, and its uplink can carry what comes of them.
    """

    _paced_until: float = 0.0

    def taken(self, visit_s: float, sends_s: float = 0.0, *, now: float) -> None:
        """A microbatch has come. Forward and backward together take `visit_s` here, what is sent on and back `sends_s`
        of the uplink."""
        self._paced_until = max(now, self._paced_until) + max(visit_s, sends_s)

    def waits_s(self, backlog_s: float, *, now: float) -> float:
        """How long another would wait, where what is here takes `backlog_s`."""
        return max(0.0, backlog_s, self._paced_until - now)
