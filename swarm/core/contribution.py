"""This is where the messages of an averaging round have their form: contribution, roster, reduced part, result.

Each is signed by its maker over `signed_value()` under its domain; readers check every field.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

from swarm.core.canonical import Packed, Value, digest, signed_bytes
from swarm.core.cohorts import MAX_COHORTS, MAX_MEMBERS, cohorts
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item, integer_item, peer_item, value_or_none
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round_basis import MAX_NEIGHBOURS, RoundBasis
from swarm.core.voting import Certificate

MAX_WORK = 1 << 16
MAX_PARTS = 1 << 16
MAX_RATES = 16
MAX_CHARGES = 4
EMPTY_DIGEST = bytes(32)
"""Digest of a part that nobody's contribution reached: it has no bytes and stands for zeros."""


@dataclass(frozen=True)
class Work:
    """One microbatch in a contribution: which attempt, on which weights, between which signed headers."""

    microbatch_id: MicrobatchId
    attempt: int
    version: Version
    num_tokens: int
    input_header: bytes
    """Digest of upstream's forward header naming this peer (stage 0: of the birth record)."""
    output_header: bytes
    """Digest of downstream's gradient header (last stage: 32 zero bytes)."""

    def to_value(self) -> Value:
        return [self.microbatch_id, self.attempt, self.version, self.num_tokens, self.input_header, self.output_header]

    @classmethod
    def from_value(cls, value: Value) -> "Work":
        names = ("microbatch_id", "attempt", "version", "num_tokens", "input_header", "output_header")
        fields = Fields.of_list("work", value, *names)
        return cls(
            MicrobatchId(fields.integer("microbatch_id")),
            fields.integer("attempt", high=1 << 20),
            Version(fields.integer("version")),
            fields.integer("num_tokens", low=1, high=1 << 32),
            fields.octets("input_header", length=32),
            fields.octets("output_header", length=32),
        )


@dataclass(frozen=True)
class Rate:
    """How fast a peer's parts came in here lately, in octaves: 2^octave bytes a second, rounded down."""

    peer_id: PeerId
    octave: int

    @classmethod
    def from_value(cls, value: Value) -> "Rate":
        fields = Fields.of_list("rate", value, "peer_id", "octave")
        return cls(fields.peer("peer_id"), fields.integer("octave", high=63))


@dataclass(frozen=True)
class Contribution:
    """A member's commitment to its mean gradient: made and signed before any part moves."""

    DOMAIN: ClassVar[str] = "contribution"
    run_id: str
    stage: StageIndex
    step: Step
    previous_name: bytes
    """Name of the version the round starts from: a stage that begins again elsewhere is another chain."""
    peer_id: PeerId
    work: tuple[Work, ...]
    part_digests: tuple[bytes, ...]
    """BLAKE3 of each encoded part; empty if the member did no work."""
    rates: tuple[Rate, ...] = ()
    """Of other members, as measured here: they decide who reduces how much."""
    charges: tuple[bytes, ...] = ()
    """Digests of what the member brings before a jury: by this they are certified before the jurors are drawn."""
    signature: bytes = b""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "step": self.step,
            "previous_name": self.previous_name,
            "peer_id": self.peer_id,
            "work": [item.to_value() for item in self.work],
            "part_digests": list(self.part_digests),
            "rates": [[rate.peer_id, rate.octave] for rate in self.rates],
            "charges": list(self.charges),
        }

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self._packed_value)

    @cached_property
    def _packed_value(self) -> Packed:
        return Packed(self.signed_value())

    def digest(self) -> bytes:
        """What an audit's draw on the contribution is made from: digest of all that its maker signed."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return digest(self.DOMAIN, self._packed_value)

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}

    @cached_property
    def packed(self) -> Packed:
        """Its value, packed once."""
        return Packed({"value": self._packed_value, "signature": self.signature})

    @classmethod
    def from_value(cls, value: Value) -> "Contribution":
        outer = Fields("contribution", value)
        fields = Fields("contribution", outer.message("value"))
        made = cls(
            fields.text("run_id"),
            StageIndex(fields.integer("stage")),
            Step(fields.integer("step")),
            fields.octets("previous_name", length=32),
            fields.peer("peer_id"),
            fields.items("work", Work.from_value, max_items=MAX_WORK),
            fields.items("part_digests", digest_item, max_items=MAX_PARTS),
            fields.items("rates", Rate.from_value, max_items=MAX_RATES),
            fields.items("charges", digest_item, max_items=MAX_CHARGES),
            outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        if len({item.microbatch_id for item in made.work}) != len(made.work):
            raise RemoteError("malformed", "contribution lists a microbatch twice")
        rated = [rate.peer_id for rate in made.rates]
        if rated != sorted(set(rated)) or made.peer_id in rated:
            raise RemoteError("malformed", "contribution's rates are not of other peers, each once, in order")
        return made


@dataclass(frozen=True)
class Departure:
    """A member that is put off the roster, and why."""

    peer_id: PeerId
    reason: str

    @classmethod
    def from_value(cls, value: Value) -> "Departure":
        fields = Fields("departure", value)
        made = cls(fields.peer("peer_id"), fields.text("reason"))
        fields.done()
        return made


@dataclass(frozen=True)
class Roster:
    """What a round is made of: its leader's proposal, signed, then certified by the voters.

    Of two that are certified, the higher (view, revision) counts.
    """

    DOMAIN: ClassVar[str] = "roster"
    run_id: str
    stage: StageIndex
    step: Step
    view: int
    revision: int
    """Counts reassignments of parts within the view; contributions never change with it."""
    leader: PeerId
    previous_name: bytes
    """Name of the version the round starts from."""
    members: tuple[PeerId, ...]
    """Of that version, sorted."""
    contributions: tuple[Contribution, ...]
    """In the order of peer ids, with work only."""
    reducers: tuple[PeerId, ...]
    """Of each part in the first cohort, then in the next; a stage of 64 members or fewer is one cohort."""
    joins: tuple[PeerId, ...]
    leaves: tuple[Departure, ...]
    reason: str
    """Why the round was closed."""
    neighbours: tuple[PeerId, ...] = ()
    """Members of the neighbouring stages: they vote on the next round if this stage has few members."""
    signature: bytes = b""
    certificate: Certificate | None = None
    """Of the facts; none yet while it is being voted on. No part moves without it."""

    @property
    def rank(self) -> tuple[int, int]:
        return (self.view, self.revision)

    @property
    def members_after(self) -> tuple[PeerId, ...]:
        """Members of the version that the round makes, sorted."""
        return tuple(sorted((set(self.members) - {d.peer_id for d in self.leaves}) | set(self.joins)))

    @cached_property
    def cohorts(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of the members (`swarm.core.cohorts`)."""
        return cohorts(self.members, self.previous_name)

    @cached_property
    def contributors(self) -> tuple[tuple[PeerId, ...], ...]:
        """Whose contributions are on the roster, of each cohort."""
        made = {contribution.peer_id for contribution in self.contributions}
        return tuple(tuple(peer for peer in cohort if peer in made) for cohort in self.cohorts)

    @property
    def num_parts(self) -> int:
        return len(self.reducers) // len(self.cohorts)

    @cached_property
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

    def signed_value(self) -> dict[str, Value]:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "step": self.step,
            "view": self.view,
            "revision": self.revision,
            "leader": self.leader,
            "previous_name": self.previous_name,
            "members": list(self.members),
            "contributions": [c.to_value() for c in self.contributions],
            "reducers": list(self.reducers),
            "joins": list(self.joins),
            "leaves": [{"peer_id": d.peer_id, "reason": d.reason} for d in self.leaves],
            "reason": self.reason,
            "neighbours": list(self.neighbours),
        }

    def signed_bytes(self) -> bytes:
        return self._signed_bytes

    @cached_property
    def _signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self._packed_value)

    @cached_property
    def _packed_value(self) -> Packed:
        return Packed({**self.signed_value(), "contributions": [c.packed for c in self.contributions]})

    def to_value(self) -> Value:
        return {
            "value": self.signed_value(),
            "signature": self.signature,
            "certificate": value_or_none(self.certificate),
        }

    @cached_property
    def packed(self) -> Packed:
        """Its value, packed once."""
        certificate = value_or_none(self.certificate)
        return Packed({"value": self._packed_value, "signature": self.signature, "certificate": certificate})

    def facts_digest(self) -> bytes:
        """Digest of what the round was made of, whoever proposed it and however parts were reassigned."""
        return self._facts_digest

    @cached_property
    def _facts_digest(self) -> bytes:
        return digest(
            "roster-facts",
            [
                self.run_id,
                self.stage,
                self.step,
                self.previous_name,
                list(self.members),
                [c.packed for c in self.contributions],
                list(self.joins),
                [d.peer_id for d in self.leaves],
                list(self.neighbours),
            ],
        )

    @classmethod
    def from_value(cls, value: Value) -> "Roster":
        outer = Fields("roster", value)
        fields = Fields("roster", outer.message("value"))
        made = cls(
            fields.text("run_id"),
            StageIndex(fields.integer("stage")),
            Step(fields.integer("step")),
            fields.integer("view"),
            fields.integer("revision"),
            fields.peer("leader"),
            fields.octets("previous_name", length=32),
            fields.items("members", peer_item, max_items=MAX_MEMBERS),
            fields.items("contributions", Contribution.from_value, max_items=MAX_MEMBERS),
            fields.items("reducers", peer_item, max_items=MAX_PARTS * MAX_COHORTS),
            fields.items("joins", peer_item, max_items=MAX_MEMBERS),
            fields.items("leaves", Departure.from_value, max_items=MAX_MEMBERS),
            fields.text("reason"),
            fields.items("neighbours", peer_item, max_items=MAX_NEIGHBOURS),
            outer.octets("signature", length=64),
            outer.maybe("certificate", Certificate.from_value),
        )
        fields.done()
        outer.done()
        names = [c.peer_id for c in made.contributions]
        if names != sorted(set(names)):
            raise RemoteError("malformed", "roster's contributions are not in the order of peer ids")
        return made


MAX_EXCLUSION_REASON = 120


Level: TypeAlias = Literal["all", "cohort", "shares"]
"""What is reduced: all contributions to a part, those of one cohort, or the cohorts' shares."""


@dataclass(frozen=True)
class Share:
    """What one cohort brought to a part: the digest of its contributions' aggregate in fp32, and who made it."""

    cohort: int
    reducer: PeerId
    digest: bytes

    @classmethod
    def from_value(cls, value: Value) -> "Share":
        fields = Fields.of_list("share", value, "cohort", "reducer", "digest")
        return cls(
            fields.integer("cohort", high=MAX_COHORTS - 1), fields.peer("reducer"), fields.octets("digest", length=32)
        )


@dataclass(frozen=True)
class ReducedPart:
    """One aggregated part: which contributions are in it, and the digest of the one encoding everyone gets.

    Without contributors it stands for zeros and has no bytes. With a `cohort` it is only what that cohort brings.
    """

    part: int
    digest: bytes
    contributors: tuple[PeerId, ...]
    excluded: tuple[Departure, ...] = ()
    """Whose contributions to the part were left out, and why; in the order of peer ids."""
    squares: float = 0.0
    """Sum of squares of the values that the encoding stands for: the gradient's norm follows from the result alone."""
    shares: tuple[Share, ...] = ()
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

    def to_value(self) -> Value:
        return {
            "part": self.part,
            "digest": self.digest,
            "contributors": list(self.contributors),
            "excluded": self._excluded_value(),
            "squares": self.squares,
            "shares": self._shares_value(),
            "cohort": self.cohort,
        }

    def outcome_value(self) -> Value:
        """What a result says of it: its place there and the roster say the rest."""
        return [self.digest, self._excluded_value(), self.squares, self._shares_value()]

    def _excluded_value(self) -> Value:
        return [{"peer_id": left_out.peer_id, "reason": left_out.reason} for left_out in self.excluded]

    def _shares_value(self) -> Value:
        return [[share.cohort, share.reducer, share.digest] for share in self.shares]

    @cached_property
    def packed_outcome(self) -> Packed:
        """What a result says of it, packed once."""
        return Packed(self.outcome_value())

    @classmethod
    def from_outcome(cls, part: int, value: Value, on_roster: Sequence[PeerId]) -> "ReducedPart":
        """The part of this number in a result; `on_roster` are all whose contributions are on its roster."""
        fields = Fields.of_list("part of a result", value, "digest", "excluded", "squares", "shares")
        found = fields.octets("digest", length=32)
        excluded = fields.items("excluded", Departure.from_value, max_items=MAX_MEMBERS)
        left_out = {departure.peer_id for departure in excluded}
        contributors = tuple(peer for peer in on_roster if peer not in left_out) if found != EMPTY_DIGEST else ()
        shares = fields.items("shares", Share.from_value, max_items=MAX_COHORTS)
        made = cls(part, found, contributors, excluded, fields.number("squares"), shares)
        made._check()
        return made

    @classmethod
    def from_value(cls, value: Value) -> "ReducedPart":
        fields = Fields("reduced part", value)
        made = cls(
            fields.integer("part", high=MAX_PARTS - 1),
            fields.octets("digest", length=32),
            fields.items("contributors", peer_item, max_items=MAX_MEMBERS),
            fields.items("excluded", Departure.from_value, max_items=MAX_MEMBERS),
            fields.number("squares"),
            fields.items("shares", Share.from_value, max_items=MAX_COHORTS),
            fields.maybe("cohort", integer_item),
        )
        fields.done()
        made._check()
        return made

    def _check(self) -> None:
        """Raises RemoteError("malformed") if it contradicts itself."""
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


@dataclass(frozen=True)
class Result:
    """The outcome of a round: nothing is applied without it and its certificate."""

    DOMAIN: ClassVar[str] = "result"
    roster: Roster
    parts: tuple[ReducedPart, ...]
    leader: PeerId
    """Who signs: the leader of the view that proposes it."""
    signature: bytes = b""
    certificate: Certificate | None = None
    """Of phase "commit"; none yet while it is being voted on. Whoever has it applies the result."""

    def root(self) -> bytes:
        """Digest of the outcome, the same whoever signed it."""
        return self._root

    @cached_property
    def _root(self) -> bytes:
        return digest("result-root", [self.roster.facts_digest(), [part.packed_outcome for part in self.parts]])

    @property
    def basis(self) -> RoundBasis:
        """What the version that this result makes is known by."""
        roster = self.roster
        return RoundBasis(roster.previous_name, self.root(), roster.members, roster.members_after, roster.neighbours)

    @property
    def new_name(self) -> bytes:
        """Name of the version this result makes: a hash over the previous name and the result's root."""
        return self.basis.name

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, [self.root(), self.leader])

    def to_value(self) -> Value:
        return {
            "roster": self.roster.to_value(),
            "parts": [part.outcome_value() for part in self.parts],
            "leader": self.leader,
            "signature": self.signature,
            "certificate": value_or_none(self.certificate),
        }

    @cached_property
    def packed(self) -> Packed:
        """Its value, packed once."""
        return Packed(
            {
                "roster": self.roster.packed,
                "parts": [part.packed_outcome for part in self.parts],
                "leader": self.leader,
                "signature": self.signature,
                "certificate": value_or_none(self.certificate),
            }
        )

    @classmethod
    def from_value(cls, value: Value) -> "Result":
        fields = Fields("result", value)
        roster = Roster.from_value(fields.message("roster"))
        on_roster = [made.peer_id for made in roster.contributions]
        parts = fields.items("parts", lambda part: part, max_items=MAX_PARTS)
        made = cls(
            roster,
            tuple(ReducedPart.from_outcome(part, said, on_roster) for part, said in enumerate(parts)),
            fields.peer("leader"),
            fields.octets("signature", length=64),
            fields.maybe("certificate", Certificate.from_value),
        )
        fields.done()
        return made

    def work_done(self) -> tuple[Work, ...]:
        """The work whose gradients are in the result, by microbatch: one entry for each id.

        Whoever died before any of its parts arrived is in no part: its microbatches are not trained on yet.
        """
        heard = {peer for part in self.parts for peer in part.contributors}
        found = {item.microbatch_id: item for c in self.roster.contributions if c.peer_id in heard for item in c.work}
        return tuple(found[number] for number in sorted(found))


def counted_tokens(contributions: Iterable[Contribution], recent_ids: frozenset[int]) -> dict[PeerId, int]:
    """The weight of each contribution: tokens of its microbatches that count.

    Of one id at several members the highest attempt counts (then the lowest peer id); an id of the last two
    rosters does not count.
    """
    best: dict[int, tuple[int, PeerId]] = {}
    ordered = sorted(contributions, key=lambda c: c.peer_id)
    for contribution in ordered:
        for item in contribution.work:
            held = best.get(item.microbatch_id)
            if item.microbatch_id not in recent_ids and (held is None or item.attempt > held[0]):
                best[item.microbatch_id] = (item.attempt, contribution.peer_id)
    return {
        c.peer_id: sum(i.num_tokens for i in c.work if best.get(i.microbatch_id, (0, ""))[1] == c.peer_id)
        for c in ordered
    }
