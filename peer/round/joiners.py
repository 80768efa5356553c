"""Turns of those who catch up with a stage: what a donor's uplink carries to them, beside the round it is a member of.

While a round fills the uplink, all of them together have a third of it, in bytes, or a half where there is one other
member (`swarm.core.transfers.join_share`). (By lanes they had more, for one long message after another goes over
connections that know the line better than those of a round's short ones do: three fifths of an uplink of three, and
four fifths by one lane against sixteen.) Results go before states: first those of who is or was lately a member and
was cut off, for rounds are short of it, then of who asks to join. They have them before the next is made, where each of
two with a half of this would be a round behind for good. A quarter of the bytes is of who has waited longest, whoever
else asks for ever. While a round is behind, all but those who were cut off have a quarter of this: members wait for the
round, and who joins for nothing that will not come a little later. What a round leaves idle is theirs.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.ids import PeerId, Step
from swarm.core.transfers import LEAST_BYTES_PER_S, MOST_DONORS, MOST_LANES, PIECE_BYTES, expected_s, join_share
from swarm.network.transport import Message

LATE_TIMES = 1.25
"""A round is behind whose step takes so many times as long as steps lately did with a member more, which is what who
joins may cost; or that has lost a contribution: what was reduced with it is reduced and sent once more."""
BEHIND_SHARE = 0.25
"""Of what else is theirs, while a round is behind."""
BESIDE_NARROW_SHARE = 2 / 3
"""Theirs while a round has something for narrow lines alone. On a full uplink any line seems so: what goes to it waits
behind them, and its acknowledgements behind those whom its own peer gives bulk to."""
LATELY = 8
"""Versions for which a member is known that left."""
IN_ORDER_SHARE = 0.25
"""Of the bytes, to who asked first."""
TAKES_S, ASKS_S = 5.0, 1.0
"""So long after an answer its peer may still be on its way to the next; and is, if it wants one."""
FEW_LANES = 4
"""Of an uplink so slow that a connection more has much of it."""
OVERDUE_TIMES = 2.0
"""Of the time that an answer's bytes take at all that is theirs: it goes to who has a slower line."""
LOOK_S = 0.25
"""Between two looks whether a round still wants the uplink, while somebody waits for it."""


@dataclass(eq=False)
class _Turn:
    """Of one answer."""

    peer: PeerId
    is_of_state: bool
    place: asyncio.Future[None]
    began_at: float = math.inf
    num_bytes: int = PIECE_BYTES
    """Once it is known; before, as many as most have."""
    is_known: bool = False
    is_of_first: bool = False
    """It went when its peer had waited longest."""
    is_back: bool = False
    """It went as a part of a result to who was a member lately."""


class SharedUplink(Protocol):
    """This peer's, as its rounds know it."""

    @property
    def usual_lanes(self) -> int: ...

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """None while nobody knows."""

    @property
    def wanted_bytes_per_s(self) -> float | None:
        """As above, while rounds want any; None while they do not."""

    @property
    def goes_to_narrow_lines(self) -> bool:
        """All that rounds send now."""

    def keeps_from_others(self) -> None:
        """Somebody else would have more of it now than it may."""


class Joiners:
    """Who catches up, and has or waits for an answer with bulk."""

    def __init__(self, steps: StageSteps, uplink: SharedUplink) -> None:
        self._steps = steps
        self._uplink = uplink
        self._waiting: list[_Turn] = []
        self._going: list[_Turn] = []
        self._ahead_bytes, self._ahead_at = 0.0, 0.0
        """By so much they had more than theirs, then."""
        self._num_taking = 0
        """Members' answers that go."""
        self._looking: asyncio.TimerHandle | None = None
        self._lately = deque([steps.chain.members], maxlen=LATELY)
        """Members, by versions."""
        self._took_at: dict[PeerId, float] = {}
        """When who was a member lately was last given a part of a result."""
        self._lacks_bytes: dict[PeerId, int | None] = {}
        """That who was a member lately lacked of the stage's last result, as it said when it last asked for a part;
        None: it asked for one of another."""
        self._passed_at, self._given_until = 0.0, 0.0
        """When somebody was last passed, and until when the line has to do with what all were given."""
        self._owed_bytes = 0.0
        """By so much who waited longest had less than `IN_ORDER_SHARE`; less than none: more."""

    def turn_of_state(self, peer: PeerId, _: Message) -> AbstractAsyncContextManager[Callable[[int], None]]:
        """As `turn`, of a piece of a state."""
        return self.turn(peer, is_of_state=True)

    @contextlib.asynccontextmanager
    async def turn(
        self, peer: PeerId, *, is_of_state: bool = False, lacks_bytes: int | None = None
    ) -> AsyncIterator[Callable[[int], None]]:
        """Whose answer goes next; gives what is to be told how long that is. `lacks_bytes`: of the stage's last result,
        this answer's among them, by its peer's word; None: it is of another."""
        turn = _Turn(peer, is_of_state, asyncio.get_running_loop().create_future())
        if self._is_back(turn):
            self._lacks_bytes[peer] = lacks_bytes
        self._waiting.append(turn)
        self._begin()
        try:
            await turn.place
            yield lambda num_bytes: self._is_known(turn, num_bytes)
        finally:
            if turn.place.cancelled():
                self._waiting.remove(turn)
            else:
                if not turn.is_known:
                    self._is_known(turn, 0)
                self._gives(turn)
                self._going.remove(turn)
            self._begin()

    @contextlib.asynccontextmanager
    async def member_takes(self) -> AsyncIterator[Callable[[int], None]]:
        """A member's answer, of a part that it lacks of a round it took part in: it has no turn, and meanwhile the
        others leave it as much of the uplink as they leave a round."""
        self._num_taking += 1
        try:
            yield lambda _: None
        finally:
            self._num_taking -= 1
            self._begin()

    def turned(self, event: VersionTurned) -> None:
        """A round is over."""
        self._lately.append(event.chain.members)
        known = set().union(*self._lately)
        self._took_at = {peer: at for peer, at in self._took_at.items() if peer in known}
        self._lacks_bytes.clear()
        self._begin()

    def back_in_s(self, peer: PeerId) -> float | None:
        """How long somebody who was a member lately and takes the stage's last result at the moment takes for the rest
        of it, if its donors' uplinks are for that alone, and as fast as this one's; None: it takes none."""
        lacks_bytes, waits = self._lacks_bytes.get(peer), any(turn.peer == peer for turn in self._waiting)
        if lacks_bytes is None or not (waits or self._takes(peer, TAKES_S)):
            return None
        num_donors = min(MOST_DONORS, max(1, len(self._steps.chain.members) - 1))
        return expected_s(lacks_bytes, num_donors * (self._uplink.uplink_bytes_per_s or LEAST_BYTES_PER_S))

    def _takes(self, peer: PeerId, asks_again_s: float) -> bool:
        """Whether somebody who was a member lately takes results, or took one not longer ago."""
        is_taking = any(turn.is_back and turn.peer == peer for turn in self._going)
        return is_taking or time.monotonic() < self._took_at.get(peer, -math.inf) + asks_again_s

    @property
    def _most(self) -> int:
        """Answers at a time, but for each one's first: as many as the uplink has lanes for one peer."""
        return min(MOST_LANES, self._uplink.usual_lanes)

    @property
    def _is_narrow(self) -> bool:
        """Whether a round wants an uplink so slow that what goes beside has as much of it, and drops its packets."""
        return self._wanted is not None and self._most <= FEW_LANES

    @property
    def _wanted(self) -> float | None:
        """Bytes a second that members want, and that the uplink carries; None: none, or nobody knows."""
        return self._uplink.uplink_bytes_per_s if self._num_taking else self._uplink.wanted_bytes_per_s

    def _waits(self, turn: _Turn) -> bool:
        """Whether another answer is under way. Who waits does so as if that had all that is theirs, and not for ever if
        its peer's line is slow."""
        rate, now = self._bytes_per_s(turn), time.monotonic()
        return rate is not None and any(
            now < going.began_at + OVERDUE_TIMES * going.num_bytes / rate for going in self._going
        )

    def _is_passed(self, turn: _Turn) -> bool:
        """Whether others come first that have no answer waiting: one of theirs is under way all the time. Also between
        rounds, the next of which may wait for them."""
        if self._is_back(turn) or self._most > FEW_LANES:
            return False
        return any(self._takes(peer, ASKS_S) for peer in self._took_at if peer != turn.peer)

    def _pass(self, turn: _Turn) -> None:
        """What the others leave of what is theirs is owed as well: their own lines may be slow, or ask for little."""
        now = time.monotonic()
        idle_s = max(0.0, min(LOOK_S, now - max(self._passed_at, self._given_until)))
        self._passed_at = now
        self._owe(IN_ORDER_SHARE * self._share(turn) * idle_s)
        self._look_again()

    def _give(self, turn: _Turn, num_bytes: int) -> None:
        """So many more, or less, to a turn that goes."""
        self._ahead_bytes += num_bytes
        self._given_until = max(time.monotonic(), self._given_until) + num_bytes / self._share(turn)
        self._owe(num_bytes * (IN_ORDER_SHARE - turn.is_of_first))

    def _owe(self, num_bytes: float) -> None:
        """So much more, or less, to who has waited longest; never more than a piece, either way."""
        self._owed_bytes = min(max(-PIECE_BYTES, self._owed_bytes + num_bytes), PIECE_BYTES)

    @property
    def is_behind(self) -> bool:
        """Whether the present round is."""
        state = self._steps.open_step(Step(self._steps.version))
        if state is None or state.round is None or not state.round.is_closing:
            return False
        roster = state.round.roster
        if roster is not None and roster.left_out:
            return True
        usual_s, others = self._steps.usual_s, max(1, len(self._steps.chain.members) - 1)
        late_times = LATE_TIMES * (others + 1) / others
        return usual_s is not None and time.monotonic() > self._steps.turned_at + late_times * usual_s

    def _bytes_per_s(self, turn: _Turn) -> float | None:
        """Of all answers together, where this one is next; None: as many as there are lanes."""
        wanted = self._wanted
        if wanted is None:
            return None
        if self._uplink.goes_to_narrow_lines and not self._num_taking:
            return wanted * BESIDE_NARROW_SHARE
        is_spared = self.is_behind and not self._is_back(turn)
        return wanted * join_share(len(self._steps.chain.members)) * (BEHIND_SHARE if is_spared else 1.0)

    def _share(self, turn: _Turn) -> float:
        """Bytes a second that are theirs: all of the line, while no round wants it."""
        return self._bytes_per_s(turn) or self._uplink.uplink_bytes_per_s or LEAST_BYTES_PER_S

    def _is_back(self, turn: _Turn) -> bool:
        """Whether it is of a result, for a member that was cut off, or who was one lately."""
        return not turn.is_of_state and any(turn.peer in members for members in self._lately)

    def _rank(self, turn: _Turn) -> tuple[bool, bool, int]:
        """Whose is lowest goes first."""
        asks_to_join = not turn.is_of_state and turn.peer in self._steps.joining
        return (not self._is_back(turn), not asks_to_join, self._num_going(turn.peer))

    def _num_going(self, peer: PeerId) -> int:
        return sum(turn.peer == peer for turn in self._going)

    def _gives(self, turn: _Turn) -> None:
        """An answer whose length is known goes, or has gone."""
        if turn.is_back and turn.num_bytes:
            self._took_at[turn.peer] = time.monotonic()

    def _is_known(self, turn: _Turn, num_bytes: int) -> None:
        self._give(turn, num_bytes - turn.num_bytes)
        turn.num_bytes, turn.is_known = num_bytes, True
        self._gives(turn)

    def _is_ahead(self, turn: _Turn) -> bool:
        """Whether they have had more than theirs. What they did not ask for in time is lost to them, but for as much as
        is theirs between two looks."""
        now, rate = time.monotonic(), self._bytes_per_s(turn)
        since_s, self._ahead_at = now - self._ahead_at, now
        self._ahead_bytes = 0.0 if rate is None else max(-rate * LOOK_S, self._ahead_bytes - rate * since_s)
        return self._ahead_bytes > 0

    def _begin(self) -> None:
        """All who may go; of equals who has the fewest under way. Each has one lane, whoever else takes others; on a
        narrow line one at a time has any."""
        most = self._most

        def may_go(turn: _Turn) -> bool:
            return not turn.place.done() and (len(self._going) < most or not self._num_going(turn.peer))

        while waiting := list(filter(may_go, self._waiting)):
            first = min(waiting, key=self._rank)
            is_owed = self._owed_bytes > 0
            turn = waiting[0] if is_owed else first
            is_ahead = self._is_ahead(first)
            if is_ahead:
                self._uplink.keeps_from_others()
            if is_ahead or (self._is_narrow and self._waits(first)):
                self._look_again()
                return
            if not is_owed and self._is_passed(first):
                self._pass(first)
                return
            turn.is_back = self._is_back(turn)
            self._waiting.remove(turn)
            self._going.append(turn)
            turn.began_at = time.monotonic()
            turn.is_of_first = turn is waiting[0]
            self._give(turn, turn.num_bytes)
            turn.place.set_result(None)

    def _look_again(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._begin)
