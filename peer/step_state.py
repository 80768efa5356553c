"""This is where a peer keeps what it holds of one open step, and what it says of a step it took."""

import asyncio
from dataclasses import dataclass, field

from peer.fragments import Fragments
from peer.grants import StepGrants
from peer.replica import Accumulation
from swarm.averaging.result_decoder import ResultDecoder
from swarm.core.averaging_round import AveragingRound, RoundFacts
from swarm.core.contribution import ReducedPart, Result
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.stage_chain import StageChain
from swarm.core.step_progress import StepProgress
from swarm.core.voting import Phase, Reconfiguration, Vote
from verification.reduction import Reduction

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Applied:
    """A step that this peer took; handed to listeners (the ledger, telemetry, snapshots)."""

    result: Result
    chain: StageChain
    gradient_norm: float
    seconds: float
    """From the closing of the step to the new version."""
    overlap: float
    """Share of those seconds in which the compute thread was at work."""
    sent_bytes: int
    """In the bodies of the round's messages."""
    stale: int
    counted: int
    not_finite: tuple[MicrobatchId, ...]
    """Of this peer's work, what added nothing because a loss or the sum was not finite; sorted."""


@dataclass
class StepState:
    """Everything this peer holds of one open step."""

    step: Step
    leaders: tuple[PeerId, ...]
    progress: StepProgress
    grants: StepGrants
    heard_at: dict[PeerId, float] = field(default_factory=dict)
    """When each member last reported, by the leader; or was found to answer."""
    view: int = 0
    saw_next: bool = False
    facts: RoundFacts | None = None
    """Known once the stage is at the step's version."""
    round: AveragingRound | None = None
    """This member's side of the round; None before, and for a peer that is no member."""
    accumulation: Accumulation | None = None
    """This peer's own work, once it is closed to make the contribution."""
    own_parts: list[memoryview] = field(default_factory=list)
    received: dict[tuple[int, PeerId], Bytes] = field(default_factory=dict)
    fragments: Fragments = field(default_factory=Fragments)
    """Of parts that are not here whole."""
    reduced: dict[tuple[int, bytes], Bytes] = field(default_factory=dict)
    reductions: dict[ReducedPart, Reduction] = field(default_factory=dict)
    """Their reducers' signed words for the reduced parts that came or were made here; checked."""
    votes: dict[tuple[PeerId, Phase, int], tuple[bytes, Vote]] = field(default_factory=dict)
    """What each voter's first vote in a phase of a view was for; by the leader."""
    decoder: ResultDecoder | None = None
    """What of the result is decoded already; None before its first part is here."""
    fetching: set[tuple[int, bytes]] = field(default_factory=set)
    asking: set[tuple[PeerId, str, int]] = field(default_factory=set)
    """Voters outside the stage that are being asked: phase (or "promise") and view."""
    logged: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once it is on disk that this process signs in this round, under its present reconfiguration."""
    logged_under: Reconfiguration | None = None
    """The one that `logged` is of."""
    closed_at: float | None = None
    busy_s_at_close: float = 0.0
    """Of the compute thread."""
    sent_bytes: int = 0
    """In the bodies of the round's messages."""
    dirty: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

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
