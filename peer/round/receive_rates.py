"""How fast each other member's parts come in, measured so that slow links get fewer of them.

The clock starts for all when the roster is known, which is when they may send. One that started with a member's first
part would tell a member that has little to send for the fastest: its few parts come at once. It would be given more to
reduce, have less to send, and soon reduce nearly everything.
"""

from swarm.core.ids import PeerId
from swarm.core.ranking import rank
from swarm.core.round.contribution import MAX_RATES, Rate, Roster
from swarm.core.state.slow_lines import SLOW_OCTAVES

SMOOTHING = 0.3
"""Share of the newest round in the average of seconds a byte: a line that has become slow is known at once."""
MIN_BYTES, MIN_S = 1 << 20, 4.0
"""Fewer bytes of one peer in one round measure nothing but delays, if they came sooner."""


class ReceiveRates:
    """Bytes a second of each member, averaged over rounds. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._average: dict[PeerId, float] = {}
        self._roster: Roster | None = None
        self._began = 0.0
        self._round: dict[PeerId, tuple[float, int]] = {}

    def begin(self, roster: Roster, *, now: float) -> None:
        """This roster is known, the round's first or another: its members begin to send, if they did not before."""
        if roster is not self._roster:
            self._take()
            self._roster, self._began = roster, now

    def arrived(self, peer: PeerId, num_bytes: int, *, now: float) -> None:
        """Parts of the present round are here. Before its roster is known here they measure nothing."""
        if self._roster is None:
            return
        _, before = self._round.get(peer, (now, 0))
        self._round[peer] = (now, before + num_bytes)

    def end_round(self) -> None:
        """The version has turned."""
        self._take()
        self._roster = None

    def _take(self) -> None:
        """What was seen under the roster goes into the averages."""
        for peer, (last, num_bytes) in self._round.items():
            took_s = last - self._began
            if took_s > 0 and (num_bytes >= MIN_BYTES or took_s >= MIN_S):
                rate = num_bytes / took_s
                self._average[peer] = 1 / (SMOOTHING / rate + (1 - SMOOTHING) / self._average.get(peer, rate))
        self._round.clear()

    def slow(self) -> frozenset[PeerId]:
        """Whose parts come in much slower here than those of half of the others: to wait for them helps no round."""
        octaves = {peer: int(rate).bit_length() for peer, rate in self._average.items()}
        usual = sorted(octaves.values())[len(octaves) // 2] if octaves else 0
        return frozenset(peer for peer, octave in octaves.items() if octave <= usual - SLOW_OCTAVES)

    def of(self, members: tuple[PeerId, ...], *, me: PeerId) -> tuple[Rate, ...]:
        """What is known of the other members, in the order of peer ids; of many, of some that are drawn."""
        others = rank((peer for peer in members if peer in self._average and peer != me), "rates", me)[:MAX_RATES]
        known = [(peer, int(self._average[peer])) for peer in sorted(others)]
        return tuple(Rate(peer, rate.bit_length() - 1) for peer, rate in known if rate > 0)
