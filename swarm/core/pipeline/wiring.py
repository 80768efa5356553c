"""A microbatch's next peer: the one expected to answer soonest."""

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, StageIndex

SMOOTHING = 0.2
LOAD_MEMORY = 0.75
"""Share of the load behind a measured duration that counts as included in it. The rest pulls towards equal loads,
so that peers that only differ by chance get equal work."""
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 8.0
BUSY_RETRY_S = 0.05
WASTED_S = 2.0
"""Who takes longer than this to say no, or to break off, has wasted the caller's time: more than a peer waits for its
own next version."""
RARELY = 16
"""Who wasted time is called after all others for so many times as long, and twice as long each time running."""
LONGEST_DOUBT_S = 3600.0
BELIEVED = 2.0
"""What a peer says of its queue counts as it says while its answers take no more than so many times the quickest
one's; all that they take longer is added."""
TOLD_FOR_S = 1.0
"""What a peer says of its queue holds for this long, and for one microbatch."""
ASKED = 24
"""Peers that are asked before a microbatch is sent: a few kB for one of 100 kB and more."""
ASK_FROM_S = 1.0
"""Answers that take less are not worth asking for."""
FORGET_AFTER = 20.0
"""A peer that got nothing for this many of its durations is tried again as if it had never been measured."""


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
    is_held: bool = False
    """The peer says that it has it already."""


@dataclass
class _Link:
    duration_s: float | None = None  # smoothed, from the choice to the answer; None until measured
    load: float = 0.0  # smoothed number in flight, itself included, when the measured ones were sent
    sent: deque[tuple[float, int]] = field(default_factory=deque)  # when, and at which load; oldest first
    last_sent_at: float = 0.0
    told_s: float = 0.0  # how long work would wait there, by its own word
    told_at: float | None = None
    holds: bytes = b""  # the microbatch that it was asked about, if that is there by its own word
    failures: int = 0
    shunned_until: float = 0.0
    wastes: int = 0  # one after the other
    doubted_until: float = 0.0
    is_listed: bool = True

    @property
    def in_flight(self) -> int:
        return len(self.sent)


@dataclass
class EarliestFinishWiring:
    """Routes to the live peer of one stage expected to answer soonest; ties are broken by `rng`.

    Durations are measured here, never taken from the peer, so a slow or boastful peer loses traffic. A
    peer that fails is shunned at once and probed again, by one microbatch, after a growing wait. If it held for long
    what it did not do, it is called after all others for many times as long: so it costs little of the caller's time,
    whether it is hostile or its own calls are refused.

    A duration is not divided by the load it was measured at: nobody can tell from few in flight whether a peer is
    slow or far away, so the division makes whoever has much look fast and gives it more. Expected is the smoothed
    duration, corrected by how much more is in flight now than was then. Of peers that queue, each is so filled to
    equal durations, that is in proportion to its speed.

    A duration is that of all stages that follow, and says little of one queue among them. Where microbatches take
    seconds, the caller asks some peers how long work would wait, and chooses among those that said so: the shortest
    queue. That word is the peer's own, and so it holds only while its answers are not much later than the others'.

    Who is asked follows from the microbatch, so that whoever takes a lost peer's place asks those that it had asked.
    The one that says to hold the microbatch already, from the lost one, goes before all others on the same terms.
    """

    stage: StageIndex
    rng: random.Random
    _links: dict[PeerId, _Link] = field(default_factory=dict)

    def update(self, peers: set[PeerId]) -> None:
        """The stage's live peers are these; measurements of those that stay are kept."""
        for gone in sorted(set(self._links) - peers):
            self._links[gone].is_listed = False
            if not self._links[gone].in_flight:
                del self._links[gone]
        for peer in sorted(peers):
            self._links.setdefault(peer, _Link()).is_listed = True

    def peers(self) -> tuple[PeerId, ...]:
        """The live peers, whether they may be sent work now or not."""
        return tuple(sorted(peer for peer, link in self._links.items() if link.is_listed))

    def choose(self, microbatch: bytes = b"", *, but_not: Collection[PeerId] = (), now: float) -> Route:
        """Take a place at a peer. Each choice must be answered by `finished`, `failed`, `refused` or `cancelled`.

        `microbatch` is the name that was asked about, if anybody was.
        """
        listed = {peer: link for peer, link in sorted(self._links.items()) if link.is_listed and peer not in but_not}
        open_links = {
            peer: link
            for peer, link in listed.items()
            if link.shunned_until <= now and not (link.failures and link.in_flight)
        }
        if not open_links:
            waits = [max(link.shunned_until, now + BUSY_RETRY_S) for link in listed.values()]
            raise NoPeerAvailable(
                f"stage {self.stage} has no live peer ({len(listed)} known); "
                f"start one with `swarm join --stage {self.stage}`",
                min(waits, default=None),
            )
        open_links = {peer: link for peer, link in open_links.items() if link.doubted_until <= now} or open_links
        each_s, best_s = self._common()
        told = {peer: link for peer, link in open_links.items() if link.told_at is not None}
        told = {peer: link for peer, link in told.items() if now <= (link.told_at or 0.0) + TOLD_FOR_S}
        holding = (
            {}
            if not microbatch
            else {peer: link for peer, link in told.items() if link.holds == microbatch and self._is_timely(link)}
        )
        if told:
            finish_s = {peer: _by_its_word_s(link, best_s) for peer, link in (holding or told).items()}
        else:
            finish_s = {peer: _expected_s(link, each_s, best_s, now) for peer, link in open_links.items()}
        soonest = min(finish_s.values())
        peer_id = self.rng.choice([peer for peer, seconds in finish_s.items() if seconds == soonest])
        link = self._links[peer_id]
        link.told_at = None
        link.sent.append((now, link.in_flight + 1))
        link.last_sent_at = now
        what = "soonest" if not holding else "holds it, the soonest"
        return Route(peer_id, f"{what} of {len(finish_s)} in stage {self.stage}: {soonest:.3f} s", bool(holding))

    def worth_asking(self, microbatch: bytes, *, now: float) -> tuple[PeerId, ...]:
        """Peers to ask how long the microbatch would wait there, before `choose`; none if the answers would not pay.

        `microbatch` names it: of it, and of who is there, those asked are a function (rendezvous hashing).
        """
        asked = [peer for peer, link in sorted(self._links.items()) if link.is_listed and link.shunned_until <= now]
        if len(asked) < 2 or self._common()[1] < ASK_FROM_S:
            return ()

        def rank(peer: PeerId) -> bytes:
            return hashlib.sha256(microbatch + peer.encode()).digest()

        return tuple(heapq.nsmallest(ASKED, asked, key=rank))

    def told(self, peer_id: PeerId, waits_s: float, *, holds: bytes = b"", now: float) -> None:
        """The peer says that work sent to it now would wait so long; and it `holds` the microbatch asked about."""
        link = self._links.get(peer_id)
        if link is not None:
            link.told_s, link.holds, link.told_at = max(0.0, waits_s), holds, now

    def finished(self, peer_id: PeerId, duration_s: float, *, was_held: bool = False) -> None:
        """The peer answered `duration_s` after it was chosen; what it held already measures it only if it was late."""
        link = self._links.get(peer_id)
        if link is not None and link.sent:
            load = link.sent[0][1]
            if was_held:
                duration_s = max(duration_s, self._common()[1] if link.duration_s is None else link.duration_s)
            share = SMOOTHING if link.duration_s is not None else 1.0
            link.duration_s = (1 - share) * (link.duration_s or 0.0) + share * duration_s
            link.load = (1 - share) * link.load + share * load
            link.failures = link.wastes = 0
        self._leave(peer_id)

    def failed(self, peer_id: PeerId, *, took_s: float = 0.0, now: float) -> None:
        """The peer broke off after so long, was late, or sent something wrong: no work for a while, twice as long each
        time."""
        link = self._leave(peer_id)
        if link is not None and link.shunned_until <= now:  # what was in flight with it fails by the same fault
            link.failures = min(link.failures + 1, 16)
            link.shunned_until = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** (link.failures - 1))
            self._doubt(link, took_s, now)

    def refused(self, peer_id: PeerId, *, took_s: float = 0.0, now: float) -> None:
        """The peer said BUSY, or after so long that it cannot: it is well, and tried again soon."""
        link = self._leave(peer_id)
        if link is not None:
            link.failures = 0
            self._doubt(link, took_s, now)
            link.shunned_until = max(link.shunned_until, now + BUSY_RETRY_S)

    def cancelled(self, peer_id: PeerId) -> None:
        """The caller gave up for reasons of its own."""
        self._leave(peer_id)

    def _doubt(self, link: _Link, wasted_s: float, now: float) -> None:
        if wasted_s > WASTED_S and link.doubted_until <= now:
            link.wastes = min(link.wastes + 1, 16)
            link.doubted_until = now + min(LONGEST_DOUBT_S, RARELY * wasted_s * 2.0 ** (link.wastes - 1))

    def _common(self) -> tuple[float, float]:
        """Seconds that one more in flight adds, on average; the least duration measured, which a new peer may match."""
        measured = [(link.duration_s, link.load) for link in self._links.values() if link.duration_s is not None]
        if not measured:
            return 1.0, 0.0
        each_s = sum(duration_s / load for duration_s, load in measured) / len(measured)
        return each_s, min(duration_s for duration_s, _ in measured)

    def _is_timely(self, link: _Link) -> bool:
        """Whether its answers, if there were any, take no longer than the others' make credible."""
        others_s = [it.duration_s for it in self._links.values() if it is not link and it.duration_s is not None]
        return bool(others_s) and (link.duration_s or 0.0) <= BELIEVED * min(others_s)

    def _leave(self, peer_id: PeerId) -> _Link | None:
        link = self._links.get(peer_id)
        if link is None:
            return None
        assert link.sent
        link.sent.popleft()
        if not link.is_listed and not link.sent:
            del self._links[peer_id]
        return link


def _by_its_word_s(link: _Link, best_s: float) -> float:
    if link.duration_s is None:
        return link.told_s if link.sent else 0.0  # untried: so that it is measured, whatever the others say
    return link.told_s + max(0.0, link.duration_s - BELIEVED * best_s)


def _expected_s(link: _Link, each_s: float, best_s: float, now: float) -> float:
    duration_s, load = link.duration_s, link.load
    if duration_s is None or (not link.sent and now > link.last_sent_at + FORGET_AFTER * duration_s):
        duration_s, load = best_s, 1.0
    expected_s = duration_s + each_s * (link.in_flight + 1 - LOAD_MEMORY * load)
    # Whoever is late already with the oldest in flight will not be quicker with the next.
    return max(expected_s, now - link.sent[0][0] if link.sent else 0.0)
