"""How many messages go over an uplink at a time, where those that its rate tells are too few.

How many go follows from how fast it was, and the other way round where each answer takes long. A line of 2.5 MB/s whose
answers took 0.3 s, as they do behind others' full uplinks, was held for one of 0.1 MB/s for half a minute, and one
whose answers took 0.5 s for a round. So an uplink that has no lane left for what waits is given twice as many now and
then, and keeps them for a minute if more goes for it; then for another, unless half of them bring as much.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TURNS = 2
"""So many messages of each lane are counted where numbers of lanes are compared, after those under way before."""
MORE, NO_LESS = 1.4, 0.9
"""Of what goes with twice the lanes, over what went, and with half of them: what is less than the first is chance, and
what is more than the second."""
TRY_AGAIN_S, SELDOM_S = 20.0, 120.0
"""After more lanes brought nothing; twice as long after each such time, up to the second."""
SLOWER = 2.0
"""A line that carries so many times less than it was held for has lanes of what it was: none are tried on top."""
KEPT_S = 60.0
LONGEST_TRIAL_S = 10.0
ANOTHER_LINE = 4.0
"""A line so many times faster or slower than before is another one: what was found of it holds no more."""


@dataclass
class _Trial:
    """Of a number of lanes."""

    lanes: int
    before: int
    reference: float | None
    """Bytes a second that went with as many as before; None: that is measured first."""
    fewer: bool
    """It is tried whether half of them bring as much."""
    run_in: int
    """Messages that were under way when it began."""
    began: float
    num_gone: int = 0

    def is_over(self, now: float) -> bool:
        return now >= self.began + LONGEST_TRIAL_S


class _Found(NamedTuple):
    """More lanes than usual, that are worth it."""

    lanes: int
    rate: float
    """Bytes a second that went by them."""
    until: float


@dataclass
class Lanes:
    """Of one uplink. Times are seconds of the caller's clock."""

    usual: Callable[[float], int]
    """Where so many bytes go a second."""
    most: int
    _found: _Found | None = None
    _trial: _Trial | None = None
    _is_short: bool = False
    _try_at: float = -math.inf
    _pause_s: float = TRY_AGAIN_S
    _rate_tried: float = 0.0
    """When more lanes last brought nothing."""

    def of(self, bytes_per_s: float) -> int:
        """How many there are now, where so many bytes go a second."""
        usual = self.usual(bytes_per_s)
        if self._trial is not None:
            return max(usual, self._trial.lanes)
        found = self._found
        return max(usual, found.lanes) if found is not None and _is_like(bytes_per_s, found.rate) else usual

    def short(self) -> None:
        """Something waits for a lane."""
        self._is_short = True

    def forget(self, now: float) -> None:
        """What goes now cannot be compared with what went."""
        if self._trial is not None and self._trial.reference is not None:
            self._pause(self._trial.reference, now)
        self._trial, self._is_short = None, False

    def runs_in(self, now: float) -> bool:
        """One message more has gone. Whether it is of those that were under way when a trial began."""
        trial = self._trial
        if trial is None:
            return False
        trial.num_gone += 1
        return trial.num_gone <= trial.run_in and not trial.is_over(now)

    def is_decided(self, now: float) -> bool:
        """Whether enough has gone to be measured, as far as trials go."""
        trial = self._trial
        return trial is None or trial.num_gone >= trial.run_in + TURNS * trial.lanes or trial.is_over(now)

    def measured(self, rate: float, before: float | None, busy: int, now: float) -> float | None:
        """So many bytes a second have gone, with so many messages under way, where `before` went. What they show by
        themselves of how fast the line is, if that is more than it was held for."""
        trial, self._trial = self._trial, None
        is_short, self._is_short = self._is_short, False
        if trial is None:
            self._begin(rate, before, busy, now, is_short=is_short)
            return None
        if trial.num_gone < trial.run_in + trial.lanes:
            self._pause(rate, now)  # a line so slow shows nothing in the time of a trial, and keeps nothing for it
            if trial.fewer:
                self._found = None
            return None
        if trial.reference is None:
            if not trial.fewer and _is_falling(rate, before):
                return None
            self._tries_next(trial, rate, busy, now, goes_on=is_short)
            return None
        if trial.fewer:
            lanes, rate = (trial.lanes, rate) if rate > NO_LESS * trial.reference else (trial.before, trial.reference)
            self._found = _Found(lanes, rate, now + KEPT_S) if lanes > self.usual(rate) else None
            return None
        if rate < MORE * trial.reference:
            self._pause(rate, now)
            return None
        self._found, self._pause_s = _Found(trial.lanes, rate, now + KEPT_S), TRY_AGAIN_S
        self._tries_next(trial, rate, busy, now, goes_on=is_short)
        return min(rate, trial.reference * trial.lanes / trial.before)

    def _tries_next(self, trial: _Trial, rate: float, busy: int, now: float, *, goes_on: bool) -> None:
        """Twice as many lanes as those that brought this rate, or half as many, if something still waits for one."""
        lanes = max(self.usual(rate), trial.lanes // 2 if trial.fewer else min(self.most, 2 * trial.lanes))
        if goes_on and lanes != trial.lanes:
            self._trial = _Trial(lanes, trial.lanes, rate, trial.fewer, busy, now)
        elif trial.fewer:
            self._found = None

    def _begin(self, rate: float, before: float | None, busy: int, now: float, *, is_short: bool) -> None:
        if before is None:
            return
        is_due = self._found is not None and now >= self._found.until
        if self._found is not None and (not _is_like(before, self._found.rate) or (is_due and not is_short)):
            self._found, is_due = None, False
        if self._rate_tried and not _is_like(before, self._rate_tried):
            self._try_at, self._rate_tried = now, 0.0
        # While a line is found faster each time, it has more lanes each time; while slower, fewer.
        is_steady = rate < MORE * before and not _is_falling(rate, before)
        if busy and is_short and (is_due or (now >= self._try_at and is_steady)):
            lanes = self.of(before)
            self._trial = _Trial(lanes, lanes, None, is_due, busy, now)

    def _pause(self, rate: float, now: float) -> None:
        self._try_at, self._pause_s = now + self._pause_s, min(SELDOM_S, 2 * self._pause_s)
        self._rate_tried = rate


def _is_falling(rate: float, before: float | None) -> bool:
    """Whether the lanes that there are are those of a line that was faster."""
    return before is not None and before >= SLOWER * rate


def _is_like(rate: float, other: float) -> bool:
    return other / ANOTHER_LINE <= rate <= other * ANOTHER_LINE
