"""What reducers sign of their work: the inputs to a part, each by weight and digest, who is left out, and the output.

Aggregation is exact, so the inputs' bytes prove a wrong output. Whoever gets the part knows the inputs from the
certified roster and the chain: only the signature need travel with it. Voters who get no parts are shown the signatures
of all parts of a result, with the weights (`Words`): what a result says of a part is its reducer's word, or is not
voted for.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import Annotated, ClassVar

from swarm.core.audit.ticket import Verify
from swarm.core.canonical import digest
from swarm.core.cohorts import MAX_COHORTS, MAX_MEMBERS
from swarm.core.errors import RemoteError, TransientError
from swarm.core.forms import SIGNATURE, Digest, Integer, StageNumber
from swarm.core.ids import PeerId, Step
from swarm.core.kept import once
from swarm.core.layout import AtMost
from swarm.core.record import Record, Row, SignedValue
from swarm.core.round.contribution import MAX_PARTS, Level, ReducedPart, Result, Roster
from swarm.core.round.voting import Vote, quorum

MAX_WEIGHT = 1 << 48


@dataclass(frozen=True)
class ReductionInput(Row):
    """One contribution to a part, or one cohort's share of it."""

    peer_id: PeerId
    """Who contributed; of a share, who made it."""
    num_tokens: Annotated[int, Integer(low=1, high=MAX_WEIGHT)]
    """Its weight."""
    digest: Digest
    """BLAKE3 of the encoded part, as the contribution commits to it."""


@dataclass(frozen=True)
class Malformed(Row):
    """A contribution to a part that stands for no values, as who reduced the part says."""

    peer_id: PeerId
    digest: Digest
    """BLAKE3 of the encoded part, as the contribution commits to it: bytes of this digest that decode prove a lie."""


@dataclass(frozen=True, kw_only=True)
class Reduction(SignedValue):
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
    malformed: Annotated[tuple[Malformed, ...], AtMost(MAX_MEMBERS)] = ()
    """Who is left out, in the order of peer ids: whoever of the roster is neither here nor among the inputs has no
    weight."""
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
        committed = {made.peer_id: made.part_digests[reduced.part] for made in roster.contributions}
        inputs: list[ReductionInput] = []
        if reduced.shares:
            for made, share in zip(reduced.shares, reduced.shares_of(roster), strict=True):
                num_tokens = sum(weights[peer] for peer in share.contributors)
                inputs += [ReductionInput(made.reducer, num_tokens, made.digest)] if num_tokens else []
        else:
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
            malformed=tuple(Malformed(one.peer_id, committed[one.peer_id]) for one in reduced.excluded),
            norm_cap=norm_cap,
            digest=reduced.digest,
            squares=reduced.squares,
        )

    @once
    def statement_digest(self) -> bytes:
        """What an audit's draw on the reduction is made from: digest of all that its maker signed."""
        return digest(self.DOMAIN, self.shallow_value())

    def check(self, verify: Verify) -> None:
        """Raises RemoteError unless the reducer signed it."""
        if not verify(self.reducer, self.signed_bytes(), self.signature):
            raise RemoteError("signature", f"reduction of part {self.part} is not signed by it", self.reducer)

    def _check_fields(self) -> None:
        if self.norm_cap is not None and self.norm_cap < 0:
            raise RemoteError("malformed", f"reduction with norm cap {self.norm_cap}")


@dataclass(frozen=True)
class Word(Row):
    """The signatures under a part of a result: of who reduced it, and of who made the cohorts' shares in it."""

    reducer: Annotated[int, Integer(high=MAX_MEMBERS - 1)]
    """Its place among the roster's members: whoever has reduced may sign, drawn or not."""
    signature: Annotated[bytes, SIGNATURE]
    shares: Annotated[tuple[Annotated[bytes, SIGNATURE], ...], AtMost(MAX_COHORTS)] = ()
    """In the order of cohorts."""


@dataclass(frozen=True)
class Words(Record):
    """What the parts of a result were signed for, as a leader shows it to voters who got none of them."""

    weights: Annotated[tuple[Annotated[int, Integer(high=MAX_WEIGHT)], ...], AtMost(MAX_MEMBERS)]
    """Of each contribution on the roster, in its order: the reducers signed for them, and no voter has to know the
    chain."""
    norm_cap: float | None
    """As in every `Reduction` of the round."""
    said: Annotated[tuple[Word, ...], AtMost(MAX_PARTS)]
    """Of each part that is not empty, in order."""
    agreed: Annotated[tuple[Vote, ...], AtMost(MAX_MEMBERS)] = ()
    """Members' votes for the result, sorted, where it leaves parts empty: nobody signs that he brought nothing."""

    @classmethod
    def of(
        cls,
        result: Result,
        held: Mapping[ReducedPart, Reduction],
        weights: Mapping[PeerId, int],
        *,
        norm_cap: float | None,
        votes: Iterable[Vote] = (),
    ) -> "Words | None":
        """`held`: what was signed for parts and shares; None if it lacks something that the result says. `votes`: for
        the result, as far as they are cast.
        """
        roster, said = result.roster, []
        for reduced in result.parts:
            if reduced.is_empty:
                continue
            made, *shares = (held.get(one) for one in (reduced, *reduced.shares_of(roster)))
            if made is None or None in shares:
                return None
            signatures = tuple(share.signature for share in shares if share is not None)
            said.append(Word(roster.members.index(made.reducer), made.signature, signatures))
        agreed = [vote for vote in votes if vote.voter in roster.members and len(said) < len(result.parts)]
        agreed.sort(key=lambda vote: vote.voter)
        return cls(tuple(weights[made.peer_id] for made in roster.contributions), norm_cap, tuple(said), tuple(agreed))

    def of_result(
        self,
        result: Result,
        weights: Mapping[PeerId, int],
        *,
        norm_cap: float | None,
        known: Container[ReducedPart] = (),
    ) -> Iterator[tuple[ReducedPart, Reduction]]:
        """Each part and share of the result, but for parts that are `known`, with what was signed for it if it was by
        these weights: not checked yet.

        Raises RemoteError("malformed") if these are not the words of so many parts and shares.
        """
        roster = result.roster
        parts = [reduced for reduced in result.parts if not reduced.is_empty]
        if len(self.said) != len(parts):
            raise RemoteError("malformed", f"{len(self.said)} words for {len(parts)} parts", result.leader)
        for reduced, word in zip(parts, self.said, strict=True):
            if len(word.shares) != len(reduced.shares) or word.reducer >= len(roster.members):
                raise RemoteError("malformed", f"a word that is not of part {reduced.part}", result.leader)
            if reduced not in known:
                signatures = (word.signature, *word.shares)
                yield from signed_for(
                    roster, reduced, weights, roster.members[word.reducer], signatures, norm_cap=norm_cap
                ).items()

    def check(self, result: Result, verify: Verify) -> None:
        """Raises RemoteError unless all that the result says of its parts is signed by members who reduced them, by
        weights that the contributions allow: at all stages but the first, all that they list counts."""
        contributions = result.roster.contributions
        listed = [made.num_tokens for made in contributions]
        is_less = result.roster.stage == 0 and len(listed) == len(self.weights)
        if not (all(map(le, self.weights, listed)) if is_less else list(self.weights) == listed):
            raise RemoteError("malformed", "reducers' words by weights that no contribution has", result.leader)
        weights = {made.peer_id: weight for made, weight in zip(contributions, self.weights, strict=True)}
        for _, made in self.of_result(result, weights, norm_cap=self.norm_cap):
            made.check(verify)

    def check_agreed(self, result: Result, ballot: bytes, seats: Mapping[PeerId, int], verify: Verify) -> None:
        """`ballot`: what a vote for the result signs; `seats`: what the votes of the members weigh who are there.

        Raises TransientError if the result leaves parts empty and they have not voted for it, by a quorum of their own:
        they know whether somebody brought the parts.
        """
        voters = [vote.voter for vote in self.agreed]
        if voters != sorted(set(voters)) or not all(verify(one.voter, ballot, one.signature) for one in self.agreed):
            raise RemoteError("signature", "votes for empty parts that are not members', each once", result.leader)
        if not any(reduced.is_empty for reduced in result.parts):
            return
        weighed, needed = sum(seats.get(voter, 0) for voter in voters), quorum(sum(seats.values()))
        if weighed < needed:
            raise TransientError(f"members of {weighed} have voted for empty parts, not of {needed}")


def signed_for(
    roster: Roster,
    reduced: ReducedPart,
    weights: Mapping[PeerId, int],
    reducer: PeerId,
    signatures: Sequence[bytes],
    *,
    norm_cap: float | None,
) -> dict[ReducedPart, Reduction]:
    """What a part and the shares in it were signed for, if these are the signatures: its reducer's and those of who
    made the shares. They are not checked yet.

    Raises RemoteError if one of them is no member.
    """
    made = {}
    makers = (reducer, *(share.reducer for share in reduced.shares))
    for one, maker, signature in zip((reduced, *reduced.shares_of(roster)), makers, signatures, strict=True):
        if maker not in roster.members:
            raise RemoteError("standing", f"reducer {maker} of part {reduced.part} is no member", maker)
        unsigned = Reduction.of(roster, one, weights, norm_cap=norm_cap, reducer=maker)
        made[one] = replace(unsigned, signature=signature)
    return made
