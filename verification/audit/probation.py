"""How a newcomer earns its place: it replays what chance gives it, and is promoted once enough replays agree.

In each version the beacon names one member of its stage for each newcomer, the *examiner*, and one microbatch of that
member's contribution. The examiner shows what went in; the newcomer answers with what must have come out, before it
has seen it; the examiner compares, and signs an agreement. The run key counts agreements of the last versions, and
promotes a few at a time: an identity costs a stretch of real work, and however many are made they come in slowly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from swarm.core.audit.beacon import Beacon
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import StageNumber
from swarm.core.ids import PeerId, Step
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Contribution, Roster, Work
from swarm.core.seats import drawn, seats
from swarm.identity.signed_record import SignedRecord

AGREEMENT_VERSIONS = 16
"""Agreements count for so many versions: who has accomplices among the members cannot wait until chance names them
often enough."""
NUM_PIECES = 64
PIECE_VALUES = 4096
"""A piece of a gradient; 64 are a MiB, however large the model is."""
MEMBERS_PER_PROMOTION = 8
"""In one version a stage takes one newcomer for so many members; at least one."""


@dataclass(frozen=True)
class Exam:
    """What a newcomer replays in a version."""

    examiner: PeerId
    contribution: Contribution
    """The examiner's."""
    work: Work
    """The microbatch, in it."""


def exam_of(roster: Roster, basis: RoundBasis, beacon: Beacon, newcomer: PeerId) -> Exam | None:
    """What the beacon of the certified roster gives the newcomer; None if nobody has contributed who had done anything
    by its `basis`, which is what the round started from.

    Who examines and on what is known once the roster is certified and the host has spoken: nobody can make a
    contribution, or an identity, so that it is the one. Who did twice as much lately is it twice as often.
    Raises RemoteError if the basis is of another version.
    """
    assert beacon.step == roster.step, f"the beacon of step {beacon.step}, not of {roster.step}"
    if basis.name != roster.previous_name:
        raise RemoteError("fork", f"step {roster.step} of stage {roster.stage} does not start from this version")
    made = {one.peer_id: one for one in roster.contributions if one.work and one.peer_id != newcomer}
    weights = {peer: weight for peer, weight in seats(basis.work_of).items() if peer in made}
    if not weights:
        return None
    examiner = drawn(weights, "examiner", beacon.value, newcomer)[0]
    work = made[examiner].work
    number = int.from_bytes(beacon.seed("microbatch", newcomer), "big") % len(work)
    return Exam(examiner, made[examiner], work[number])


def exam_pieces(beacon: Beacon, newcomer: PeerId, *, num_values: int) -> tuple[slice, ...]:
    """Where in the microbatch's gradient the newcomer's answer lies, in a run of one stage, whose peers send nothing
    on: drawn with the exam, in order, each once; all of a small model's."""
    num_pieces = -(-num_values // PIECE_VALUES)
    seed = beacon.seed("pieces", newcomer)
    drawn_ones = {_number(seed, place) % num_pieces for place in range(NUM_PIECES)}
    chosen = sorted(drawn_ones) if num_pieces > NUM_PIECES else range(num_pieces)
    return tuple(slice(at * PIECE_VALUES, min((at + 1) * PIECE_VALUES, num_values)) for at in chosen)


def _number(seed: bytes, place: int) -> int:
    return int.from_bytes(digest("exam-piece", [seed, place]), "big")


@dataclass(frozen=True, kw_only=True)
class Agreement(SignedRecord):
    """The examiner's word that a newcomer's replay came to what it has itself."""

    DOMAIN: ClassVar[str] = "agreement"
    run_id: str
    stage: StageNumber
    step: Step
    newcomer: PeerId
    examiner: PeerId

    def check(self, *, run_id: str, ticket: Ticket, roster: Roster, basis: RoundBasis, beacon: Beacon) -> None:
        """Raises RemoteError unless the examiner that was drawn for the newcomer in the roster's round, which started
        from this basis, signed it."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"agreement of run {self.run_id[:12]}, not {run_id[:12]}", self.newcomer)
        if (ticket.peer_id, ticket.stage, self.stage) != (self.newcomer, roster.stage, roster.stage):
            raise RemoteError("ticket", f"agreement of stage {self.stage} for {self.newcomer}", self.newcomer)
        exam = exam_of(roster, basis, beacon, self.newcomer) if roster.step == self.step else None
        if exam is None or exam.examiner != self.examiner:
            raise RemoteError("draw", f"{self.examiner} is not who {self.newcomer} drew at {self.step}", self.newcomer)
        if not self.is_signed_by(self.examiner):
            raise RemoteError("signature", f"the agreement is not signed by {self.examiner}", self.newcomer)


@dataclass(frozen=True)
class Probation:
    """The newcomers of one stage, folded from their agreements: the same whoever folds them, in whatever order."""

    agreements_to_promote: int
    steps: Mapping[PeerId, tuple[int, ...]] = field(default_factory=dict)
    """Of each newcomer's agreements, sorted; one in a step counts. At most AGREEMENT_VERSIONS, none older."""
    last_promotions: tuple[int, int] = (-1, 0)
    """The last version in which somebody was promoted, and how many were."""

    def after(self, agreement: Agreement, version: int) -> "Probation":
        """With one more, the stage being at `version`; what is too old by then is gone."""
        oldest = version - AGREEMENT_VERSIONS
        steps = {**self.steps, agreement.newcomer: (*self.steps.get(agreement.newcomer, ()), int(agreement.step))}
        recent = {peer: tuple(sorted({step for step in of if oldest <= step < version})) for peer, of in steps.items()}
        return replace(self, steps={peer: of for peer, of in recent.items() if of})

    def count(self, peer: PeerId, version: int, *, since: int) -> int:
        """The newcomer's agreements that count at `version`: of steps after `since`, its last fault or debt."""
        oldest = max(version - AGREEMENT_VERSIONS, since + 1)
        return sum(step >= oldest for step in self.steps.get(peer, ()))

    def may_promote(self, peer: PeerId, version: int, *, since: int, num_members: int, num_left: int) -> bool:
        """Whether it has agreements enough, and the stage may take one more in this version: it has so many members,
        and so many left it with this version, whose places are free."""
        at, num = self.last_promotions
        has_place = version > at or (version == at and num < max(1, num_members // MEMBERS_PER_PROMOTION) + num_left)
        return has_place and self.count(peer, version, since=since) >= self.agreements_to_promote

    def promoted(self, peer: PeerId, version: int) -> "Probation":
        """Without the newcomer, which is one no more."""
        at, num = self.last_promotions
        left = {other: of for other, of in self.steps.items() if other != peer}
        return replace(self, steps=left, last_promotions=(version, num + 1 if version == at else 1))
