"""This is where a peer measures how fast each other member's parts come in, so that slow links get fewer of them."""

from swarm.core.contribution import MAX_RATES, Rate
from swarm.core.ids import PeerId
from swarm.core.ranking import rank

SMOOTHING = 0.3
"""Share of the newest round in the average."""
MIN_BYTES = 1 << 20
"""Less than this, of one peer in one round, measures nothing but delays."""


class ReceiveRates:
    """Bytes a second of each member, averaged over rounds. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._average: dict[PeerId, float] = {}
        self._round: dict[PeerId, tuple[float, float, int]] = {}

    def arrived(self, peer: PeerId, num_bytes: int, *, now: float) -> None:
        """A part of the present round is here. The first one only starts the clock."""
        if peer not in self._round:
            self._round[peer] = (now, now, 0)
        else:
            first, _, before = self._round[peer]
            self._round[peer] = (first, now, before + num_bytes)

    def end_round(self) -> None:
        """Take what the round has shown into the averages."""
        for peer, (first, last, num_bytes) in self._round.items():
            if num_bytes >= MIN_BYTES and last > first:
                rate = num_bytes / (last - first)
                self._average[peer] = rate + (1 - SMOOTHING) * (self._average.get(peer, rate) - rate)
        self._round.clear()

    def of(self, members: tuple[PeerId, ...], *, me: PeerId) -> tuple[Rate, ...]:
        """What is known of the other members, in the order of peer ids; of many, of some that are drawn."""
        others = rank((peer for peer in members if peer in self._average and peer != me), "rates", me)[:MAX_RATES]
        known = [(peer, int(self._average[peer])) for peer in sorted(others)]
        return tuple(Rate(peer, rate.bit_length() - 1) for peer, rate in known if rate > 0)
