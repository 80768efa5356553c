"""How long moving bytes may take: in proportion to them, and for as long as they come.

A transfer of n bytes is expected to take n / rate seconds, and is over in any case `MOST_TIMES` that and the call's own
floor after it began: who lets bytes drip keeps nothing open. The rate is what the slowest `WINDOW_S` so far brought, at
most what every line is assumed to carry, and at least what is left of that where `SHARED_BY` transfers share the line.
It is alive while at least `ALIVE_SHARE` of that least rate comes in over any `WINDOW_S`, or over any time in which so
much comes of it on average as a slow connection may owe at once: there a round trip takes seconds, and what is lost is
sent again after several. What was begun while a line was idle is not given up because others share the line since.
"""

from dataclasses import dataclass, field

LEAST_MBIT = 1.0
"""What a line is assumed to carry where a run's manifest does not say (`deadlines.least_mbit`)."""
ALIVE_SHARE = 0.25
WINDOW_S = 5.0
LOOKS = 20
"""In a window: what comes between two is looked at together."""
OWED_BYTES, LONGEST_WINDOWS = 128 << 10, 4
"""So much a transfer brings in the time for which it may bring next to nothing, which is no longer than so many
windows."""
MOST_TIMES = 4.0
SHARED_BY = 16
"""Transfers that may share one line at a time: what a line is assumed to carry is divided among them."""
BUFFER_S = 0.1
"""Of its rate, bulk may keep an uplink's buffer filled: half of what a modem holds. The rest is for what is small: it
would wait twice as long else, or be dropped and sent again after seconds."""
LEAST_WINDOW_BYTES = 4 * 1448
"""Of one connection, TCP's congestion control keeps under way however much is lost: four full packets (bbr)."""
SLOWEST_OF_TWO = LEAST_WINDOW_BYTES / BUFFER_S / 2
"""Bytes a second of a line that has more than one lane."""
LEAST_LANES, MOST_LANES = 2, 16
"""Transfers to one peer side by side; all who join together are sent as many by a donor as one member."""
JOIN_SHARE = 1 / 3
"""Of a member's uplink, for all who join together, while a round fills it; of two members' a half."""
MESSAGE_BYTES = 4352 << 10
"""A message of several parts of a round is no longer: four of 2^20 values in int8, two in bf16."""
MOST_DONORS = 8
"""Asked for one state's chunks, or one result's parts."""
PIECE_BYTES = 1 << 20
"""What is longer goes in pieces of this length, each checked when it is there: what came is not fetched again."""
EXACT_S_PER_VALUE = 32e-9
"""Encoding, hashing and decoding one value, on a core that two peers share (see `swarm.core.plan.EXACT_NS`)."""


def bytes_per_s(mbit: float) -> float:
    """Of a line of so many megabits a second."""
    return mbit * 125_000


LEAST_BYTES_PER_S = bytes_per_s(LEAST_MBIT)


def expected_s(num_bytes: float, rate: float) -> float:
    """Seconds that so many bytes take at `rate` bytes a second."""
    return num_bytes / rate


def longest_s(num_bytes: float, rate: float, *, floor_s: float) -> float:
    """Seconds after which a call that moves so many bytes has ended in any case; `floor_s` is the call's own."""
    return floor_s + MOST_TIMES * expected_s(num_bytes, rate)


def shared_longest_s(num_bytes: float, *, floor_s: float, least_mbit: float = LEAST_MBIT) -> float:
    """`longest_s` where nothing was measured: on the slowest line that is assumed, with all others that share it."""
    return longest_s(num_bytes, bytes_per_s(least_mbit) / SHARED_BY, floor_s=floor_s)


def longest_way_s(hop_bytes: float, num_hops: int, *, floor_s: float, least_mbit: float) -> float:
    """Seconds after which a microbatch that still passes so many hops, there and back, has surely come back."""
    return longest_s(hop_bytes * num_hops, bytes_per_s(least_mbit), floor_s=floor_s)


def lanes_of(rate: float, *, most: int) -> int:
    """Transfers side by side on a line of `rate` bytes a second: no more than half of its buffer holds the least
    of that TCP keeps under way of each, or they would lose one another's packets, and those of small calls."""
    return max(least_lanes(rate), min(most, int(rate * BUFFER_S / LEAST_WINDOW_BYTES)))


def least_lanes(rate: float) -> int:
    """Two, so that an answer is waited for while the other goes; one where that takes no time beside the transfer's."""
    return LEAST_LANES if rate >= SLOWEST_OF_TWO else 1


def join_share(num_members: int) -> float:
    """`JOIN_SHARE` in a stage of so many: who joins is as good as one of three. It has no less among many: a state's
    bytes are sent once, however long that takes, and results are made meanwhile, which it has to fetch as well."""
    return max(JOIN_SHARE, 1 / max(2, num_members))


def work_s(num_values: int) -> float:
    """Seconds after which a peer has surely encoded, or decoded, so many values of a stage."""
    return MOST_TIMES * EXACT_S_PER_VALUE * num_values


def straggler_s(share: float, step_s: float) -> float:
    """How long a round waits for the last members' parts once most members' are there; the step has taken `step_s`."""
    return share * step_s


@dataclass
class Transfer:
    """One transfer of `num_bytes` as its receiver sees it. Times are seconds of the caller's clock."""

    num_bytes: int
    began: float
    window_s: float = WINDOW_S
    floor_s: float = 0.0
    """The call's own: before this time nothing is given up."""
    rate: float = LEAST_BYTES_PER_S
    """Assumed, bytes a second; from the first window on what the slowest brought, if that is less, down to `least`."""
    _looks: list[tuple[float, int]] = field(default_factory=list)
    """When how many bytes were there in all, lately."""

    def __post_init__(self) -> None:
        self.least = self.rate / SHARED_BY
        self.floor_s = max(self.floor_s, self.window_s)
        self._looks.append((self.began, 0))
        self.came = 0
        self._window_from = (self.began, 0)
        self._quiet_s = self.window_s

    def progress(self, came: int, *, now: float) -> None:
        """So many bytes are here in all."""
        is_more, self.came = came > self.came, max(came, self.came)
        came = self.came
        since, before = self._window_from
        if now >= since + self.window_s:
            self.rate = min(self.rate, max(self.least, (came - before) / (now - since)))
            self._window_from = (now, came)
        if is_more:
            owed_s = OWED_BYTES * (now - self.began) / came
            self._quiet_s = min(LONGEST_WINDOWS * self.window_s, max(self.window_s, owed_s))
        if now < self._looks[-1][0] + self.window_s / LOOKS and len(self._looks) > 1:
            self._looks[-1] = (self._looks[-1][0], came)  # as if it had come a little earlier
            return
        self._looks.append((now, came))
        while self._looks[1][0] <= now - LONGEST_WINDOWS * self.window_s and len(self._looks) > 2:
            del self._looks[0]

    @property
    def due(self) -> float:
        """When it is given up, unless more has come by then."""
        is_measured = self._window_from[0] > self.began
        rate = self.rate if is_measured else self.least
        ends_at = self.began + longest_s(self.num_bytes, rate, floor_s=self.floor_s)
        wanted = min(ALIVE_SHARE * self._quiet_s * self.least, self.num_bytes - self.came)
        if wanted <= 0:
            return ends_at
        enough_at = next(at for at, came in self._looks if came > self.came - wanted)
        return min(ends_at, max(self.began + self.floor_s, enough_at + self._quiet_s))
