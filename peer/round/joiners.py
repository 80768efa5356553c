"""Turns of those who catch up with a stage: what a donor's uplink carries to them, beside the round it is a member of.

While a round fills the uplink, all of them together have a third of it, in bytes, or a half where there is one other
member (`swarm.core.transfers.join_share`). (By lanes they had more, for one long message after another goes over
connections that know the line better than those of a round's short ones do: three fifths of an uplink of three, and
four fifths by one lane against sixteen.) On a slow uplink each answer is sent no faster than its part of that: one that
had the line for itself first, and then had to wait for what it had too much, left a round's connections no line to
learn for a quarter of a minute, and they were as slow for the rest of it.

Results go before states: first those of who is or was lately a member and was cut off, for rounds are short of it, then
of who asks to join. They have them before the next is made, where each of two with a half of this would be a round
behind for good. Of each of these kinds that waits, or has some on its way, the first has three quarters, whoever else
asks for ever: and the others the same of the rest. While a round is behind, all but those who were cut off have a
quarter of this: members wait for the round, and who joins for nothing that will not come a little later. What a round
leaves idle is theirs.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.ids import PeerId, Step
from swarm.core.transfers import (
    LEAST_BYTES_PER_S,
    MOST_DONORS,
    MOST_LANES,
    PIECE_BYTES,
    SHARED_BY,
    expected_s,
    join_share,
)
from swarm.network.transport import UNLIMITED, Message, Place

LATE_TIMES = 1.25
"""A round is behind whose step takes so many times as long as steps lately did with a member more, which is what who
joins may cost; or that has lost a contribution: what was reduced with it is reduced and sent once more."""
BEHIND_SHARE = 0.25
"""Of what else is theirs, while a round is behind."""
ROOM_TIMES = 3.0
"""So many times what a round's lines carry is left to it, if that is less than its share: one that is slow for a moment
shows that it is not, and what goes to lines that carry no more fills no uplink."""
LATELY = 8
"""Versions for which a member is known that left."""
LATER_SHARE = 0.25
"""Of the bytes, to all kinds after the first of those that there are."""
TAKES_S = 5.0
"""So long after an answer its peer may still be on its way to the next."""
FEW_LANES = 4
"""Of an uplink so slow that a connection more has much of it."""
OVERDUE_TIMES = 2.0
"""Of the time that an answer's bytes take at its part: it goes to who has a slower line."""
LEAST_HELD_BYTES_PER_S = LEAST_BYTES_PER_S / (2 * SHARED_BY)
"""At half of it an answer is given up on its way (`swarm.core.transfers`), and all the bytes of it were in vain."""
LOOK_S = 0.25
"""Between two looks whether a round still wants the uplink, while somebody waits for it."""


class Kind(IntEnum):
    """Of what somebody is given, first to last."""

    BACK = 0
    """A part of a result, to a member that was cut off, or who was one lately."""
    JOINING = 1
    """A part of a result, to who asks to join."""
    STATE = 2
    """A piece of a state, or of anything to anybody else."""


@dataclass(eq=False)
class _Turn:
    """Of one answer."""

    peer: PeerId
    is_of_state: bool
    place: asyncio.Future[None]
    kind: Kind = Kind.STATE
    """As which it went."""
    num_bytes: int = PIECE_BYTES
    """Once it is known; before, as many as most have."""
    is_known: bool = False
    may_bytes: float = 0.0
    """That could have gone since it began, by its part, as it was from one look to the next."""
    looked_at: float = 0.0


@dataclass
class _Ahead:
    """By how much a kind has had more than its part."""

    num_bytes: float = 0.0
    at: float = 0.0
    """Then."""


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
    def round_bytes_per_s(self) -> float:
        """That the lines carry to which rounds send now, as each was last measured."""

    def keeps_from_others(self) -> None:
        """Somebody else would have more of it now than it may."""


class Joiners:
    """Who catches up, and has or waits for an answer with bulk."""

    def __init__(self, steps: StageSteps, uplink: SharedUplink) -> None:
        self._steps = steps
        self._uplink = uplink
        self._waiting: list[_Turn] = []
        self._going: list[_Turn] = []
        self._ahead: dict[Kind, _Ahead] = {kind: _Ahead() for kind in Kind}
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

    def turn_of_state(self, peer: PeerId, _: Message) -> AbstractAsyncContextManager[Place]:
        """As `turn`, of a piece of a state."""
        return self.turn(peer, is_of_state=True)

    @contextlib.asynccontextmanager
    async def turn(
        self, peer: PeerId, *, is_of_state: bool = False, lacks_bytes: int | None = None
    ) -> AsyncIterator[Place]:
        """Whose answer goes next. `lacks_bytes`: of the stage's last result, this answer's among them, by its peer's
        word; None: it is of another."""
        turn = _Turn(peer, is_of_state, asyncio.get_running_loop().create_future())
        if self._kind(turn) == Kind.BACK:
            self._lacks_bytes[peer] = lacks_bytes
        self._waiting.append(turn)
        self._begin()
        try:
            await turn.place
            yield Place(lambda num_bytes: self._is_known(turn, num_bytes), lambda: self._most_of(turn))
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
    async def member_takes(self) -> AsyncIterator[Place]:
        """A member's answer, of a part that it lacks of a round it took part in: it has no turn, and meanwhile the
        others leave it as much of the uplink as they leave a round."""
        self._num_taking += 1
        try:
            yield UNLIMITED
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
        if lacks_bytes is None or not (waits or self._takes(peer)):
            return None
        num_donors = min(MOST_DONORS, max(1, len(self._steps.chain.members) - 1))
        return expected_s(lacks_bytes, num_donors * (self._uplink.uplink_bytes_per_s or LEAST_BYTES_PER_S))

    def _takes(self, peer: PeerId) -> bool:
        """Whether somebody who was a member lately takes results, or may be on its way to the next."""
        is_taking = any(turn.kind == Kind.BACK and turn.peer == peer for turn in self._going)
        return is_taking or time.monotonic() < self._took_at.get(peer, -math.inf) + TAKES_S

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

    def _waits(self, kind: Kind) -> bool:
        """Whether another answer of this kind is under way. Who waits does so as if that had all that is theirs, and
        not for ever if its peer's line is slow."""
        return any(going.kind == kind and not self._is_overdue(going) for going in self._going)

    def _is_overdue(self, going: _Turn) -> bool:
        return going.may_bytes >= OVERDUE_TIMES * going.num_bytes

    def _look_how_long(self) -> None:
        """They take that go."""
        now = time.monotonic()
        rates = [(turn, self._most_of(turn)) for turn in self._going]
        for turn, rate in rates:
            if math.isinf(rate):
                rate = (self._uplink.uplink_bytes_per_s or 0.0) / len(self._going)
            turn.may_bytes += rate * (now - turn.looked_at)
            turn.looked_at = now

    def _are_there(self) -> set[Kind]:
        """Kinds of which some wait, or go and do not hang, or are about to be asked for."""
        there = {self._kind(turn) for turn in self._waiting}
        there |= {turn.kind for turn in self._going if not self._is_overdue(turn)}
        is_back = any(time.monotonic() < at + TAKES_S for at in self._took_at.values())
        return there | {Kind.BACK} if is_back else there

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

    def _total(self, there: Collection[Kind]) -> float | None:
        """Bytes a second of all answers together; None: as many as there are lanes. Without those who were cut off it
        is less, while the round is behind, but for what that leaves idle."""
        wanted = self._wanted
        if wanted is None:
            return None
        is_spared = Kind.BACK not in there and self.is_behind
        total = wanted * join_share(len(self._steps.chain.members)) * (BEHIND_SHARE if is_spared else 1.0)
        return total if self._num_taking else max(total, wanted - ROOM_TIMES * self._uplink.round_bytes_per_s)

    def _bytes_per_s(self, kind: Kind) -> float | None:
        """Of the answers of one kind; None: as many as there are lanes. Between rounds, the next of which may wait for
        who was cut off, that has its part of a slow uplink beside the others."""
        there = self._are_there() | {kind}
        rest, spared = self._total(there), BEHIND_SHARE if self.is_behind else 1.0
        if rest is None and self._most <= FEW_LANES and kind != Kind.BACK and Kind.BACK in there:
            rest, spared = self._uplink.uplink_bytes_per_s, 1.0
        if rest is None:
            return None
        for first in sorted(there)[:-1]:
            later = rest * LATER_SHARE * (spared if first == Kind.BACK else 1.0)
            if kind == first:
                return rest - later
            rest = max(later, LEAST_HELD_BYTES_PER_S)
        return rest

    def _most_of(self, turn: _Turn) -> float:
        """Bytes a second at which an answer that goes is sent, at most."""
        rate = self._bytes_per_s(turn.kind)
        num_going = sum(going.kind == turn.kind for going in self._going)
        return math.inf if rate is None else max(rate / num_going, LEAST_HELD_BYTES_PER_S)

    def _kind(self, turn: _Turn) -> Kind:
        if turn.is_of_state:
            return Kind.STATE
        if any(turn.peer in members for members in self._lately):
            return Kind.BACK
        return Kind.JOINING if turn.peer in self._steps.joining else Kind.STATE

    def _num_going(self, peer: PeerId) -> int:
        return sum(turn.peer == peer for turn in self._going)

    def _gives(self, turn: _Turn) -> None:
        """An answer whose length is known goes, or has gone."""
        if turn.kind == Kind.BACK and turn.num_bytes:
            self._took_at[turn.peer] = time.monotonic()

    def _is_known(self, turn: _Turn, num_bytes: int) -> None:
        self._ahead[turn.kind].num_bytes += num_bytes - turn.num_bytes
        turn.num_bytes, turn.is_known = num_bytes, True
        self._gives(turn)

    def _is_ahead(self, kind: Kind) -> bool:
        """Whether they have had more than theirs. What they did not ask for in time is lost to them, but for as much as
        is theirs between two looks."""
        now, rate, ahead = time.monotonic(), self._bytes_per_s(kind), self._ahead[kind]
        since_s, ahead.at = now - ahead.at, now
        ahead.num_bytes = 0.0 if rate is None else max(-rate * LOOK_S, ahead.num_bytes - rate * since_s)
        return ahead.num_bytes > 0

    def _begin(self) -> None:
        """All who may go; of a kind who has the fewest under way. Each has one lane, whoever else takes others; on a
        narrow line one of a kind at a time has any."""
        self._look_how_long()
        is_short = are_kept = False
        for kind in Kind:
            while waiting := [turn for turn in self._waiting if self._kind(turn) == kind and self._may_go(turn)]:
                is_ahead = self._is_ahead(kind)
                if is_ahead or (self._is_narrow and self._waits(kind)):
                    is_short, are_kept = True, are_kept or is_ahead
                    break
                self._goes(min(waiting, key=lambda turn: self._num_going(turn.peer)), kind)
        held = {turn.kind for turn in self._going if math.isfinite(self._most_of(turn))}
        if are_kept or any(map(self._is_ahead, held)):  # else the line is slower, and they have less than may go
            self._uplink.keeps_from_others()
        if is_short or held:
            self._look_again()

    def _may_go(self, turn: _Turn) -> bool:
        return not turn.place.done() and (len(self._going) < self._most or not self._num_going(turn.peer))

    def _goes(self, turn: _Turn, kind: Kind) -> None:
        self._waiting.remove(turn)
        self._going.append(turn)
        turn.kind, turn.looked_at = kind, time.monotonic()
        self._ahead[kind].num_bytes += turn.num_bytes
        turn.place.set_result(None)

    def _look_again(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._begin)
