"""A step's leader's count of its stage's microbatches: who may start how many, and when the round closes.

The counts come from the members themselves and only pace the step; what weighs is certified in the round.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from swarm.core.ids import PeerId, Step
from swarm.core.pipeline.allowances import Allowances


@dataclass(frozen=True)
class MemberReport:
    """What a member has done in a step so far; it replaces the member's earlier report."""

    num_done: int
    """Microbatches accumulated."""
    num_in_flight: int = 0
    """Stage 0: granted and started, not yet done."""
    num_wanted: int = 0
    """Stage 0: more that the member would start now."""
    num_passed_on: int = 0
    """Stage 0: of those in flight, how many have left for the next stage."""
    is_over: bool = False
    """Stage 0: the next stage has closed the step."""

    @property
    def takes_part(self) -> bool:
        """It does not pause."""
        return bool(self.num_in_flight or self.num_wanted)


@dataclass(frozen=True)
class Closing:
    """The round is to close, and why."""

    reason: str


RESERVED_S = 0.5
"""How long a step keeps a share for a member that has not reported."""
EASE = 2
"""So many times a step's work the sources may have together, so that the quick ones can take the slow ones' part."""
MOST_BEHIND = 4
"""The last members are waited for so many times as long as all others took for all of theirs; no more times than the
microbatches that they are lent."""


@dataclass
class StepProgress:
    """One step of one stage as its leader sees it. Times are seconds of the caller's clock.

    Grants are absolute (how many in all) and only grow, so a lost or repeated answer does no harm. Together they never
    exceed the target. What a lost source had passed on is done without it, and counts in the later stages: the step
    does with so many less at stage 0. What else it held is granted again; where there are no later stages, all of it.

    So is what a member still holds where at least as many others are done, after a time that goes by theirs: nobody
    keeps a step open by what it was granted. And who brought nothing home of late is granted little
    (`swarm.core.pipeline.allowances`): the others have the rest at once.
    """

    step: Step
    is_source: bool
    target_microbatches: int
    step_s: float
    straggler_s: float
    is_last: bool = False
    """Also the last stage: what a lost member had done is nowhere."""
    most_of: Callable[[PeerId], int] | None = None
    """Stage 0: how many microbatches of a member count; None: however many it does."""
    allowances: Allowances | None = None
    """How many microbatches a member is lent at stage 0, and believed to have done; None: however many it says."""
    _reports: dict[PeerId, MemberReport] = field(default_factory=dict)
    _granted: dict[PeerId, int] = field(default_factory=dict)
    _void: dict[PeerId, int] = field(default_factory=dict)
    """Stage 0: of lost members, what others do not begin again."""
    _awaited: set[PeerId] = field(default_factory=set)
    _passed_over: set[PeerId] = field(default_factory=set)
    """Stage 0: whose grants went to others; what they bring all the same counts."""
    _opened_at: float | None = None
    _grants_from: float | None = None
    _reserved: set[PeerId] = field(default_factory=set)
    _reserved_each: int = 0
    _reserved_until: float = 0.0
    _grew_at: float | None = None
    _most_done: int = 0
    _over_for: set[PeerId] = field(default_factory=set)
    """Stage 0: to whom the next stage has closed the step."""
    _over_at: float | None = None
    """Since when it has to somebody; at later stages, since when the stage before has closed the step."""
    _full_at: float | None = None

    def reserve(self, members: Iterable[PeerId], *, now: float) -> None:
        """The step opens for these: an equal share is kept for each until it has reported, for a moment at most.

        Without it the first to report would take all of a small step.
        """
        self._reserved = set(members)
        self._reserved_each = self.target_microbatches // max(1, len(self._reserved))
        self._reserved_until = now + RESERVED_S
        self._opened_at = now

    def expect(self, members: Iterable[PeerId], *, now: float) -> None:
        """This peer leads from now on, after another: it grants nothing before all have reported what they hold.

        Whoever has not within `straggler_s` is not waited for.
        """
        self._awaited = set(members) - set(self._reports)
        self._opened_at = now
        self._grants_from = now + self.straggler_s

    def has_heard(self, peer_id: PeerId) -> bool:
        """Whether the member has said that it is at this step."""
        return peer_id in self._reports

    def report(self, peer_id: PeerId, report: MemberReport, *, now: float) -> int:
        """Take a member's report; at stage 0, the number of microbatches it may have started in all."""
        report = self._believed(peer_id, report)
        self._reports[peer_id] = report
        self._awaited.discard(peer_id)
        self._reserved.discard(peer_id)
        self._void.pop(peer_id, None)
        started = report.num_done + report.num_in_flight
        if report.is_over and self.is_source:
            self._over_for.add(peer_id)
            self._over_at = now if self._over_at is None else self._over_at
        granted = max(started, self._granted.get(peer_id, 0))
        if peer_id in self._passed_over:
            self._granted[peer_id] = granted = report.num_done
        elif not report.takes_part or peer_id in self._over_for:
            granted = started  # it is pausing, or takes the step to be over: what it left is for others
        self._granted[peer_id] = granted
        if self.num_done > self._most_done:
            self._most_done, self._grew_at = self.num_done, now
        if self.is_source:
            self._pass_over_the_last(now)
        if self.is_source and peer_id not in self._passed_over:
            free = self._to_do - sum(self._granted.values())
            if now < self._reserved_until:
                free -= self._reserved_each * len(self._reserved)
            if free > 0 and self._may_grant(peer_id, now):
                wanted = min(started + report.num_wanted, self._most_granted(peer_id))
                if self.most_of is not None:
                    wanted = min(wanted, self.most_of(peer_id))
                self._granted[peer_id] += min(free, max(0, wanted - granted))
        if self.num_done < self._to_do:
            self._full_at = None
        elif self._full_at is None:
            self._full_at = now
        return self._granted[peer_id]

    def lost(self, peer_id: PeerId) -> None:
        """The member is gone with its sum. At most half of a step is given up with lost members."""
        report = self._reports.pop(peer_id, None)
        self._granted.pop(peer_id, None)
        self._awaited.discard(peer_id)
        self._reserved.discard(peer_id)
        if self.is_source and not self.is_last and report is not None:
            void = report.num_done + min(report.num_passed_on, report.num_in_flight)
            if sum(self._void.values()) + void <= self.target_microbatches // 2:
                self._void[peer_id] = void
        if self.num_done < self._to_do:
            self._full_at = None

    def closed_before(self, *, now: float) -> None:
        """At a later stage: the stage before takes no more of the step, so nothing more will come of it."""
        assert not self.is_source
        self._over_at = now if self._over_at is None else self._over_at

    def _pass_over_the_last(self, now: float) -> None:
        """Where at least as many others have ended all of theirs."""
        if self._grew_at is None or self._opened_at is None:
            return
        behind = {peer for peer, granted in self._granted.items() if granted > self._reports[peer].num_done}
        times = min(MOST_BEHIND, max(map(self._lent, behind), default=0))
        if now < self._grew_at + max(self.straggler_s, times * (self._grew_at - self._opened_at)):
            return
        num_others = sum(1 for peer, granted in self._granted.items() if granted and peer not in behind)
        if len(behind) <= num_others:
            self._passed_over |= behind
            self._granted |= {peer: self._reports[peer].num_done for peer in behind}

    def _believed(self, peer_id: PeerId, report: MemberReport) -> MemberReport:
        """Of what a member says that it did and holds, as much as it may have: one alone has never done all of a step.

        Else it would close one after the other before anybody had brought anything, and nothing would tell it apart.
        """
        if self.allowances is None:
            return report
        alone = self._lent_to_others(peer_id) == 0
        most = min(self._most_granted(peer_id), self._to_do if alone else self._to_do - 1)
        most = max(self._granted.get(peer_id, 0), most)
        num_done = min(report.num_done, most)
        return replace(report, num_done=num_done, num_in_flight=min(report.num_in_flight, most - num_done))

    def _most_granted(self, peer_id: PeerId) -> int:
        """More than it is lent only as far as all who take part may not have enough to do the step's work twice."""
        if self.allowances is None:
            return self._to_do
        lent, enough = self._lent(peer_id), EASE * self._to_do
        in_all = lent + self._lent_to_others(peer_id)
        return lent if in_all >= enough else -(-lent * enough // in_all) if in_all else self._to_do

    def _lent(self, peer_id: PeerId) -> int:
        return self._to_do if self.allowances is None else self.allowances.of(peer_id)

    def _lent_to_others(self, peer_id: PeerId) -> int:
        """Who take part."""
        taking_part = {peer for peer, report in self._reports.items() if report.takes_part or not self.is_source}
        others = (taking_part | self._reserved) - self._passed_over - {peer_id}
        return sum(map(self._lent, others))

    def _may_grant(self, peer_id: PeerId, now: float) -> bool:
        if peer_id in self._over_for:
            return False
        return not self._awaited or self._grants_from is None or now >= self._grants_from

    @property
    def _to_do(self) -> int:
        """Microbatches that are to come home."""
        return self.target_microbatches - sum(self._void.values())

    @property
    def num_done(self) -> int:
        return sum(report.num_done for report in self._reports.values())

    @property
    def num_open(self) -> int:
        """Granted microbatches that are not done."""
        return sum(self._granted.values()) - self.num_done

    @property
    def is_exhausted(self) -> bool:
        """Stage 0: every microbatch of the step is granted; whoever wants more goes on with the next step."""
        return self._is_over_for_all or sum(self._granted.values()) >= self._to_do

    @property
    def _is_over_for_all(self) -> bool:
        """Stage 0: whether the next stage has closed the step for everybody who could have more of it.

        One member's word costs the step nothing: the others try.
        """
        if self._over_at is None or self._awaited:
            return False
        is_free = sum(self._granted.values()) < self._to_do
        others = set(self._reports) - self._over_for - self._passed_over
        return not any(
            self._granted[peer] > self._reports[peer].num_done
            or (is_free and self._reports[peer].num_wanted and self._most_granted(peer) > self._granted[peer])
            for peer in others
        )

    @property
    def num_in_flight(self) -> int:
        return sum(report.num_in_flight for report in self._reports.values())

    def closing(self, *, now: float) -> Closing | None:
        """The reason to close the round now, if there is one."""
        if self.num_done >= self._to_do:
            if not self.is_source or self.num_open <= 0:
                return Closing(f"all of {self._to_do} microbatches are in")
            if self._full_at is not None and now >= self._full_at + self.straggler_s:
                return Closing(f"{self.num_open} stragglers are late by {self.straggler_s:.1f} s")
        if self._over_at is not None and self.is_source:
            # Downstream takes no more of this step: what is in flight is all that can still come.
            is_late = now >= self._over_at + self.straggler_s
            if (self._is_over_for_all and (is_late or not self.num_in_flight)) or now >= self._over_at + self.step_s:
                return Closing(f"the next stage has closed step {self.step} with {self.num_done} microbatches in")
        elif (quiet_from := self._quiet_from) is not None and now >= quiet_from + self.straggler_s:
            # The rest was lost, or whoever did it does not say so, or says more than can be believed.
            return Closing(f"the stage before has closed step {self.step} with {self.num_done} microbatches in")
        if self._grew_at is not None and now >= self._grew_at + self.step_s:
            return Closing(f"{self.num_done} microbatches, and none for {self.step_s:.0f} s")
        return None

    @property
    def _quiet_from(self) -> float | None:
        """At later stages, since when nothing was done and nothing more is sent."""
        if self.is_source or self._over_at is None:
            return None
        return self._over_at if self._grew_at is None else max(self._over_at, self._grew_at)

    def next_deadline(self) -> float | None:
        """When `closing` may change without a report."""
        times = [
            start + wait
            for start, wait in (
                (self._grew_at, self.step_s),
                (self._over_at if self.is_source else self._quiet_from, self.straggler_s),
                (self._full_at, self.straggler_s),
            )
            if start is not None
        ]
        return min(times, default=None)


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

    def has_heard(self, peer_id: PeerId) -> bool:
        """Whether the member has said that it is at this step."""
        return peer_id in self._reports

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

    def closing(self, *, now: float) -> Closing | None:
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
