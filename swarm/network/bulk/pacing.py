"""Senders to a slow line hold back what its queue would drop.

TCP keeps some packets of each connection under way however slow the line is, four at the least with bbr. Where several
members send to one at half a megabit a second, these alone are more than its queue holds: a fifth of all they send is
dropped, and sent again (`tests/swarm/network/bulk/test_pacing.py`). `Pace` has the kernel send no faster than what was
acknowledged, and a little more from time to time, for as long as TCP has about as little under way as it can have.
A line that loses packets without a queue is not slowed down.
"""

import asyncio
import contextlib
import math
import socket
import struct
import time
from dataclasses import dataclass
from typing import Self

from swarm.core.transfers import LEAST_WINDOW_BYTES

LOOK_S = 1.0
STANDING_TIMES, STANDING_S = 3.0, 0.06
"""A round trip so many times as long as the shortest one, and longer by so much: packets stand in a queue. Who receives
may keep an answer for 40 ms."""
SHORTEST_S = 0.02
"""No shorter round trip is reckoned with: what jitters by more may be as near as one likes."""
AT_LEAST_TIMES = 1.5
"""Of TCP's least window: so few bytes under way are about the fewest."""
MOST_LOST = 0.02
"""Of the bytes sent between two looks: more, and there are fewer from now on."""
SLOWER, LEAST_KEPT = 0.8, 0.5
"""Of what was acknowledged; and at least so much of the rate before."""
LEAST_BYTES_PER_S = 2 * 1448.0
FASTER, MORE_BYTES_PER_S = 1.05, 724.0
"""Where no queue stands. That all get as much more, and lose of what they have, is what makes them equal."""
LITTLE_MORE_BYTES_PER_S = 145.0
"""Where one does: until packets are lost, most of them of who sends most."""
FORGOTTEN_S = 20.0
"""After which a pace says nothing of the line any more."""
_SO_MAX_PACING_RATE = 47
_UNPACED = (1 << 32) - 1
_INFO = struct.Struct("=xB2xB19xI40xI48xQ16xII16xQ24xQQ")
"""Of Linux's `struct tcp_info`: state of loss; time-outs running; segments not acknowledged; rtt, us; bytes
acknowledged; bytes not sent; shortest rtt of late, us; us in which there was something to send; bytes sent, and sent
again."""
_LOSS = 4
"""TCP has heard nothing for so long that it begins anew."""


@dataclass(frozen=True)
class Told:
    """By the kernel of a connection, since its start."""

    round_trip_s: float
    least_round_trip_s: float
    acknowledged: int
    """Bytes, as are those below."""
    busy_s: float
    """There was something to send, or to be acknowledged."""
    sent: int
    sent_again: int
    is_idle: bool = False
    """All that it was given has arrived."""
    is_cut_off: bool = False
    """Nothing is heard of the other end."""

    @classmethod
    def of(cls, connection: socket.socket) -> Self | None:
        """None where the system does not tell."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:
            return None
        if len(info) < _INFO.size:
            return None
        state, time_outs, unacknowledged, rtt_us, acknowledged, unsent, least_us, busy_us, sent, again = _INFO.unpack(
            info
        )
        return cls(
            rtt_us / 1e6,
            least_us / 1e6,
            acknowledged,
            busy_us / 1e6,
            sent,
            again,
            is_idle=unsent == unacknowledged == 0,
            is_cut_off=state == _LOSS or time_outs > 0,
        )


class Pace:
    """Of one connection: looked at once a second while anything of what it is given is under way."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = -math.inf
        self._before: Told | None = None
        self._least_s = math.inf
        self._rate = 0.0
        """Of late."""
        self.bytes_per_s: float | None = None
        """None: as fast as TCP will."""

    def watch(self) -> None:
        """Called whenever the kernel was given something, or takes no more for now."""
        if self._timer is not None:
            return
        if time.monotonic() > self._looked_at + FORGOTTEN_S:
            self._rate = 0.0
            if self.bytes_per_s is not None:
                self._keep_to(math.inf)
        self._before = Told.of(self._connection)
        self._look_later()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if self._before is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer, self._looked_at = None, time.monotonic()
        before, told = self._before, Told.of(self._connection)
        if before is not None and told is not None:
            self.go_by(before, told)
        if told is not None and not told.is_idle:
            self._before = told
            self._look_later()

    def go_by(self, before: Told, told: Told) -> None:
        """What came of the time between."""
        self._least_s = min(self._least_s, max(SHORTEST_S, told.least_round_trip_s))
        busy_s, acknowledged = told.busy_s - before.busy_s, told.acknowledged - before.acknowledged
        if told.is_cut_off or busy_s < LOOK_S / 2 or acknowledged <= 0:
            return  # it says nothing of the line's rate
        rate, rate_before, pace = acknowledged / busy_s, self._rate, self.bytes_per_s
        self._rate = rate
        if pace is None and rate * told.round_trip_s > AT_LEAST_TIMES * LEAST_WINDOW_BYTES:
            return  # TCP has more under way than it must, and takes less by itself
        stands = told.round_trip_s > max(STANDING_TIMES * self._least_s, self._least_s + STANDING_S)
        if stands and told.sent_again - before.sent_again > MOST_LOST * (told.sent - before.sent):
            self._keep_to(max(SLOWER * rate, LEAST_KEPT * (pace or rate_before), LEAST_BYTES_PER_S))
        elif pace is not None and stands:
            self._keep_to(pace + LITTLE_MORE_BYTES_PER_S)
        elif pace is not None:
            self._keep_to(max(pace, min(FASTER * pace, 2 * rate)) + MORE_BYTES_PER_S)

    def _keep_to(self, rate: float) -> None:
        self.bytes_per_s = rate if rate * self._least_s < LEAST_WINDOW_BYTES else None
        most = _UNPACED if self.bytes_per_s is None else max(1, int(rate))
        with contextlib.suppress(OSError):
            self._connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", most))
