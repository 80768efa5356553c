"""Bulk messages that wait for their turn: a few to each peer are under way at a time, in order.

What waits for one peer together goes together. On a fast line messages are long, for each costs as much as carrying
100 KB; on a slow one short and many, so that the line is never idle while one is acknowledged. There they become
shorter the less is left, and parcels are cut into fragments: so those under way end at about the same time (guided
self-scheduling, Polychronopoulos and Kuck 1987), and no line stands nearly empty behind the last of them. What is left
is what waits for that peer; where this machine's uplink is full, what waits for all: of eight, each has little to get.

Each message under way has a connection of its own, and all share this machine's uplink. Together they are no more than
its buffer holds the least that TCP keeps under way of: or they would lose one another's packets, and the packets of
votes and reports most of all. One whose bytes are there takes nothing of that while its answer is awaited. Where it
takes half a second, over oceans or of a machine that has much to do, a line that carried little for a moment would else
be slow for good: it is measured by what goes over it, which would be the few messages that a slow line has room for. A
message to a peer whose line is much slower than others' fills none of that buffer: it goes beside the others, or two
such would keep an uplink that carries no more nearly idle. Nor does one that hangs on its way to a peer that is silent.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from peer.round.mail.lanes import Lanes
from peer.round.mail.line import UNSURE_BYTES, Line
from peer.round.mail.meter import Meter
from peer.round.mail.pace import FIRST_PACE, FIRST_PEERS, Pace
from peer.round.mail.parcel import Parcel
from peer.round.step_state import StepState
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_LANES, lanes_of

MOST_OF_ALL = 1 << 10
"""Lanes to all peers together, however fast the line."""
NARROW, SLOW_LANES = 4.0, 3.0
"""A line is narrow that carries the first times less than the fastest of those that carry something, or than its share
of this peer's uplink. One that has one lane carries little because of that, and would have no more if it were held for
narrow: so it must also take the second times as long for a byte of a message as another line does, and as an uplink
does whose lanes are all full."""
AWAY_S = 2.0
"""Between two times that messages to a peer are tried that does not answer them, however often something is heard of
it."""


@dataclass(eq=False)
class _Lane:
    """To one peer; with a share of this machine's uplink, or beside what shares that."""

    line: Line
    uplink: Meter
    on_uplink: bool
    is_beside: bool = False
    is_leaving: bool = False
    """Bytes of its message are on their way."""

    def begin(self, now: float) -> None:
        self.line.meter.begin(now)
        if self.on_uplink:
            self.line.on_uplink += 1
            self.uplink.begin(now)
        else:
            self.is_beside = True
            self.line.beside += 1

    def hangs(self, now: float) -> None:
        """Its share of the uplink is others' from now on."""
        if self.on_uplink and not self.line.is_over:
            self.line.on_uplink -= 1
            self.uplink.hangs(now)
        self.on_uplink = False
        self._is_beside_no_more()

    def _is_beside_no_more(self) -> None:
        self.line.beside -= self.is_beside
        self.is_beside = False

    def end(self, now: float) -> None:
        self._is_beside_no_more()
        ended = Meter.hangs if self.line.is_away else Meter.end
        ended(self.line.meter, now)
        if self.on_uplink and not self.line.is_over:
            self.line.on_uplink -= 1
            ended(self.uplink, now)


class OnItsWay(NamedTuple):
    """What a message on its way tells its lane."""

    leaves: Callable[[], None]
    """Its bytes go, for the first time or once more."""
    left: Callable[[], None]
    """They are there, and its answer is not, if that can be seen."""


Send = Callable[[PeerId, list[Parcel], OnItsWay], Awaitable[int | None]]
"""The bytes that went: 0 where nobody wants them any more; None: their peer does not answer, and may again."""


class Outbox:
    """Parcels for several peers. `spawn` runs what it is given as a task; `send` brings a peer parcels that go
    together."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        send: Send,
        *,
        first_pace: Pace = FIRST_PACE,
        moved: Callable[[], int] | None = None,
        most: Callable[[], float] | None = None,
        least: Callable[[], float] = float,
    ) -> None:
        """`first_pace`: of a line that was not measured yet; so many lanes the uplink has until it is measured.
        `moved`, `most`: of the uplink, as a `Meter` has them. `least`: bytes a second that it carries for whatever is
        sent: lines that are slow for a moment, as after a cut, would have it held for what they carry, with few lanes,
        and be slow by that."""
        self._first_pace = first_pace
        self._spawn = spawn
        self._send = send
        self._lines: dict[PeerId, Line] = {}
        self._first_lanes = FIRST_PEERS * first_pace.lanes
        self._tried = Lanes(lambda rate: lanes_of(max(least(), rate), most=MOST_OF_ALL), most=MOST_OF_ALL)
        self._uplink = Meter(moved=moved, lanes=self._tried, most=most)
        self._least = least
        self._leaving = 0
        """Lanes with a share of the uplink whose bytes are on their way."""
        self._begun = 0
        self._shares = False
        """Lines have some."""

    def put(self, peer: PeerId, parcel: Parcel, *, is_last: bool = False) -> None:
        """Send this once what was put before is sent or under way, and the peer is there; `is_last`: and nothing waits
        for anybody else."""
        line = self._lines.setdefault(peer, Line(self._first_pace))
        line.is_last = is_last
        line.put(parcel)
        self._begin()

    def back(self, peer: PeerId) -> None:
        """Something is heard of it: what waits for it goes."""
        line = self._lines.get(peer)
        if line is None or line.away_at is None or line.returns is not None:
            return

        def go() -> None:
            line.back()
            self._begin()

        soon_s = line.away_at + AWAY_S - time.monotonic()
        if soon_s > 0:
            line.returns = asyncio.get_running_loop().call_later(soon_s, go)
        else:
            go()

    def keep(self, peers: Container[PeerId], is_open: Callable[[StepState], bool]) -> None:
        """A step is over, and these are the next one's members: forget the lines to anyone else, and what waits of
        steps that are not open.

        What is under way there may hang until its call ends, and whatever has room on the uplink goes meanwhile: a
        member that stands still, or is cut off, would else cost others their next contribution as well.
        """
        now = time.monotonic()
        for peer in [peer for peer in self._lines if peer not in peers]:
            line = self._lines.pop(peer)
            line.forget()
            self._leaving -= line.leaving
            for _ in range(line.on_uplink):
                self._uplink.hangs(now)
        for line in self._lines.values():
            line.waiting = deque(one for one in line.waiting if is_open(one.state))
            line.waiting_bytes = sum(len(one.body) for one in line.waiting)
            line.kept = deque(one for one in line.kept if is_open(one.state))
        self._begin()

    def _begin(self) -> None:
        """One lane more, if there is room for it: to the peer that has the fewest, and of these to the one that waits
        longest; narrow lines last, and then those that are to be. Each narrow one has one beside, and more only where
        the uplink has room for others all the same."""
        self._judge_lines()
        self._share_what_is_tried()
        able = [
            (line.is_last, line.is_narrow, line.meter.busy, line.began, peer)
            for peer, line in self._lines.items()
            if line.has_room
        ]
        others_wait = any(line.waiting and not line.is_last for line in self._lines.values())
        for is_last, is_narrow, busy, _, peer in able:
            if is_narrow and not (is_last and others_wait) and busy == self._lines[peer].on_uplink:
                self._begin_lane(peer, on_uplink=False)
        for _, is_narrow, *_, peer in sorted(able):
            if self._lines[peer].has_room and self._has_room(self._leaving + 1 + LEAST_LANES * is_narrow):
                self._begin_lane(peer, on_uplink=True)
                break

    def _share_what_is_tried(self) -> None:
        """Say whether the uplink is short of lanes; those that it has beyond the usual go to all whose lines it could
        fill."""
        is_full, is_more = not self._has_room(self._leaving + 1), self.uplink_lanes > self.usual_lanes
        if not is_full and not is_more and not self._shares:
            return
        wide = [line for line in self._lines.values() if line.waiting and not line.is_narrow]
        if any(not line.is_last for line in wide):
            wide = [line for line in wide if not line.is_last]
        if wide and is_full:
            self._tried.short()
        if is_more or self._shares:
            for line in self._lines.values():
                line.share = 0
            for line in wide:
                line.share = -(-self.uplink_lanes // len(wide)) if is_more else 0
        self._shares = is_more

    def _begin_lane(self, peer: PeerId, *, on_uplink: bool) -> None:
        line = self._lines[peer]
        self._begun += 1
        line.began = self._begun
        lane = _Lane(line, self._uplink, on_uplink)
        lane.begin(time.monotonic())
        self._leaves(lane)
        self._spawn(self._send_waiting(peer, lane))

    def _judge_lines(self) -> None:
        """Find those that are narrow. What a line carried once that has nothing to carry now says nothing of those that
        share the uplink: what that carries does."""
        now = time.monotonic()
        going = [line for line in self._lines.values() if line.is_going]
        rate = self.uplink_bytes_per_s
        rates = [line.meter.bytes_per_s or 0.0 for line in going]
        below = max([*rates, (rate or 0.0) / max(1, len(going))]) / NARROW
        others = going if len(going) > 1 else self._lines.values()
        fastest = max((line.lane_bytes_per_s or 0.0 for line in others), default=0.0)
        shared = rate / self.uplink_lanes if rate is not None else math.inf
        for line in self._lines.values():
            line.judge(below, min(fastest, shared) / SLOW_LANES, now)

    @property
    def uplink_lanes(self) -> int:
        """So many the uplink carries in all."""
        rate = self.uplink_bytes_per_s
        return self._first_lanes if rate is None else self._tried.of(rate)

    @property
    def usual_lanes(self) -> int:
        """As many as an uplink of its rate carries."""
        rate = self.uplink_bytes_per_s
        return self._first_lanes if rate is None else self._tried.usual(rate)

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """As it was last measured, and no less than others show of it; None while it was not: what others send may be
        held for what is known here."""
        measured = self._uplink.bytes_per_s
        return None if measured is None else max(self._least(), measured)

    @property
    def wanted_bytes_per_s(self) -> float | None:
        """That the uplink carries, while something goes over it; None: nothing does, or nobody knows how many."""
        goes = any(line.on_uplink or line.beside for line in self._lines.values())
        return self.uplink_bytes_per_s if goes else None

    @property
    def goes_to_narrow_lines(self) -> bool:
        """All that goes does: none of it fills the uplink."""
        return all(line.is_narrow for line in self._lines.values() if line.on_uplink or line.beside)

    @property
    def round_bytes_per_s(self) -> float:
        """That the lines carry to which something goes, as each was last measured; infinite where one was not."""
        going = [line for line in self._lines.values() if line.on_uplink or line.beside]
        return sum(math.inf if line.meter.bytes_per_s is None else line.meter.bytes_per_s for line in going)

    def keeps_from_others(self) -> None:
        """Somebody who has a part of what the uplink was held for would have more: less than that shows nothing."""
        self._uplink.is_kept_from = True

    def _has_room(self, lanes: int) -> bool:
        """Whether the uplink carries so many in all."""
        return lanes <= self.uplink_lanes

    def _next_bytes(self, line: Line) -> int:
        """Of the next message to this peer."""
        if line.is_unsure:
            return UNSURE_BYTES
        own = line.pace.next_bytes(line.waiting_bytes)
        if self._has_room(self._leaving + 1):
            return own
        waiting_bytes = sum(other.waiting_bytes for other in self._lines.values())
        return min(line.pace.message_bytes, max(own, waiting_bytes // (2 * self.uplink_lanes)))

    def _stays(self, lane: _Lane) -> bool:
        """Whether a lane goes on, and none is due to another peer."""
        self._judge_lines()
        line = lane.line
        if line.is_last and any(other.has_room and not other.is_last for other in self._lines.values()):
            return False
        if not lane.on_uplink:
            return line.is_narrow and line.meter.busy <= line.on_uplink + 1
        others = [other.meter.busy for other in self._lines.values() if other.has_room and not other.is_narrow]
        if line.is_narrow and others:
            return False
        if 0 in others and not self._has_room(self._leaving + 2):
            return False
        fewest = min(others, default=line.meter.busy)
        return line.meter.busy <= min(line.pace.lanes, fewest + 1) and self._has_room(self._leaving + 1)

    async def _send_waiting(self, peer: PeerId, lane: _Lane) -> None:
        line = lane.line
        try:
            while together := line.take(self._next_bytes(line)):
                self._begin()  # of what was cut, the other fragments go beside the first
                began = time.monotonic()
                num_bytes, now = await self._send_off(peer, together, lane), time.monotonic()
                if line.is_over:
                    break
                if num_bytes is None:
                    line.put_off(together, now)
                    break
                if num_bytes:
                    line.took(num_bytes, began, now)
                    line.meter.gone(num_bytes, now)
                    if lane.on_uplink and self.goes_to_narrow_lines:
                        self._uplink.begin_anew(now)  # nobody has all of it
                    elif lane.on_uplink:
                        self._uplink.gone(num_bytes, now)
                if not self._stays(lane):
                    break
                self._leaves(lane)
                self._begin()
        finally:
            self._has_left(lane)
            lane.end(time.monotonic())
            if not line.is_over:
                self._begin()

    async def _send_off(self, peer: PeerId, together: list[Parcel], lane: _Lane) -> int | None:
        """As `Send`. When they are there, or should they hang, others have this lane's share."""

        def left() -> None:
            self._has_left(lane)
            self._begin()

        def hangs() -> None:
            self._has_left(lane)
            lane.hangs(time.monotonic())
            self._begin()

        due_s = lane.line.longest_s(sum(len(one.body) for one in together))
        hanging = asyncio.get_running_loop().call_later(due_s, hangs)
        try:
            return await self._send(peer, together, OnItsWay(lambda: self._leaves(lane), left))
        finally:
            self._has_left(lane)
            hanging.cancel()

    def _leaves(self, lane: _Lane) -> None:
        """Its next message does, or the same once more."""
        if lane.on_uplink and not lane.is_leaving and not lane.line.is_over:
            lane.is_leaving = True
            lane.line.leaving += 1
            self._leaving += 1

    def _has_left(self, lane: _Lane) -> None:
        """Nothing of its message is on its way any more."""
        if lane.is_leaving and not lane.line.is_over:
            lane.line.leaving -= 1
            self._leaving -= 1
        lane.is_leaving = False
