"""A peer's manners as a guest on its owner's machine: whether to work, to pause, or to go away.

A pause begins no microbatch but keeps the peer a member of its stage, ready to go on. Away, it has left the run and
uses nothing; it joins again by itself when it may. What is busy for a moment pauses; what is spent sends away.
"""

from dataclasses import dataclass
from enum import Enum

from swarm.core.owner.limits import OwnerLimits, clock

GIB = 1 << 30
QUIET_S = 60.0
"""Other programs must have been quiet this long before a pause for them ends."""
LEAVE_AFTER_S = 600.0
"""A longer pause would make the stage wait for a member that brings nothing: it leaves."""


class Conduct(Enum):
    WORK = "work"
    PAUSE = "pause"
    AWAY = "away"


@dataclass(frozen=True)
class Decision:
    conduct: Conduct
    reason: str = ""
    """For the owner; empty when the peer works."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the machine is like at a moment. None: it cannot be told here."""

    minute_of_day: int
    """Of the machine's local time."""
    on_battery: bool | None = None
    others_cpu_percent: float | None = None
    """Of all cores together, used by programs other than this."""
    others_gpu_percent: float | None = None
    month_bytes: int = 0
    disk_bytes: int = 0
    written_today_bytes: int = 0
    asked_to_pause: bool = False


class Guest:
    """Decides from reading to reading."""

    def __init__(self, limits: OwnerLimits) -> None:
        self.limits = limits
        """May be replaced at any time."""
        self._busy_until = float("-inf")
        self._busy_with = ""
        self._paused_since: float | None = None

    def decide(self, reading: Reading, *, now: float) -> Decision:
        """What to do from `now` on. Times are seconds of a clock that only grows."""
        spent = self._spent(reading)
        if spent:
            self._paused_since = None
            return Decision(Conduct.AWAY, spent)
        pause = self._pause(reading, now)
        if not pause:
            self._paused_since = None
            return Decision(Conduct.WORK)
        if self._paused_since is None:
            self._paused_since = now
        if now - self._paused_since > LEAVE_AFTER_S:
            return Decision(Conduct.AWAY, pause)
        return Decision(Conduct.PAUSE, pause)

    def _spent(self, reading: Reading) -> str:
        limits = self.limits
        if limits.hours is not None and not limits.hours.include(reading.minute_of_day):
            again = clock(limits.hours.next_start(reading.minute_of_day))
            return f"outside the hours {limits.hours}: again at {again}"
        if limits.month_gb is not None and reading.month_bytes >= limits.month_gb * 1e9:
            moved = reading.month_bytes / 1e9
            return f"{moved:.1f} GB moved this month of {limits.month_gb:g}: again next month, or raise month-gb"
        if limits.disk_gib is not None and reading.disk_bytes > limits.disk_gib * GIB:
            held = reading.disk_bytes / GIB
            return f"the state folder holds {held:.2f} GiB of {limits.disk_gib:g}: raise disk-gib, or empty its runs/"
        if limits.disk_writes_gib is not None and reading.written_today_bytes >= limits.disk_writes_gib * GIB:
            written = reading.written_today_bytes / GIB
            return f"{written:.1f} GiB written today of {limits.disk_writes_gib:g}: again tomorrow"
        return ""

    def _pause(self, reading: Reading, now: float) -> str:
        limits = self.limits
        if reading.asked_to_pause:
            return "you asked it to pause: `swarm resume` ends it"
        if limits.on_battery == "pause" and reading.on_battery:
            return "the machine is on battery"
        for what, used, most in (
            ("processor", reading.others_cpu_percent, limits.busy_cpu),
            ("GPU", reading.others_gpu_percent, limits.busy_gpu),
        ):
            if used is not None and most is not None and used > most:
                self._busy_until = now + QUIET_S
                self._busy_with = f"other programs use {used:.0f} % of the {what}, more than {most:g} %"
                return self._busy_with
        if now < self._busy_until and (limits.busy_cpu is not None or limits.busy_gpu is not None):
            return f"other programs have only just become quiet: again in {self._busy_until - now:.0f} s"
        return ""
