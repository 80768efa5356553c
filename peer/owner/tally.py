"""A volunteer's work, counted for it to see: what the stage's certificates say, not what it claims.

A microbatch in a certified roster was signed for by this peer's neighbours: their headers are what it names.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

from peer.stage.events import Applied
from swarm.core.ids import PeerId

RATE_STEPS = 32
"""Steps over which tokens a second are told."""


class WorkTally:
    """Certified work of one stage's members, since this daemon was started."""

    def __init__(self, me: PeerId, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._tokens = Counter[PeerId]()
        self._last_at: float | None = None
        self.microbatches = 0
        self.last_step = 0
        self.last_step_tokens = 0
        self.last_step_all_tokens = 0

    def applied(self, applied: Applied) -> None:
        """A round has ended with a certificate."""
        now = self._clock()
        roster = applied.result.roster
        by_peer = {item.peer_id: item.num_tokens for item in roster.contributions}
        self._tokens.update(by_peer)
        for gone in set(self._tokens) - set(applied.chain.members) - {self._me}:
            del self._tokens[gone]
        own = by_peer.get(self._me, 0)
        self.microbatches += sum(len(item.work) for item in roster.contributions if item.peer_id == self._me)
        self.last_step, self.last_step_tokens = int(roster.step), own
        self.last_step_all_tokens = sum(by_peer.values())
        self._recent.append((now, own))
        if own:
            self._last_at = now

    @property
    def tokens(self) -> int:
        return self._tokens[self._me]

    @property
    def since_last_s(self) -> float:
        """Seconds since the last step that took work of this peer; negative if there was none."""
        return -1.0 if self._last_at is None else self._clock() - self._last_at

    @property
    def tokens_per_s(self) -> float:
        """Over the last steps, up to now."""
        if len(self._recent) < 2:
            return 0.0
        began = self._recent[0][0]
        elapsed_s = self._clock() - began
        return sum(tokens for _, tokens in list(self._recent)[1:]) / elapsed_s if elapsed_s > 0 else 0.0

    def rank(self) -> tuple[int, int]:
        """(this peer's place by certified tokens, how many have any); place 0 if it has none."""
        own = self.tokens
        ranked = sum(1 for tokens in self._tokens.values() if tokens)
        return (1 + sum(1 for tokens in self._tokens.values() if tokens > own) if own else 0), ranked
