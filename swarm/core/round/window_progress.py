"""A step's leader's count where each member takes a window of steps by itself: who is done, and when the round closes.

The counts come from the members themselves and only pace the step; what weighs is certified in the round.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.core.ids import PeerId, Step
from swarm.core.round.step_progress import Closing, MemberReport


@dataclass
class WindowProgress:
    """One step of windows as its leader sees it. Times are seconds of the caller's clock.

    Nobody waits for a grant: each takes the microbatches of its own window, which are so many. The round closes when
    all have done theirs, and a moment after half of them have: who is slower brings what it has.
    """

    step: Step
    microbatches_each: int
    step_s: float
    straggler_s: float
    _members: set[PeerId] = field(default_factory=set)
    """Whose windows are waited for."""
    _reports: dict[PeerId, MemberReport] = field(default_factory=dict)
    _grew_at: float | None = None
    _most_done: int = 0
    _half_at: float | None = None

    def reserve(self, members: Iterable[PeerId], *, now: float) -> None:
        """The step opens for these."""
        self._members |= set(members)

    def expect(self, members: Iterable[PeerId], *, now: float) -> None:
        """This peer leads from now on, after another: all of these may have windows."""
        self._members |= set(members)

    def report(self, peer_id: PeerId, report: MemberReport, *, now: float) -> int:
        """Take a member's report; the number of microbatches it may have started in all."""
        self._members.add(peer_id)
        self._reports[peer_id] = report
        if self.num_done > self._most_done:
            self._most_done, self._grew_at = self.num_done, now
        return self.microbatches_each

    def lost(self, peer_id: PeerId) -> None:
        """The member is gone with its window."""
        self._members.discard(peer_id)
        self._reports.pop(peer_id, None)

    @property
    def _num_full(self) -> int:
        return sum(report.num_done >= self.microbatches_each for report in self._reports.values())

    @property
    def num_done(self) -> int:
        return sum(report.num_done for report in self._reports.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether nobody is granted more."""
        return True

    def closing(self, *, now: float, synchronous: bool) -> Closing | None:
        """The reason to close the round now, if there is one."""
        num_full, num_members = self._num_full, len(self._members)
        if self._half_at is None and num_full and 2 * num_full >= num_members:
            self._half_at = now
        if num_full and num_full >= num_members:
            return Closing(f"all of {num_members} windows are done")
        if self._half_at is not None and self.num_done and now >= self._half_at + self.straggler_s:
            return Closing(f"{num_members - num_full} of {num_members} windows are cut short")
        if self._grew_at is not None and now >= self._grew_at + self.step_s:
            return Closing(f"{num_full} of {num_members} windows are done, and nothing for {self.step_s:.0f} s")
        return None

    def next_deadline(self) -> float | None:
        """When `closing` may change without a report."""
        times = ((self._grew_at, self.step_s), (self._half_at, self.straggler_s))
        return min((start + wait for start, wait in times if start is not None), default=None)
