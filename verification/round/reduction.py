"""What a reducer signs of its work: the inputs to a part, each by weight and digest, and the output.

Aggregation is exact, so the inputs' bytes prove a wrong output. Whoever gets the part knows the inputs from the
certified roster and the chain: only the signature need travel with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, StageNumber
from swarm.core.ids import PeerId, Step
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.core.round.cohorts import MAX_MEMBERS
from swarm.core.round.contribution import MAX_PARTS, Level, ReducedPart, Roster
from swarm.identity.signed_record import SignedRecord


@dataclass(frozen=True)
class ReductionInput(Row):
    """One contribution to a part, or one cohort's share of it."""

    peer_id: PeerId
    """Who contributed; of a share, who made it."""
    num_tokens: Annotated[int, Integer(low=1, high=1 << 48)]
    """Its weight."""
    digest: Digest
    """BLAKE3 of the encoded part, as the contribution commits to it."""


@dataclass(frozen=True, kw_only=True)
class Reduction(SignedRecord):
    """A reducer's word for one part."""

    DOMAIN: ClassVar[str] = "reduction"
    run_id: str
    stage: StageNumber
    step: Step
    previous_name: Digest
    """Name of the version that the round starts from."""
    reducer: PeerId
    part: Annotated[int, Integer(high=MAX_PARTS - 1)]
    level: Level = "all"
    """What the inputs are: in a stage of several cohorts one's contributions, or the cohorts' shares."""
    inputs: Annotated[tuple[ReductionInput, ...], AtMost(MAX_MEMBERS)]
    """Contributions of some weight in the order of peer ids, or shares in the order of cohorts."""
    norm_cap: float | None
    """Of the version that the round starts from (`swarm.averaging.reduce`); None while it has none."""
    digest: Digest
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

    @cached_property
    def statement_digest(self) -> bytes:
        """What an audit's draw on the reduction is made from: digest of all that its maker signed."""
        return digest(self.DOMAIN, self.shallow_value())

    def check(self) -> None:
        """Raises RemoteError unless the reducer signed it."""
        if not self.is_signed_by(self.reducer):
            raise RemoteError("signature", f"reduction of part {self.part} is not signed by it", self.reducer)

    def _check_fields(self) -> None:
        if self.norm_cap is not None and self.norm_cap < 0:
            raise RemoteError("malformed", f"reduction with norm cap {self.norm_cap}")
