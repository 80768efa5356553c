"""This is where a reducer signs what it made of what: the inputs to a part, each by weight and digest, and the output.

Aggregation is exact, so the inputs' bytes prove a wrong output. Whoever gets the part knows the inputs from the
certified roster and the chain: only the signature need travel with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, get_args

from swarm.core.canonical import Value, digest
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.contribution import MAX_PARTS, Level, ReducedPart, Roster
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, number_item
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.signed_record import SignedRecord, opened

LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class ReductionInput:
    """One contribution to a part, or one cohort's share of it."""

    peer_id: PeerId
    """Who contributed; of a share, who made it."""
    num_tokens: int
    """Its weight."""
    digest: bytes
    """BLAKE3 of the encoded part, as the contribution commits to it."""

    @classmethod
    def from_value(cls, value: Value) -> "ReductionInput":
        fields = Fields.of_list("reduction input", value, "peer_id", "num_tokens", "digest")
        num_tokens = fields.integer("num_tokens", low=1, high=1 << 48)
        return cls(fields.peer("peer_id"), num_tokens, fields.octets("digest", length=32))


@dataclass(frozen=True, kw_only=True)
class Reduction(SignedRecord):
    """A reducer's word for one part."""

    DOMAIN: ClassVar[str] = "reduction"
    run_id: str
    stage: StageIndex
    step: Step
    previous_name: bytes
    """Name of the version that the round starts from."""
    reducer: PeerId
    part: int
    level: Level = "all"
    """What the inputs are: in a stage of several cohorts one's contributions, or the cohorts' shares."""
    inputs: tuple[ReductionInput, ...]
    """Contributions of some weight in the order of peer ids, or shares in the order of cohorts."""
    norm_cap: float | None
    """Of the version that the round starts from (`swarm.averaging.reduce`); None while it has none."""
    digest: bytes
    """BLAKE3 of the one encoding that everyone gets."""
    squares: float
    """Sum of squares of what it stands for; the gradient is clipped by it."""

    @classmethod
    def of(
        cls,
        roster: Roster,
        reduced: ReducedPart,
        weights: Mapping[PeerId, int],
        *,
        norm_cap: float | None,
        reducer: PeerId,
    ) -> "Reduction":
        """What `reducer` is to sign for the part; `weights` are the chain's (`StageChain.weights_of`)."""
        inputs: list[ReductionInput] = []
        if reduced.shares:
            for made, share in zip(reduced.shares, reduced.shares_of(roster), strict=True):
                num_tokens = sum(weights[peer] for peer in share.contributors)
                inputs += [ReductionInput(made.reducer, num_tokens, made.digest)] if num_tokens else []
        else:
            committed = {made.peer_id: made.part_digests[reduced.part] for made in roster.contributions}
            counted = [peer for peer in reduced.contributors if weights[peer] > 0]
            inputs += [ReductionInput(peer, weights[peer], committed[peer]) for peer in counted]
        return cls(
            run_id=roster.run_id,
            stage=roster.stage,
            step=roster.step,
            previous_name=roster.previous_name,
            reducer=reducer,
            part=reduced.part,
            level=reduced.level,
            inputs=tuple(inputs),
            norm_cap=norm_cap,
            digest=reduced.digest,
            squares=reduced.squares,
        )

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "step": self.step,
            "previous_name": self.previous_name,
            "reducer": self.reducer,
            "part": self.part,
            "level": self.level,
            "inputs": [[one.peer_id, one.num_tokens, one.digest] for one in self.inputs],
            "norm_cap": self.norm_cap,
            "digest": self.digest,
            "squares": self.squares,
        }

    @cached_property
    def statement_digest(self) -> bytes:
        """What an audit's draw on the reduction is made from: digest of all that its maker signed."""
        return digest(self.DOMAIN, self.signed_value())

    def check(self) -> None:
        """Raises RemoteError unless the reducer signed it."""
        if not self.is_signed_by(self.reducer):
            raise RemoteError("signature", f"reduction of part {self.part} is not signed by it", self.reducer)

    @classmethod
    def from_value(cls, value: Value) -> "Reduction":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("reduction", value)
        made = cls(
            run_id=fields.text("run_id"),
            stage=StageIndex(fields.integer("stage", high=1 << 16)),
            step=Step(fields.integer("step")),
            previous_name=fields.octets("previous_name", length=32),
            reducer=fields.peer("reducer"),
            part=fields.integer("part", high=MAX_PARTS - 1),
            level=_level(fields.text("level")),
            inputs=fields.items("inputs", ReductionInput.from_value, max_items=MAX_MEMBERS),
            norm_cap=fields.maybe("norm_cap", number_item),
            digest=fields.octets("digest", length=32),
            squares=fields.number("squares"),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        if made.norm_cap is not None and made.norm_cap < 0:
            raise RemoteError("malformed", f"reduction with norm cap {made.norm_cap}")
        return made


def _level(text: str) -> Level:
    for level in LEVELS:
        if level == text:
            return level
    raise RemoteError("malformed", f"reduction of level {text[:20]!r}")
