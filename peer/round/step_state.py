"""What a peer holds of one open step: each group of fields is written by one part of the round alone."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from peer.pipeline.grants import StepGrants
from peer.round.mail.fragments import Fragments
from peer.state.replica import Accumulation
from swarm.core.ids import PeerId, Step
from swarm.core.round.averaging_round import AveragingRound, RoundFacts
from swarm.core.round.contribution import ReducedPart, Result
from swarm.core.round.mail.desk import Desk
from swarm.core.round.step_progress import StepProgress, WindowProgress
from swarm.core.round.voting import Phase, Reconfiguration, Vote
from swarm.core.round.words import Reduction
from verification.round.papers import Bytes, Papers

PartDigest: TypeAlias = tuple[int, bytes]
"""The number of a part, and the digest of what it was encoded to."""


@dataclass
class StepParts:
    """The step's parts that are here; written by `peer.round.part_exchange`."""

    own: list[memoryview] = field(default_factory=list)
    """This peer's contribution, by number; empty until it is committed to, and if it has none."""
    received: dict[tuple[int, PeerId], Bytes] = field(default_factory=dict)
    """Parts of contributions by contributor, its own among them; each has the digest that was committed to."""
    committed: dict[tuple[int, PeerId], bytes] = field(default_factory=dict)
    """That digest, of others': whoever leads may have another contribution of it certified later."""
    fragments: Fragments = field(default_factory=Fragments)
    """Of parts that are not here whole."""
    reduced: dict[PartDigest, Bytes] = field(default_factory=dict)
    """Reduced parts and cohorts' shares, made here or by others."""
    reductions: dict[ReducedPart, Reduction] = field(default_factory=dict)
    """Their reducers' signed words for the reduced parts that came or were made here; checked."""
    claimed: dict[ReducedPart, Reduction] = field(default_factory=dict)
    """Reducers' signed words for parts of the last proposed result of which nothing is here, or other words; checked
    but for the bytes."""
    fetching: set[PartDigest] = field(default_factory=set)
    """Parts of the result for which their holders are being asked."""
    silent: set[PeerId] = field(default_factory=set)
    """Who let such a question run out, or was not there: it is asked last."""
    are_caught_up_on: bool = False
    """Those of the result are fetched by `peer.state.catch_up`, which takes what is here, and by the round no more."""

    def received_as(self, part: int, contributor: PeerId, digest: bytes) -> Bytes | None:
        """Another's part of this digest, if that is what is here."""
        of = part, contributor
        return self.received.get(of) if self.committed.get(of) == digest else None

    def of_result(self, result: Result) -> list[Bytes]:
        """The bytes of a certified result, all of which are here."""
        return [b"" if part.is_empty else self.reduced[part.part, part.digest] for part in result.parts]


@dataclass
class Ungranted:
    """How long this peer has wanted work of one leader of the step and had none to begin, all times together: a little
    now and then is no step."""

    _leader: PeerId | None = None
    _seconds: float = 0.0
    _since: float | None = None

    def look(self, leader: PeerId, *, has_some: bool, now: float) -> None:
        """The leader has answered."""
        self._seconds = self.seconds(now=now) if leader == self._leader else 0.0
        self._leader, self._since = leader, None if has_some else now

    def seconds(self, *, now: float) -> float:
        return self._seconds + (0.0 if self._since is None else now - self._since)


@dataclass
class StepSheets:
    """This member's large messages of the step's round; written by `peer.round.mail.ropes`."""

    desk: Desk
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a sheet came, or the rope of a message that is waited for, and replaced."""

    def notify(self) -> None:
        self.came.set()
        self.came = asyncio.Event()


@dataclass
class StepState:
    """Everything this peer holds of one open step."""

    step: Step
    leaders: tuple[PeerId, ...]
    """Who leads view 0, view 1 and so on; while there is a round, it says who leads."""
    progress: StepProgress | WindowProgress
    """How far the members are, where this peer leads; written by `step_progress` and `presence`."""
    grants: StepGrants
    """What the leader lets this peer start, at stage 0; how much by `step_progress`, the rest by `turns`."""
    is_over: bool = False
    """The next stage has closed the step to this source."""
    heard_at: dict[PeerId, float] = field(default_factory=dict)
    """When each member last reported, by the leader; or was found to answer. By `step_progress`."""
    waits_since: float | None = None
    """When this peer last had something more to bring to the step's round, or first heard of another that has waited
    for it in vain: its leader has a step's time to begin it, from then on. By `step_progress`; by `driver` where others
    say it."""
    refused_since: float | None = None
    """Since when its leader, who lives, takes none of this peer's reports. By `step_progress`."""
    ungranted: Ungranted = field(default_factory=Ungranted)
    """By `step_progress`."""
    had_done: int = 0
    """Microbatches, at that time. By `step_progress`."""
    view: int = 0
    """The view that this peer takes to be the present one before there is a round. By `presence`."""
    facts: RoundFacts | None = None
    """What the round begins from: known once the stage is at the step's version. By `rounds`."""
    round: AveragingRound | None = None
    """This member's side of the round, made of `facts`; None before, and for a peer that is no member. By `rounds`."""
    parts: StepParts = field(default_factory=StepParts)
    sheets: StepSheets | None = None
    """None before there is a round, and for a peer that is no member. By `rounds`."""
    late_until: dict[PeerId, float] | None = None
    """Until when who was left out lately and is on its way back is waited for, where this peer leads; known once
    nothing else is. By `step_progress`."""
    closed_at: float | None = None
    """When the round asked for this peer's contribution: from then on it is the last word of its sum. By `driver`."""
    busy_s_at_close: float = 0.0
    """Of the compute thread, at `closed_at`. By `driver`."""
    accumulation: Accumulation | None = None
    """This peer's own work, once it is closed to make the contribution. By `driver`."""
    papers: tuple[Papers | None, ...] = ()
    """For each entry of this peer's contribution, what it was given for. By `driver`."""
    votes: dict[tuple[PeerId, Phase, int], tuple[bytes, Vote]] = field(default_factory=dict)
    """What each voter's first vote in a phase of a view was for, where this peer leads. By `driver`."""
    asking: set[tuple[PeerId, str, int]] = field(default_factory=set)
    """Voters outside the stage that are being asked: phase (or "promise") and view. By `driver`."""
    logged: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once it is on disk that this process signs in this round, under `logged_under`. By `driver`."""
    logged_under: Reconfiguration | None = None
    """The reconfiguration that `logged` is of: the round's present one, or nothing of it has left. By `driver`."""
    sent_bytes: int = 0
    """In the bodies of the round's messages. By `mail`."""
    came_bytes: int = 0
    """In those of others. By `part_exchange`."""
    dirty: asyncio.Event = field(default_factory=asyncio.Event)
    """There is something to report; `step_progress` clears it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a round, a roster or a result that was not there before, and replaced."""

    @property
    def leader(self) -> PeerId:
        return self.round.leader if self.round is not None else self.leaders[self.view % len(self.leaders)]

    @property
    def leading_view(self) -> int:
        """Whose leader this peer reports to."""
        return self.round.view if self.round is not None else self.view

    def notify(self) -> None:
        """Wake whoever waits for this step's round or roster."""
        self.changed.set()
        self.changed = asyncio.Event()

    def validate(self) -> None:
        """Raises AssertionError, with the numbers, if the fields contradict each other."""
        grants, parts, what = self.grants, self.parts, f"step {self.step}"
        assert self.progress.step == grants.step == self.step, f"{what}: progress or grants are of another step"
        assert not grants.in_flight & grants.done, f"{what}: {grants.in_flight & grants.done} are in flight and done"
        assert grants.passed_on <= grants.in_flight, f"{what}: what was passed on is not in flight"
        if self.facts is not None:
            assert self.facts.step == self.step, f"{what}: the facts are of step {self.facts.step}"
        if self.round is not None:
            assert self.facts is not None, f"{what}: a round without what it begins from"
            assert self.round.facts.previous_name == self.facts.previous_name, f"{what}: a round of other facts"
        else:
            assert self.closed_at is None, f"{what}: closed without a round"
            assert not parts.received, f"{what}: parts of contributions without a round"
        if self.accumulation is not None:
            assert self.accumulation.closed, f"{what}: its sum is committed to and still open"
            assert self.closed_at is not None, f"{what}: contributed to before it closed"
        assert not parts.own or self.accumulation is not None, f"{what}: parts of a sum that was never closed"
        signed = {(reduced.part, reduced.digest) for reduced in parts.reductions if reduced.cohort is None}
        assert signed <= set(parts.reduced), f"{what}: {len(signed - set(parts.reduced))} signed parts are not here"
