"""The messages of an averaging round: contribution, roster, reduced part, result.

Each is signed by its maker under its domain.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from swarm.core.audit.chance import Chance, HostWord, Link
from swarm.core.canonical import Packed, Value, digest, signed_bytes
from swarm.core.cohorts import MAX_COHORTS, MAX_MEMBERS, cohorts
from swarm.core.errors import RemoteError
from swarm.core.forms import SIGNATURE, Digest, Integer, Items, Nested, Writer
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.kept import once
from swarm.core.layout import AtMost, Beside
from swarm.core.record import PackedOnce, Record, Row, Signed, SignedOnce
from swarm.core.round.basis import MAX_NEIGHBOURS, RoundBasis
from swarm.core.round.voting import Certificate, quorum

MAX_WORK = 1 << 16
MAX_PARTS = 1 << 16
MAX_RATES = 16
MAX_CHARGES = 1
MAX_ATTEMPTS = 32
"""Of one microbatch in one step: an attempt is numbered within its step."""
MAX_LACKS = 1024
"""Reducers' words in a roster by which contributions are left out."""
EMPTY_DIGEST = bytes(32)
"""Digest of a part that nobody's contribution reached: it has no bytes and stands for zeros."""


@dataclass(frozen=True)
class Work(Row):
    """One microbatch in a contribution: which attempt, on which weights, between which signed headers."""

    microbatch_id: MicrobatchId
    attempt: Annotated[int, Integer(high=MAX_ATTEMPTS - 1)]
    version: Version
    num_tokens: Annotated[int, Integer(low=1, high=1 << 32)]
    input_header: Digest
    """Digest of upstream's forward header naming this peer (stage 0: of the birth record)."""
    output_header: Digest
    """Digest of downstream's gradient header (last stage: 32 zero bytes)."""


@dataclass(frozen=True)
class Rate(Row):
    """How fast a peer's parts came in here lately, in octaves: 2^octave bytes a second, rounded down."""

    peer_id: PeerId
    octave: Annotated[int, Integer(high=63)]


@dataclass(frozen=True)
class Charge(Row):
    """What a member brings before a jury: its case is to follow, before the jury and before the host."""

    accused: PeerId
    digest: Digest
    """Of the accusation (`verification.audit.verdicts`)."""


@dataclass(frozen=True)
class Contribution(SignedOnce):
    """A member's commitment to its mean gradient: made and signed before any part moves."""

    DOMAIN: ClassVar[str] = "contribution"
    run_id: str
    stage: StageIndex
    step: Step
    previous_name: Digest
    """Name of the version the round starts from: a stage that begins again elsewhere is another chain."""
    peer_id: PeerId
    work: Annotated[tuple[Work, ...], AtMost(MAX_WORK)]
    part_digests: Annotated[tuple[Digest, ...], AtMost(MAX_PARTS)]
    """BLAKE3 of each encoded part; empty if the member did no work."""
    chance: Chance
    """What its maker reveals for the beacon: no choice of its own (`swarm.core.audit.beacon`)."""
    rates: Annotated[tuple[Rate, ...], AtMost(MAX_RATES)] = ()
    """Of other members, as measured here: they decide who reduces how much, and who leads last."""
    charges: Annotated[tuple[Charge, ...], AtMost(MAX_CHARGES)] = ()
    """What the member brings before a jury: by this it is certified before the jurors are drawn."""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)

    def digest(self) -> bytes:
        """What an audit's draw on the contribution is made from: digest of all that its maker signed."""
        return self._digest

    @once
    def _digest(self) -> bytes:
        return digest(self.DOMAIN, self.packed_value)

    def _check_fields(self) -> None:
        if len({item.microbatch_id for item in self.work}) != len(self.work):
            raise RemoteError("malformed", "contribution lists a microbatch twice")
        rated = [rate.peer_id for rate in self.rates]
        if rated != sorted(set(rated)) or self.peer_id in rated:
            raise RemoteError("malformed", "contribution's rates are not of other peers, each once, in order")


@dataclass(frozen=True)
class Departure(Record):
    """A member that is put off the roster, and why."""

    peer_id: PeerId
    reason: str


@dataclass(frozen=True)
class Lack(Row):
    """A reducer's word that it waits no longer for the parts of a contribution: they do not come, or their maker is
    gone."""

    reducer: PeerId
    signature: Annotated[bytes, SIGNATURE]

    @staticmethod
    def signs(made: Contribution) -> bytes:
        """What it signs: the contribution names the round."""
        return signed_bytes("lack", made.digest())


@dataclass(frozen=True)
class LeftOut(Record):
    """A contribution that was certified and is not in the round, for its parts did not come."""

    contribution: Contribution
    said: Annotated[tuple[Lack, ...], AtMost(MAX_MEMBERS)]
    """Sorted by reducer: as many as `Roster.num_lacks` wants, or its maker's own alone: one that was started again has
    its parts no more, those that it was to reduce itself are nowhere, and it gives itself up."""

    @property
    def peer_id(self) -> PeerId:
        """Whose it is."""
        return self.contribution.peer_id

    def _check_fields(self) -> None:
        reducers = [one.reducer for one in self.said]
        if reducers != sorted(set(reducers)) or (self.peer_id in reducers and len(reducers) > 1):
            raise RemoteError(
                "malformed", "a contribution is left out by words out of order, or its maker's among them"
            )


@dataclass(frozen=True)
class Roster(SignedOnce):
    """What a round is made of: its leader's proposal, signed, then certified by the voters.

    Of two that are certified, the higher (view, revision) counts.
    """

    DOMAIN: ClassVar[str] = "roster"
    run_id: str
    stage: StageIndex
    step: Step
    view: int
    revision: int
    """Counts reassignments of parts within the view, and contributions that are left out in it."""
    leader: PeerId
    previous_name: Digest
    """Name of the version the round starts from."""
    members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    """Of that version, sorted."""
    contributions: Annotated[tuple[Contribution, ...], AtMost(MAX_MEMBERS)]
    """In the order of peer ids, with work only."""
    reducers: Annotated[tuple[PeerId, ...], AtMost(MAX_PARTS * MAX_COHORTS)]
    """Of each part in the first cohort, then in the next; a stage of 64 members or fewer is one cohort."""
    joins: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    leaves: Annotated[tuple[Departure, ...], AtMost(MAX_MEMBERS)]
    reason: str
    """Why the round was closed."""
    neighbours: Annotated[tuple[PeerId, ...], AtMost(MAX_NEIGHBOURS)] = ()
    """Members of the neighbouring stages: they vote on the next round if this stage has few members."""
    left_out: Annotated[tuple[LeftOut, ...], AtMost(MAX_MEMBERS)] = ()
    """In the order in which they were left out; never all."""
    certificate: Annotated[Certificate | None, Beside()] = None
    """Of the facts, or of those with fewer left out: reducers' words prove the rest. None yet while it is being voted
    on. No part moves without it."""

    @property
    def rank(self) -> tuple[int, int]:
        return (self.view, self.revision)

    @property
    def members_after(self) -> tuple[PeerId, ...]:
        """Members of the version that the round makes, sorted."""
        return tuple(sorted((set(self.members) - {d.peer_id for d in self.leaves}) | set(self.joins)))

    @once
    def committed(self) -> tuple[Contribution, ...]:
        """All contributions that were certified, in the order of peer ids. What one says beside its work counts also
        where its parts did not come: whom a leader leaves out must change no cohort, beacon or charge."""
        left_out = (one.contribution for one in self.left_out)
        return tuple(sorted((*self.contributions, *left_out), key=lambda made: made.peer_id))

    @once
    def said(self) -> HostWord | None:
        """The host's last word that its members have heard; None where nobody contributes."""
        heard = (made.chance.said for made in self.committed)
        return max(heard, key=lambda said: said.num_versions, default=None)

    @once
    def cohorts(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of the members (`swarm.core.cohorts`)."""
        return cohorts(self.members, self.said.value if self.said is not None else EMPTY_DIGEST)

    @once
    def contributors(self) -> tuple[tuple[PeerId, ...], ...]:
        """Whose contributions are on the roster, of each cohort."""
        made = {contribution.peer_id for contribution in self.contributions}
        return tuple(tuple(peer for peer in cohort if peer in made) for cohort in self.cohorts)

    @property
    def num_parts(self) -> int:
        return len(self.reducers) // len(self.cohorts)

    @once
    def cohort_of(self) -> dict[PeerId, int]:
        """Number of each member's cohort."""
        return {peer: number for number, cohort in enumerate(self.cohorts) for peer in cohort}

    def reducer_of(self, part: int, cohort: int) -> PeerId:
        return self.reducers[cohort * self.num_parts + part]

    def reducers_of(self, part: int) -> tuple[PeerId, ...]:
        """In the order of cohorts."""
        return self.reducers[part :: self.num_parts]

    def combiner_of(self, part: int) -> PeerId:
        """Who makes one part of the cohorts' shares: the reducer of one of the cohorts, in turn."""
        return self.reducer_of(part, part % len(self.cohorts))

    def contribution_of(self, peer_id: PeerId) -> Contribution | None:
        return next((c for c in self.contributions if c.peer_id == peer_id), None)

    def commitment_of(self, peer_id: PeerId) -> Contribution | None:
        """Its contribution, whether or not it is left out."""
        return next((made for made in self.committed if made.peer_id == peer_id), None)

    def num_lacks(self, peer_id: PeerId) -> int:
        """How many others must say that the member's parts do not come: a quorum of its cohort's reducers, of whom
        there are as many as members that stay, or as parts."""
        left = {departure.peer_id for departure in self.leaves} | {peer_id}
        stay = sum(peer not in left for peer in self.cohorts[self.cohort_of[peer_id]])
        return quorum(max(1, min(self.num_parts, stay)))

    def facts_digest(self) -> bytes:
        """Digest of what the round was made of, whoever proposed it and however parts were reassigned."""
        return self._facts_digest

    @once
    def _facts_digest(self) -> bytes:
        return self._facts_without(len(self.left_out))

    def comes_of(self, facts: bytes) -> bool:
        """Whether it is made of these certified facts, perhaps with some contributions left out since."""
        return any(self._facts_without(count) == facts for count in range(len(self.left_out) + 1))

    def without(self, words: Mapping[PeerId, Collection[Lack]]) -> "Roster":
        """The same, with these members' contributions left out as well, by reducers' words: not all."""
        out, stay = list(self.left_out), []
        num_lacks = sum(len(lost.said) for lost in out)
        for made in self.contributions:
            said = sorted(words.get(made.peer_id, ()), key=lambda one: one.reducer)[: self.num_lacks(made.peer_id)]
            if not said or num_lacks + len(said) > MAX_LACKS:
                stay.append(made)
                continue
            num_lacks += len(said)
            out.append(LeftOut(made, tuple(said)))
        is_less = stay and len(stay) < len(self.contributions)
        return replace(self, contributions=tuple(stay), left_out=tuple(out)) if is_less else self

    def _facts_without(self, count: int) -> bytes:
        """Of the contributions that are left out, only the first `count`."""
        left_out = [one.contribution for one in self.left_out]
        contributions = sorted((*self.contributions, *left_out[count:]), key=lambda made: made.peer_id)
        return digest(
            "roster-facts",
            [
                self.run_id,
                self.stage,
                self.step,
                self.previous_name,
                list(self.members),
                [c.packed for c in contributions],
                list(self.joins),
                [d.peer_id for d in self.leaves],
                list(self.neighbours),
                [c.packed for c in left_out[:count]],
            ],
        )

    def _check_fields(self) -> None:
        names = [c.peer_id for c in self.contributions]
        if names != sorted(set(names)):
            raise RemoteError("malformed", "roster's contributions are not in the order of peer ids")
        lost = [one.peer_id for one in self.left_out]
        if len(set(lost)) != len(lost) or set(lost) & set(names) or (lost and not names):
            raise RemoteError("malformed", "roster leaves out contributions that it has, one twice, or all")
        if sum(len(one.said) for one in self.left_out) > MAX_LACKS:
            raise RemoteError("malformed", f"roster leaves out contributions by more than {MAX_LACKS} words")


Why: TypeAlias = Literal["malformed"]
"""It came as committed to and stands for no values. Parts that do not come are never left out one by one."""


@dataclass(frozen=True)
class Exclusion(Row):
    """Whose contribution to a part was left out, and why: in no words of whoever left it out."""

    peer_id: PeerId
    why: Why


Level: TypeAlias = Literal["all", "cohort", "shares"]
"""What is reduced: all contributions to a part, those of one cohort, or the cohorts' shares."""


@dataclass(frozen=True)
class Share(Row):
    """What one cohort brought to a part: the digest of its contributions' aggregate in fp32, and who made it."""

    cohort: Annotated[int, Integer(high=MAX_COHORTS - 1)]
    reducer: PeerId
    digest: Digest


@dataclass(frozen=True)
class Outcome(Row, kind="part of a result"):
    """What a result says of a part: its place there and the roster say the rest."""

    digest: Digest
    excluded: Annotated[tuple[Exclusion, ...], AtMost(MAX_MEMBERS)]
    squares: float
    shares: Annotated[tuple[Share, ...], AtMost(MAX_COHORTS)]


@dataclass(frozen=True)
class ReducedPart(Record):
    """One aggregated part: which contributions are in it, and the digest of the one encoding everyone gets.

    Without contributors it stands for zeros and has no bytes. With a `cohort` it is only what that cohort brings.
    """

    part: Annotated[int, Integer(high=MAX_PARTS - 1)]
    digest: Digest
    contributors: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    excluded: Annotated[tuple[Exclusion, ...], AtMost(MAX_MEMBERS)] = ()
    """Whose contributions to the part were left out, and why; in the order of peer ids."""
    squares: float = 0.0
    """Sum of squares of the values that the encoding stands for: the gradient's norm follows from the result alone."""
    shares: Annotated[tuple[Share, ...], AtMost(MAX_COHORTS)] = ()
    """What it was combined from, in the order of cohorts; empty where the stage is one cohort."""
    cohort: int | None = None
    """Whose share it is; None: it is the whole part."""

    @classmethod
    def empty(cls, part: int) -> "ReducedPart":
        """The part that nobody's contribution reached."""
        return cls(part, EMPTY_DIGEST, ())

    @property
    def is_empty(self) -> bool:
        return not self.contributors

    @property
    def slot(self) -> tuple[int, int | None]:
        """Which part it is of, and which cohort's share."""
        return (self.part, self.cohort)

    @property
    def level(self) -> Level:
        """Of the reduction that made it."""
        if self.shares:
            return "shares"
        return "all" if self.cohort is None else "cohort"

    def shares_of(self, roster: Roster) -> tuple["ReducedPart", ...]:
        """The shares it was combined from, as their reducers made them under the roster."""
        return tuple(
            ReducedPart(
                self.part,
                share.digest,
                tuple(peer for peer in self.contributors if roster.cohort_of[peer] == share.cohort),
                tuple(left_out for left_out in self.excluded if roster.cohort_of[left_out.peer_id] == share.cohort),
                cohort=share.cohort,
            )
            for share in self.shares
        )

    @property
    def outcome(self) -> Outcome:
        """What a result says of it."""
        return Outcome(self.digest, self.excluded, self.squares, self.shares)

    @once
    def packed_outcome(self) -> Packed:
        """What a result says of it, packed once."""
        return Packed(self.outcome.to_value())

    @classmethod
    def of_outcome(cls, part: int, said: Outcome, on_roster: Sequence[PeerId]) -> "ReducedPart":
        """The part of this number in a result; `on_roster` are all whose contributions are on its roster."""
        left_out = {departure.peer_id for departure in said.excluded}
        contributors = tuple(peer for peer in on_roster if peer not in left_out) if said.digest != EMPTY_DIGEST else ()
        made = cls(part, said.digest, contributors, said.excluded, said.squares, said.shares)
        made._check_fields()
        return made

    def _check_fields(self) -> None:
        if self.cohort is not None and (self.shares or self.squares):
            raise RemoteError("malformed", f"cohort {self.cohort}'s share of part {self.part} is itself combined")
        if self.squares < 0 or (self.is_empty and self.squares):
            raise RemoteError("malformed", f"part {self.part} has a sum of squares of {self.squares}")
        listed = [left_out.peer_id for left_out in self.excluded]
        if listed != sorted(set(listed)) or set(listed) & set(self.contributors):
            raise RemoteError("malformed", f"part {self.part} excludes peers out of order, or contributors")
        if list(self.contributors) != sorted(set(self.contributors)):
            raise RemoteError("malformed", f"contributors of part {self.part} are not in the order of peer ids")
        if self.is_empty != (self.digest == EMPTY_DIGEST):
            raise RemoteError("malformed", f"part {self.part} has a digest but no contributors, or the other way round")


class _Outcomes(Items):
    """A result's parts."""

    def __init__(self) -> None:
        super().__init__(Nested(Outcome), MAX_PARTS)

    def writer(self, *, shallow: bool) -> Writer | None:
        if shallow:
            return lambda parts: [part.packed_outcome for part in parts]
        return lambda parts: [part.outcome.to_value() for part in parts]


@dataclass(frozen=True)
class Result(Signed, PackedOnce):
    """The outcome of a round: nothing is applied without it and its certificate."""

    DOMAIN: ClassVar[str] = "result"
    roster: Roster
    parts: Annotated[tuple[ReducedPart, ...], _Outcomes()]
    leader: PeerId
    """Who signs: the leader of the view that proposes it."""
    certificate: Certificate | None = None
    """Of phase "commit"; none yet while it is being voted on. Whoever has it applies the result."""

    @once
    def unheard(self) -> tuple[Contribution, ...]:
        """Whose parts did not come: whom the roster leaves out, and everybody where all parts are left empty. A roster
        keeps one contribution at least: that of the only member to make any is lost in this way."""
        if self.parts and all(part.is_empty for part in self.parts):
            return self.roster.committed
        return tuple(lost.contribution for lost in self.roster.left_out)

    def root(self) -> bytes:
        """Digest of the outcome, the same whoever signed it."""
        return self._root

    @once
    def _root(self) -> bytes:
        return digest("result-root", [self.roster.facts_digest(), [part.packed_outcome for part in self.parts]])

    def basis_after(self, before: RoundBasis, work: tuple[int, ...], late: tuple[PeerId, ...] = ()) -> RoundBasis:
        """What the version that this result makes is known by; `before`: what the round started from; `work`: of each
        member of the version; `late`: those of them whose lines are too slow."""
        roster, after = self.roster, self.roster.members_after
        revealed = {made.peer_id: Link(roster.step, made.chance.value) for made in roster.committed}
        links = tuple(revealed.get(peer, before.link_of.get(peer)) for peer in after)
        said = roster.said or before.said
        members = (roster.members, before.work, after, work)
        return RoundBasis(before.name, self.root(), *members, roster.neighbours, links, said, before.late, late)

    def signed_value(self) -> Value:
        return [self.root(), self.leader]

    @classmethod
    def _made(cls, *, roster: Roster, parts: Sequence[Outcome], **others: Any) -> Self:
        if len(parts) != roster.num_parts:  # before anything is made of them
            raise RemoteError("malformed", f"result of {len(parts)} parts, where its roster has {roster.num_parts}")
        on_roster = [made.peer_id for made in roster.contributions]
        found = tuple(ReducedPart.of_outcome(part, said, on_roster) for part, said in enumerate(parts))
        return super()._made(roster=roster, parts=found, **others)

    def heard(self) -> frozenset[PeerId]:
        """Whose contributions are in it: who died before any of its parts arrived is in none."""
        return frozenset(peer for part in self.parts for peer in part.contributors)


Leases: TypeAlias = Mapping[PeerId, Container[int]]
"""At stage 0, the ids that each member may use."""


def counted_work(made: Contribution, leases: Leases | None, *, most: int | None = None) -> tuple[Work, ...]:
    """What of a contribution counts: all of it; at stage 0, what its maker had a lease for, and of that no more than
    the first `most`, if there is such a bound.

    That an entry has papers is what the roster's voters vouch for (`swarm.drawn_papers`). What one member lists
    changes nothing of what counts of another's: nobody's work can be claimed away. A microbatch that two members did,
    for the first was late, is in both sums, and counts in both.
    """
    if leases is None:
        return made.work
    own = leases.get(made.peer_id, ())
    return tuple(item for item in made.work if item.microbatch_id in own)[:most]
