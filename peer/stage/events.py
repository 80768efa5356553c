"""What the parts of a peer at one stage tell each other, as typed events whose hearers are all known from the start.

An event is told at once, on the event loop, in the order in which its hearers were named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import StageChain


@dataclass(frozen=True)
class Applied:
    """A step that this peer took, and whose state is on disk where a snapshot was due."""

    result: Result
    chain: StageChain
    """Of the version that the step made."""
    gradient_norm: float
    seconds: float
    """From the closing of the step to the new version."""
    overlap: float
    """Share of those seconds in which the compute thread was at work."""
    sent_bytes: int
    """In the bodies of the round's messages."""
    stale: int
    """Of the microbatches of this peer's sum, those computed on the version before the step's."""
    counted: int
    """Microbatches in this peer's sum."""
    not_finite: tuple[MicrobatchId, ...]
    """Of this peer's work, what added nothing because a loss or the sum was not finite; sorted."""


@dataclass(frozen=True)
class VersionTurned:
    """The stage is at another version here. Its steps are not open yet."""

    chain: StageChain
    """Of that version."""
    is_next: bool
    """It was made by a step; else the stage begins again from it."""


@dataclass(frozen=True)
class StepClosed:
    """This peer takes no more microbatches of the step."""

    step: Step


@dataclass(frozen=True)
class OffChain:
    """A member signed a value that is not on its hash chain: no honest program does."""

    peer: PeerId
    step: Step


@dataclass(frozen=True)
class Overtaken:
    """A peer of this stage has shown that it is ahead of this one."""

    peer: PeerId


@dataclass(frozen=True)
class PeersChanged:
    """Others of a stage answer now than did before."""

    stage: int
    peers: frozenset[PeerId]
    """All that do."""


@dataclass(frozen=True)
class PeerLost:
    """A peer's open call broke, or it may not train any more."""

    peer: PeerId
    says_so: bool = False
    """It has left, by its own word, and need not be asked."""


@dataclass(frozen=True)
class MemberGone:
    """A member of this stage does not answer, as far as an open step's round is concerned."""

    step: Step
    peer: PeerId


@dataclass(frozen=True)
class MemberBack:
    """A member of this stage that did not answer does again, or nobody asks any more whether it does."""

    peer: PeerId


@dataclass(frozen=True)
class StateFault:
    """This peer's own state is not the stage's, from a version on."""

    version: int


Event = TypeVar("Event")


class Events:
    """Events and who hears them. Hearers are named until `seal`, and events are told from then on: so none is missed
    by somebody who came late."""

    def __init__(self) -> None:
        self._hearers: dict[type, list[Callable[[Any], None]]] = {}
        self._is_sealed = False

    def hear(self, kind: type[Event], *hearers: Callable[[Event], None]) -> None:
        """These are told of each such event, after those that were named before."""
        assert not self._is_sealed, f"{kind.__name__}: a hearer came after the first event may have been told"
        self._hearers.setdefault(kind, []).extend(hearers)

    def seal(self) -> None:
        """All hearers are known."""
        self._is_sealed = True

    def publish(self, event: object) -> None:
        """Tell those who hear of it."""
        assert self._is_sealed, f"{type(event).__name__} is told before all hearers are known"
        for hearer in self._hearers.get(type(event), ()):
            hearer(event)
