"""What reducers signed for the parts of the last steps, and what this peer put into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peer.round.step_state import StepState
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import ReducedPart, Result, Roster
from swarm.core.round.parts import Slot
from swarm.core.round.words import Reduction, signed_for
from swarm.identity.key import verify
from verification.round.papers import Bytes


@dataclass(frozen=True)
class SignedPart:
    """What travels with a reduced part's bytes: everything else that its reducer signed is known to the round."""

    reduced: ReducedPart
    reducer: PeerId
    """Who aggregated it, whoever hands it on."""
    signature: bytes
    shares: tuple[bytes, ...]
    """The signatures of who made the cohorts' shares in it, in their order."""

    @classmethod
    def of(cls, reduced: ReducedPart, roster: Roster, held: Mapping[ReducedPart, Reduction]) -> "SignedPart":
        """`held`: what its reducer signed for the part, and others for the shares in it, made under the roster."""
        made = held[reduced]
        shares = tuple(held[share].signature for share in reduced.shares_of(roster))
        return cls(reduced, made.reducer, made.signature, shares)

    def to_value(self) -> dict[str, Value]:
        return {"reduced": self.reduced.to_value(), **self.answer()}

    @classmethod
    def from_fields(cls, head: Fields) -> "SignedPart":
        """Raises RemoteError("malformed")."""
        reduced = ReducedPart.from_value(head.message("reduced"))
        return cls(reduced, *_signatures(reduced, head))

    def answer(self) -> dict[str, Value]:
        """For who asks for the bytes, and knows the part."""
        return {"reducer": self.reducer, "signature": self.signature, "shares": list(self.shares)}

    @classmethod
    def from_answer(cls, reduced: ReducedPart, answer: Value) -> "SignedPart | None":
        """None if the holder has the bytes alone. Raises RemoteError("malformed")."""
        fields = Fields("part answer", answer)
        if not fields.optional("reducer"):
            return None
        made = cls(reduced, *_signatures(reduced, fields))
        fields.done()
        return made

    def checked(
        self, roster: Roster | None, weights: Mapping[PeerId, int], body: Bytes, *, norm_cap: float | None
    ) -> dict[ReducedPart, Reduction]:
        """What was signed for the part and for the shares in it. `roster` is the part's, with the chain's weights.

        Raises RemoteError if the roster is not known here (None), if the bytes are not the part's, or if no member of
        the stage signed for them.
        """
        reduced = self.reduced
        if roster is None:
            raise RemoteError("protocol", f"reduced part {reduced.part} is of no roster that is certified here")
        if len(body) if reduced.is_empty else bulk_digest(body) != reduced.digest:
            raise RemoteError("digest", f"reduced part {reduced.part} differs from its digest")
        signatures = (self.signature, *self.shares)
        found = signed_for(roster, reduced, weights, self.reducer, signatures, norm_cap=norm_cap)
        for made in found.values():
            made.check(verify)
        return found


def _signatures(reduced: ReducedPart, fields: Fields) -> tuple[PeerId, bytes, tuple[bytes, ...]]:
    """Who reduced the part, its signature, and those of who made the shares in it."""
    reducer, signature = fields.peer("reducer"), fields.octets("signature", length=64)
    shares = fields.items("shares", _signature_item, max_items=len(reduced.shares))
    if len(shares) != len(reduced.shares):
        raise RemoteError("malformed", f"{len(shares)} signatures for {len(reduced.shares)} shares")
    return reducer, signature, shares


def _signature_item(value: Value) -> bytes:
    return Fields("signature", {"of": value}).octets("of", length=64)


class ReductionStore:
    """Of the last steps: the reductions that made the result, what went into those that were made here, and this peer's
    own parts, which went into all.

    Of an earlier process nothing is known: what it put into steps cannot be told any more.
    """

    def __init__(self, retained_versions: int) -> None:
        self._retained = retained_versions
        self._reductions: dict[Step, dict[Slot, Reduction]] = {}
        self._inputs: dict[Step, dict[tuple[int, bytes], Bytes]] = {}

    def contributed(self, step: Step, parts: Sequence[Bytes], digests: Sequence[bytes]) -> None:
        """The encoded parts of what this peer contributes, each with its BLAKE3: it can show them, whoever reduces."""
        own = enumerate(zip(digests, parts, strict=True))
        self._inputs.setdefault(step, {}).update({(index, digest): part for index, (digest, part) in own})

    def keep(
        self, state: StepState, result: Result, weights: Mapping[PeerId, int], *, norm_cap: float | None, me: PeerId
    ) -> None:
        """The step's outcome is `result`: of what came and was made in it, what belongs to the outcome stays.

        `weights` and `norm_cap` are of the version that the round started from.
        """
        reductions: dict[Slot, Reduction] = {}
        roster = result.roster
        for reduced in (made for part in result.parts for made in (part, *part.shares_of(roster))):
            held = state.parts.reductions.get(reduced)
            if held is None:  # a part without bytes, or one that came from a store
                continue
            known = Reduction.of(roster, reduced, weights, norm_cap=norm_cap, reducer=held.reducer)
            if replace(known, signature=held.signature) == held:
                reductions[reduced.slot] = held
        self._reductions[state.step] = reductions
        held_inputs: dict[tuple[int, bytes], Bytes | None] = {}  # None: made here, before this process was restarted
        for made in (made for made in reductions.values() if made.reducer == me):
            for one in made.inputs:
                key, of = (made.part, one.digest), (made.part, one.peer_id)
                held_inputs[key] = (
                    state.parts.reduced.get(key) if made.level == "shares" else state.parts.received.get(of)
                )
            if made.level == "cohort":  # the combiner's input, of which its maker is asked first
                held_inputs[made.part, made.digest] = state.parts.reduced.get((made.part, made.digest))
        kept = {key: body for key, body in held_inputs.items() if body is not None}
        self._inputs.setdefault(state.step, {}).update(kept)
        oldest = int(state.step) - self._retained
        for held_steps in (self._reductions, self._inputs):
            for step in [step for step in list(held_steps) if int(step) < oldest]:  # a copy: this is the exact thread
                del held_steps[step]

    def of_step(self, step: Step) -> Mapping[Slot, Reduction]:
        """By part and cohort; parts that are empty or came unsigned are missing."""
        return self._reductions.get(step, {})

    def reduction(self, step: Step, slot: Slot) -> Reduction | None:
        return self.of_step(step).get(slot)

    def said(self, step: Step, reduced: ReducedPart, roster: Roster) -> SignedPart | None:
        """What was signed for a part of the step's result; None if it came unsigned."""
        made = {one: self.reduction(step, one.slot) for one in (reduced, *reduced.shares_of(roster))}
        held = {one: found for one, found in made.items() if found is not None}
        return SignedPart.of(reduced, roster, held) if len(held) == len(made) else None

    def input(self, step: Step, part: int, digest: bytes) -> Bytes | None:
        """What this peer contributed, or what went into a reduction of this part that was made here, or the share that
        came of it."""
        return self._inputs.get(step, {}).get((part, digest))
