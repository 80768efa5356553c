"""How long bulk messages to one peer are, and how many are under way at a time, by what its line carries."""

from typing import NamedTuple

from swarm.core.transfers import MESSAGE_BYTES, MOST_LANES, least_lanes

SHORTEST_BYTES = 32 << 10
"""Of a line so slow that it has one lane or two: with two, while an answer of one is waited for, the other fills it."""
MESSAGE_S = 0.1
"""How long a message should take."""
UNDER_WAY_S = 1.6
UNDER_WAY_BYTES = 4 << 20
"""Of all messages to one peer together, at most: so much as its line carries in `UNDER_WAY_S`. No line is idle for an
answer that takes 100 ms, and whoever waits for a message sees within seconds that it comes."""
CUT_BELOW_BYTES = 512 << 10
"""Only shorter messages become shorter still: on lines of more than 42 Mbit/s each costs more than an idle end."""
LEAST_BYTES = 8 << 10
LEAST_SHARE = 8
"""A message keeps an eighth of its length, however little is left: each has a head and an answer."""


class Pace(NamedTuple):
    """How long messages to a peer are, and how many are under way at a time."""

    message_bytes: int
    lanes: int
    cuts: bool
    """Whether messages become shorter towards the end, and parcels are cut."""

    @classmethod
    def of(cls, bytes_per_s: float) -> "Pace":
        """For a line of that rate."""
        size = min(MESSAGE_BYTES, max(SHORTEST_BYTES, int(bytes_per_s * MESSAGE_S)))
        under_way = min(UNDER_WAY_BYTES, int(bytes_per_s * UNDER_WAY_S))
        lanes = max(least_lanes(bytes_per_s), min(MOST_LANES, under_way // size))
        return cls(size, lanes, cuts=size < CUT_BELOW_BYTES)

    def next_bytes(self, waiting_bytes: int) -> int:
        """Of the next message, while so many wait: all lanes together take half of them."""
        if not self.cuts:
            return self.message_bytes
        least = max(self.message_bytes // LEAST_SHARE, LEAST_BYTES)
        return min(self.message_bytes, max(least, waiting_bytes // (2 * self.lanes)))


FIRST_PACE, FIRST_PEERS = Pace(16 << 10, 2, cuts=True), 4
"""While nothing has been measured: a line of 1 Mbit/s carries so much to each of so many peers in a second."""
