"""This is where a microbatch's next peer is chosen: the one expected to finish it soonest."""

import random
from dataclasses import dataclass, field

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, StageIndex

SMOOTHING = 0.2
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 8.0


class NoPeerAvailable(TransientError):
    """No peer of the stage may be sent work now; `retry_at` says when one may (None: none is known)."""

    def __init__(self, message: str, retry_at: float | None) -> None:
        super().__init__(message)
        self.retry_at = retry_at


@dataclass(frozen=True)
class Route:
    """Where a microbatch goes and why."""

    peer_id: PeerId
    reason: str


@dataclass
class _Link:
    service_s: float | None = None  # smoothed seconds a microbatch, at the load it had; None until measured
    in_flight: int = 0
    failures: int = 0
    shunned_until: float = 0.0


@dataclass
class EarliestFinishWiring:
    """Routes to the live peer of one stage expected to finish soonest; ties are broken by `rng`.

    Durations are measured here, never taken from the peer, so a slow or boastful peer loses traffic. A
    peer that fails is shunned at once and probed again after a growing wait.
    """

    stage: StageIndex
    rng: random.Random
    _links: dict[PeerId, _Link] = field(default_factory=dict)

    def update(self, peers: set[PeerId]) -> None:
        """The stage's live peers are these; measurements of those that stay are kept."""
        for gone in sorted(set(self._links) - peers):
            if self._links[gone].in_flight == 0:
                del self._links[gone]
            else:
                self._links[gone].shunned_until = float("inf")
        for peer in sorted(peers):
            link = self._links.setdefault(peer, _Link())
            if link.shunned_until == float("inf"):
                link.shunned_until = 0.0

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._links))

    def choose(self, *, now: float) -> Route:
        """Take a place at a peer. Each choice must be answered by `finished`, `failed` or `refused`."""
        open_links = {peer: link for peer, link in sorted(self._links.items()) if link.shunned_until <= now}
        if not open_links:
            waits = [link.shunned_until for link in self._links.values() if link.shunned_until < float("inf")]
            raise NoPeerAvailable(
                f"stage {self.stage} has no live peer ({len(self._links)} known); "
                f"start one with `swarm join --stage {self.stage}`",
                min(waits, default=None),
            )
        known = [link.service_s for link in open_links.values() if link.service_s is not None]
        optimistic = min(known, default=1.0)  # an unmeasured peer is tried as if it were the best
        finish_s = {
            peer: (link.in_flight + 1) * (link.service_s if link.service_s is not None else optimistic)
            for peer, link in open_links.items()
        }
        soonest = min(finish_s.values())
        peer_id = self.rng.choice([peer for peer, seconds in finish_s.items() if seconds == soonest])
        self._links[peer_id].in_flight += 1
        return Route(peer_id, f"soonest of {len(finish_s)} in stage {self.stage}: {soonest:.3f} s")

    def finished(self, peer_id: PeerId, duration_s: float) -> None:
        """The peer answered `duration_s` after it was chosen."""
        link = self._leave(peer_id)
        if link is None:
            return
        each_s = duration_s / (link.in_flight + 1)  # the call shared the peer with those still in flight
        link.service_s = each_s if link.service_s is None else (1 - SMOOTHING) * link.service_s + SMOOTHING * each_s
        link.failures = 0

    def failed(self, peer_id: PeerId, *, now: float) -> None:
        """The peer broke off, was late, or sent something wrong: no work for a while, twice as long each time."""
        link = self._leave(peer_id)
        if link is not None:
            link.failures += 1
            link.shunned_until = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0**link.failures)

    def refused(self, peer_id: PeerId, *, now: float) -> None:
        """The peer said BUSY: it is well, and tried again soon."""
        link = self._leave(peer_id)
        if link is not None:
            link.shunned_until = max(link.shunned_until, now + 0.05)

    def cancelled(self, peer_id: PeerId) -> None:
        """The caller gave up for reasons of its own."""
        self._leave(peer_id)

    def _leave(self, peer_id: PeerId) -> _Link | None:
        link = self._links.get(peer_id)
        if link is not None:
            link.in_flight -= 1
            assert link.in_flight >= 0
        return link
