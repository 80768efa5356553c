"""The things that an averaging round asks its driver to do.

A driver carries every instruction out at once, in order, without waiting for one before the next. A send that cannot
be delivered is reported to the round by `unreachable`; `SendClose` is also sent to peers thought gone, so a failed
send is a report each time.
"""

from dataclasses import dataclass
from typing import TypeAlias

from swarm.core.ids import PeerId
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Exclusion, ReducedPart, Result, Roster, Share
from swarm.core.round.voting import Promise, Vote


@dataclass(frozen=True)
class MakeContribution:
    """Take the step's gradient, encode it, sign the commitment; then call `contributed`, without one if none may be
    signed.
    """


@dataclass(frozen=True)
class SendClose:
    """With what `AveragingRound.turned` holds when it is sent."""

    to: tuple[PeerId, ...]
    view: int
    reason: str


@dataclass(frozen=True)
class SendCommit:
    """To the view's leader: the own contribution, the promise if this peer votes, and what is certified so far."""

    to: PeerId
    view: int
    contribution: Contribution | None
    """None of a process that was started again, and may have signed one before: it takes part in all else."""
    promise: Promise | None
    roster: Roster | None
    """The highest certified one."""
    result: Result | None
    """The outcome, or the highest one that has the certificate of its phase."""


@dataclass(frozen=True)
class SendTurned:
    """To members: this peer has turned to a later view in its own time."""

    to: tuple[PeerId, ...]
    view: int


@dataclass(frozen=True)
class AskPromise:
    """Ask voters outside the stage for their promises; hand each to `on_promise`. Asked again while it takes long, each
    time with what `AveragingRound.turned` holds then."""

    to: tuple[PeerId, ...]
    view: int


@dataclass(frozen=True)
class SendBallot:
    """Show members a proposal, and ask whoever has a vote for it; hand the vote of each outside the stage to `on_vote`.
    Asked again."""

    to: tuple[PeerId, ...]
    proposal: Proposal


@dataclass(frozen=True)
class SendVote:
    to: PeerId
    proposal: Proposal
    vote: Vote


@dataclass(frozen=True)
class SayThere:
    """Instead of a vote: a member's contribution, had of itself, without which the leader proposes a roster. Where the
    leader cannot have it shown, look for oneself; if it is not shown here either, take the proposal once more."""

    to: PeerId
    made: Contribution
    proposal: Proposal


@dataclass(frozen=True)
class SendRoster:
    to: tuple[PeerId, ...]
    roster: Roster


@dataclass(frozen=True)
class SendPart:
    """The own encoded part to its reducer, who holds it back until it follows a roster of this view."""

    to: PeerId
    part: int
    view: int


@dataclass(frozen=True)
class AggregatePart:
    """Aggregate the part over these contributors, encode once; then call `aggregated` with who is left out, and why."""

    part: int
    contributors: tuple[PeerId, ...]
    excluded: tuple[Exclusion, ...]
    cohort: int | None = None
    """Whose share it is, in fp32 and of nobody's contributions perhaps; None: the stage is one cohort."""


@dataclass(frozen=True)
class SayMissing:
    """Tell the leader of the view whose parts this reducer lacks, and who of them it waits for no longer."""

    to: PeerId
    view: int
    missing: tuple[PeerId, ...]
    given_up: tuple[tuple[PeerId, bytes], ...]
    """With the signature of its `Lack`."""


@dataclass(frozen=True)
class CombineShares:
    """Combine the cohorts' shares of the part, encode once; then call `aggregated`."""

    part: int
    contributors: tuple[PeerId, ...]
    excluded: tuple[Exclusion, ...]
    """Of all cohorts."""
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class AnnounceShare:
    """Tell the leader that the share which it does not get is made."""

    to: PeerId
    part: int
    cohort: int


@dataclass(frozen=True)
class SendReduced:
    to: tuple[PeerId, ...]
    reduced: ReducedPart


@dataclass(frozen=True)
class SendResult:
    to: tuple[PeerId, ...]
    result: Result


@dataclass(frozen=True)
class FetchPart:
    """Get the bytes with this digest from any of these; then call `part_fetched`. Asked again while it takes long."""

    part: int
    digest: bytes
    holders: tuple[PeerId, ...]
    reduced: ReducedPart
    roster: Roster
    """That the part was made under."""


@dataclass(frozen=True)
class Finish:
    """The result is certified and all its bytes are here: apply it."""

    result: Result


@dataclass(frozen=True)
class Accuse:
    """Two contributions to this round with the signature of one member. The round goes on with what is certified."""

    one: Contribution
    other: Contribution


Instruction: TypeAlias = (
    MakeContribution
    | SendClose
    | SendCommit
    | SendTurned
    | AskPromise
    | SendBallot
    | SendVote
    | SayThere
    | SendRoster
    | SendPart
    | AggregatePart
    | SayMissing
    | CombineShares
    | AnnounceShare
    | SendReduced
    | SendResult
    | FetchPart
    | Finish
    | Accuse
)
Instructions: TypeAlias = list[Instruction]
