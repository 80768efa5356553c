"""How many messages go over a line at a time, where those that its rate tells are too few.

How many go follows from how fast the line was, and the other way round where each answer takes long. A line of 2.5 MB/s
whose answers took 0.3 s, as they do behind others' full uplinks, was held for one of 0.1 MB/s for half a minute, and
one whose answers took 0.5 s for a round. So a line that has no lane left for what waits is given twice as many, and
keeps them if more goes for it; now and then it is given half as many, and keeps to those if no less goes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

TURNS = 2
"""So many messages of each lane are counted where numbers of lanes are compared, after those under way before."""
MORE, NO_LESS = 1.25, 0.9
"""Of what goes with twice the lanes, over what went, and with half of them: what is less than the first is chance, and
what is more than the second."""
TRY_AGAIN_S, SELDOM_S = 20.0, 120.0
"""After a number was tried that was no better; twice as long after each such, up to the second."""
SLOWER = 0.5
"""What brings less than that of what it brought is tried again at once: it may be for its lanes."""
LONGEST_TRIAL_S = 10.0


@dataclass
class _Trial:
    """Of a number of lanes."""

    lanes: int
    before: int
    reference: float | None
    """Bytes a second that went with as many as before; None: that is measured first."""
    run_in: int
    """Messages that were under way when it began."""
    began: float
    num_gone: int = 0

    def is_over(self, now: float) -> bool:
        return now >= self.began + LONGEST_TRIAL_S


@dataclass
class Lanes:
    """Of one line. Times are seconds of the caller's clock."""

    usual: Callable[[float], int]
    """Of a line of so many bytes a second."""
    first: int
    """Before it was measured."""
    most: int
    _per_rate: float = 0.0
    """For each byte a second, found to be worth it. 0.0: none but the usual."""
    _trial: _Trial | None = None
    _is_short: bool = False
    _upwards: bool = True
    """More are tried next, or fewer."""
    _try_at: float = -math.inf
    _pause_s: float = TRY_AGAIN_S

    def of(self, bytes_per_s: float | None) -> int:
        """How many there are now, on a line that is so fast."""
        if bytes_per_s is None:
            return self.first
        if self._trial is not None:
            return self._trial.lanes
        return max(self.usual(bytes_per_s), min(self.most, round(self._per_rate * bytes_per_s)))

    def short(self) -> None:
        """Something waits for a lane."""
        self._is_short = True

    def forget(self) -> None:
        """What goes now cannot be compared with what went."""
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

    def measured(self, rate: float, before: float | None, busy: int, now: float) -> bool:
        """So many bytes a second have gone, with so many messages under way, on a line that was held for one of
        `before`. Whether they show, by themselves, that it is faster than that."""
        trial, self._trial = self._trial, None
        is_short, self._is_short = self._is_short, False
        if trial is None:
            if before is not None and rate < SLOWER * before:
                self._try_at, self._pause_s = now, TRY_AGAIN_S
            # While a line is found faster each time, it has more lanes each time.
            if is_short and before is not None and rate < MORE * before and now >= self._try_at:
                lanes = self.of(before)
                self._trial = _Trial(lanes, lanes, None, busy, now)
            return False
        usual = self.usual(rate)
        if trial.reference is None:
            self._tries_next(trial, rate, busy, now, goes_on=is_short)
            return False
        is_faster = self._upwards and rate > MORE * trial.reference
        if is_faster or (not self._upwards and rate > NO_LESS * trial.reference):
            self._per_rate = trial.lanes / rate if trial.lanes > usual else 0.0
            self._pause_s = TRY_AGAIN_S
            self._tries_next(trial, rate, busy, now, goes_on=is_short)
        else:
            self._per_rate = trial.before / trial.reference if trial.before > self.usual(trial.reference) else 0.0
            self._upwards = not self._upwards
            self._pause(now)
        return is_faster

    def _tries_next(self, trial: _Trial, rate: float, busy: int, now: float, *, goes_on: bool) -> None:
        usual = self.usual(rate)
        self._upwards |= trial.lanes <= usual
        lanes = min(self.most, 2 * trial.lanes) if self._upwards else max(usual, trial.lanes // 2)
        if goes_on and lanes != trial.lanes:
            self._trial = _Trial(lanes, trial.lanes, rate, busy, now)
        else:
            self._pause(now)

    def _pause(self, now: float) -> None:
        self._try_at, self._pause_s = now + self._pause_s, min(SELDOM_S, 2 * self._pause_s)
