"""Turns of those who catch up with a stage: what a donor's uplink carries to them, beside the round it is a member of.

Who joins is as good as one member more, and takes as many lanes as the donor's uplink has for one. Where several do,
they share them: a stage of three of which one is new and one comes back would else have a third of its two remaining
members' lines left for its rounds. And while a round is behind, each is sent one message at a time, with a rest after
it: all others wait for the round, and who joins for nothing that will not come a little later. Without the rest one
long message after another, on a warm connection, had four fifths of an uplink beside sixteen lanes of a round's short
ones, whose connections know the line less well.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.ids import PeerId, Step

LATE_TIMES = 1.25
"""A round is behind whose step takes so many times as long as steps lately did with a member more, which is what who
joins may cost; or that has lost a contribution: what was reduced with it is reduced and sent once more, and in the
round after it whoever that was fetches this one's result as well."""
BEHIND_SHARE = 0.25
"""Of the time while a round is behind, that in which something goes to one of them."""
LONGEST_REST_S = 4.0
"""Who takes longer for a message has a slow line itself, and fills no uplink."""


class Joiners:
    """Who is no member, and has or waits for an answer with bulk."""

    def __init__(self, steps: StageSteps, lanes: Callable[[], int]) -> None:
        """`lanes`: as many as this peer's uplink has for one peer."""
        self._steps = steps
        self._lanes = lanes
        self._busy: Counter[PeerId] = Counter()
        self._waiting: list[tuple[PeerId, asyncio.Future[None]]] = []
        self._rest_until: dict[PeerId, float] = {}

    @contextlib.asynccontextmanager
    async def turn(self, peer: PeerId) -> AsyncIterator[None]:
        """Whose answer goes next. Members wait for nobody."""
        if peer in self._steps.chain.members:
            yield
            return
        place, begun_at = asyncio.get_running_loop().create_future(), time.monotonic()
        self._waiting.append((peer, place))
        self._begin()
        try:
            await place
            begun_at = time.monotonic()
            yield
        finally:
            if place.cancelled():
                self._waiting.remove((peer, place))
            else:
                if self.is_behind:
                    self._rest(peer, time.monotonic() - begun_at)
                self._busy -= Counter([peer])  # which forgets whoever has none
            self._begin()

    def turned(self, _: VersionTurned) -> None:
        """A round is over."""
        self._begin()

    @property
    def is_behind(self) -> bool:
        """Whether the present round is."""
        state = self._steps.open_step(Step(self._steps.version))
        if state is None or state.round is None or not state.round.is_closing:
            return False
        last = self._steps.context.results.get(int(self._steps.version) - 1)
        rosters = (state.round.roster, last[0].roster if last is not None else None)
        if any(roster is not None and roster.left_out for roster in rosters):
            return True
        usual_s, others = self._steps.usual_s, max(1, len(self._steps.chain.members) - 1)
        late_times = LATE_TIMES * (others + 1) / others
        return usual_s is not None and time.monotonic() > self._steps.turned_at + late_times * usual_s

    def _rest(self, peer: PeerId, took_s: float) -> None:
        """Its last answer took so long: its next one waits, while a round is behind."""
        sharing = len({*self._busy, *(other for other, _ in self._waiting)})
        rest_s = min(LONGEST_REST_S, took_s * (sharing / BEHIND_SHARE - 1))
        self._rest_until[peer] = time.monotonic() + rest_s
        asyncio.get_running_loop().call_later(rest_s, self._begin)

    def _begin(self) -> None:
        """All who may go, those first who have the fewest under way. Each has one lane, whoever else takes others."""
        now, is_behind = time.monotonic(), self.is_behind
        most = 0 if is_behind else self._lanes()
        self._rest_until = {peer: until for peer, until in self._rest_until.items() if is_behind and until > now}
        while waiting := [one for one in self._waiting if not one[1].done() and one[0] not in self._rest_until]:
            first = min(waiting, key=lambda one: self._busy[one[0]])
            peer, place = first
            if self._busy[peer] and self._busy.total() >= most:
                return
            self._busy[peer] += 1
            self._waiting.remove(first)
            place.set_result(None)
