"""What waits for one peer and is under way to it, and how fast its line is found to be."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field, replace

from peer.round.mail.lanes import SELDOM_S, TRY_AGAIN_S
from peer.round.mail.meter import UNKNOWN_BYTES_PER_S, Meter
from peer.round.mail.pace import UNDER_WAY_BYTES, Pace
from peer.round.mail.parcel import Parcel
from swarm.core.transfers import MOST_LANES, longest_s

SPARED = 4 / 3
"""What is longer than a message should be, by less than this, is not cut: each half has a head, too."""
UNSURE_BYTES = 64 << 10
"""Of a message on a line that was fast, until it was measured in this round: whoever waits for it sees within seconds
that it comes, should the line have become slow."""
LANES_COUNT = 0.75
"""What messages before took of a line counts so much with each that has come."""
HANGS_S = 10.0
"""A message that takes so much longer than its bytes could (`longest_s`) gives back its share of the uplink."""


@dataclass
class Line:
    """To one peer."""

    first_pace: Pace
    waiting: deque[Parcel] = field(default_factory=deque)
    waiting_bytes: int = 0
    meter: Meter = field(default_factory=Meter)
    on_uplink: int = 0
    """Of its lanes, those that have a share of the uplink. Others go beside."""
    leaving: int = 0
    """Of those, the ones whose bytes are on their way."""
    began: int = 0
    """As which of all lanes its newest one began."""
    is_over: bool = False
    """What is under way is to who is no member any more: it has no share of the uplink."""
    is_last: bool = False
    """The step does without its peer: all that others wait for goes first."""
    away_at: float | None = None
    """When its peer was last found not to answer; None: it is there."""
    kept: deque[Parcel] = field(default_factory=deque)
    """What is sent once it answers again."""
    returns: asyncio.TimerHandle | None = None
    """It is tried again soon."""
    sent_bytes: float = 0.0
    sent_s: float = 0.0
    """What its last messages were together, and how long each took, together; older ones count less."""
    is_narrow: bool = False
    narrow_until: float = -math.inf
    """It was found so with as many lanes as it had then: by the one that it has since, each byte may be there soon."""
    narrow_s: float = TRY_AGAIN_S
    """For how long it is held for narrow next time."""
    measured_from: float = -math.inf
    """What began before, while it was held for narrow, tells nothing of it."""
    beside: int = 0
    """Lanes without a share of the uplink that do not hang."""
    share: int = 0
    """Of the uplink's lanes, while that has more than usual: the line has as many at least, for it is in the trap that
    the uplink is in."""

    @property
    def is_away(self) -> bool:
        return self.away_at is not None

    def put(self, parcel: Parcel) -> None:
        if self.is_away:
            self.kept.append(parcel)
        else:
            self.waiting.append(parcel)
            self.waiting_bytes += len(parcel.body)

    def put_off(self, given_up: list[Parcel], now: float) -> None:
        """Its peer is away, and did not answer these."""
        self.away_at = now
        self.kept.extendleft(reversed(given_up))
        self.kept.extend(self.waiting)
        self.waiting.clear()
        self.waiting_bytes = 0

    def back(self) -> None:
        """It may have got all the same what was given up, and may have the rest of somebody else."""
        self.away_at = self.returns = None
        for parcel in self.kept:
            self.put(replace(parcel, may_be_there=True))
        self.kept.clear()

    def forget(self) -> None:
        """What is under way there is to no member any more."""
        self.waiting.clear()
        self.kept.clear()
        self.waiting_bytes, self.is_over = 0, True
        if self.returns is not None:
            self.returns.cancel()

    @property
    def pace(self) -> Pace:
        if self.meter.bytes_per_s is None:
            return self.first_pace
        pace = Pace.of(self.meter.bytes_per_s)
        if self.is_unsure:
            return Pace(UNSURE_BYTES, pace.lanes, cuts=True)
        share = min(self.share, MOST_LANES, UNDER_WAY_BYTES // pace.message_bytes)
        return pace if share <= pace.lanes else pace._replace(lanes=share)

    @property
    def is_unsure(self) -> bool:
        """It was fast, and may be slow by now: nothing goes that would keep a slow one busy for minutes."""
        rate = self.meter.bytes_per_s
        return rate is not None and not self.meter.is_known and not Pace.of(rate).cuts

    def took(self, num_bytes: int, began: float, now: float) -> None:
        """One message of so many bytes."""
        if began >= self.measured_from:
            self.sent_bytes = LANES_COUNT * self.sent_bytes + num_bytes
            self.sent_s = LANES_COUNT * self.sent_s + (now - began)

    @property
    def lane_bytes_per_s(self) -> float | None:
        """Of one message; None: unknown."""
        return self.sent_bytes / self.sent_s if self.sent_s > 0 else None

    @property
    def is_going(self) -> bool:
        return bool(self.waiting) or self.meter.busy > 0

    def judge(self, below: float, lanes_below: float, now: float) -> None:
        """Whether it is narrow, which one is that carries less than so many bytes a second, and, if it has one lane,
        less by that."""
        rate = self.meter.bytes_per_s
        has_one = rate is not None and Pace.of(rate).lanes == 1
        was_held, is_held = self.is_narrow, now < self.narrow_until
        if not self.is_going:
            self.is_narrow = is_held
        elif rate is None or rate >= below:
            self.is_narrow, self.narrow_until, self.narrow_s = False, -math.inf, TRY_AGAIN_S
        elif was_held and not is_held and has_one:
            self.is_narrow, self.measured_from, self.sent_bytes, self.sent_s = False, now, 0.0, 0.0
        elif not is_held:
            lane = self.lane_bytes_per_s
            self.is_narrow = not has_one or (lane is not None and lane < lanes_below)
            if self.is_narrow:
                self.narrow_until, self.narrow_s = now + self.narrow_s, min(SELDOM_S, 2 * self.narrow_s)

    def longest_s(self, num_bytes: int) -> float:
        """Seconds in which a message is surely there, unless it hangs."""
        rate = self.meter.bytes_per_s or UNKNOWN_BYTES_PER_S
        return longest_s(num_bytes, rate / max(1, self.meter.busy), floor_s=HANGS_S)

    @property
    def has_room(self) -> bool:
        """Whether something waits that may go, as far as this peer's line goes."""
        return bool(self.waiting) and self.meter.busy < self.pace.lanes

    def take(self, at_most: int) -> list[Parcel]:
        """The next parcels that go together, or a fragment of one that is too long; none if nothing waits."""
        waiting = self.waiting
        if waiting and self.pace.cuts and waiting[0].fragment is None and len(waiting[0].body) > SPARED * at_most:
            waiting.extendleft(reversed(waiting.popleft().cut(at_most)))
        taken: list[Parcel] = []
        num_bytes = 0
        while waiting and (
            not taken or (waiting[0].goes_with(taken[0]) and num_bytes + len(waiting[0].body) <= at_most)
        ):
            num_bytes += len(waiting[0].body)
            taken.append(waiting.popleft())
        self.waiting_bytes -= num_bytes
        return taken
