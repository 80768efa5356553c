"""This is where a peer keeps what reducers signed for the parts of the last steps, and what it reduced its own from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from peer.step_state import Bytes, StepState
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.contribution import ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from verification.reduction import Reduction


@dataclass(frozen=True)
class SignedPart:
    """What travels with a reduced part's bytes: everything else that its reducer signed is known to the round."""

    reduced: ReducedPart
    reducer: PeerId
    """Who aggregated it, whoever hands it on."""
    signature: bytes

    @classmethod
    def of(cls, reduced: ReducedPart, reduction: Reduction) -> "SignedPart":
        return cls(reduced, reduction.reducer, reduction.signature)

    def to_value(self) -> dict[str, Value]:
        return {"reduced": self.reduced.to_value(), "reducer": self.reducer, "signature": self.signature}

    @classmethod
    def from_fields(cls, head: Fields) -> "SignedPart":
        """Raises RemoteError("malformed")."""
        reduced = ReducedPart.from_value(head.message("reduced"))
        return cls(reduced, head.peer("reducer"), head.octets("signature", length=64))

    @staticmethod
    def answer(held: Reduction | None) -> dict[str, Value]:
        """For who asks for the bytes, and knows the part."""
        return {} if held is None else {"reducer": held.reducer, "signature": held.signature}

    @classmethod
    def from_answer(cls, reduced: ReducedPart, answer: Value) -> "SignedPart | None":
        """None if the holder has the bytes alone. Raises RemoteError("malformed")."""
        fields = Fields("part answer", answer)
        if not fields.optional("reducer"):
            return None
        made = cls(reduced, fields.peer("reducer"), fields.octets("signature", length=64))
        fields.done()
        return made

    def checked(
        self, roster: Roster | None, weights: Mapping[PeerId, int], body: Bytes, *, norm_cap: float | None
    ) -> Reduction:
        """What the reducer signed. `roster` is the part's, with the chain's weights; None: it is not known here.

        Raises RemoteError if the bytes are not the part's, or if no member of the stage signed for them.
        """
        reduced = self.reduced
        if roster is None:
            raise RemoteError("protocol", f"reduced part {reduced.part} is of no roster that is certified here")
        if bulk_digest(body) != reduced.digest:
            raise RemoteError("digest", f"reduced part {reduced.part} differs from its digest")
        if self.reducer not in roster.members:
            raise RemoteError("standing", f"reducer {self.reducer} of part {reduced.part} is no member", self.reducer)
        unsigned = Reduction.of(roster, reduced, weights, norm_cap=norm_cap, reducer=self.reducer)
        made = replace(unsigned, signature=self.signature)
        made.check()
        return made


class ReductionStore:
    """Of the last steps: the reduction of each part of the result, and the others' inputs to those made here."""

    def __init__(self, retained_versions: int) -> None:
        self._retained = retained_versions
        self._reductions: dict[Step, dict[int, Reduction]] = {}
        self._inputs: dict[Step, dict[tuple[int, PeerId], Bytes]] = {}

    def keep(
        self, state: StepState, result: Result, weights: Mapping[PeerId, int], *, norm_cap: float | None, me: PeerId
    ) -> None:
        """The step's outcome is `result`: of what came and was made in it, what belongs to the outcome stays.

        `weights` and `norm_cap` are of the version that the round started from.
        """
        reductions: dict[int, Reduction] = {}
        for reduced in result.parts:
            held = state.reductions.get(reduced)
            if held is None:  # a part without bytes, or one that came from a store
                continue
            known = Reduction.of(result.roster, reduced, weights, norm_cap=norm_cap, reducer=held.reducer)
            if replace(known, signature=held.signature) == held:
                reductions[reduced.part] = held
        self._reductions[state.step] = reductions
        self._inputs[state.step] = {
            (made.part, one.peer_id): state.received[made.part, one.peer_id]
            for made in reductions.values()
            if made.reducer == me
            for one in made.inputs
            if one.peer_id != me
        }
        oldest = int(state.step) - self._retained
        for held_steps in (self._reductions, self._inputs):
            for step in [step for step in held_steps if int(step) < oldest]:
                del held_steps[step]

    def of_step(self, step: Step) -> Mapping[int, Reduction]:
        """By part; parts that are empty or came unsigned are missing."""
        return self._reductions.get(step, {})

    def reduction(self, step: Step, part: int) -> Reduction | None:
        return self.of_step(step).get(part)

    def input(self, step: Step, part: int, peer: PeerId) -> Bytes | None:
        """Another's encoded part, of which this peer made the reduction."""
        return self._inputs.get(step, {}).get((part, peer))
