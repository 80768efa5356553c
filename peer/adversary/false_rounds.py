"""Averaging rounds as a peer that misbehaves carries them out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.adversary.false_audits import FalseCharges
from peer.adversary.hooks import Adversary
from peer.pipeline.screens import Screens
from peer.round.driver import RoundDriver
from peer.round.mail.mail import RoundMail
from peer.round.part_exchange import PartExchange
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import Accumulation, StageReplica
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.reduce import read_and_written
from swarm.bulk_digest import bulk_digest
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.averaging_round import Finish, Instruction
from swarm.core.round.contribution import Level, ReducedPart, Work
from verification.round.papers import Bytes, Papers


class FalseDriver(RoundDriver):
    """Does something else than the round says."""

    def __init__(self, adversary: Adversary, steps: StageSteps, *given: Any, **named: Any) -> None:
        """`given` and `named` as `RoundDriver` has them."""
        charges, chance, me = named.pop("charges"), named.pop("chance"), steps.context.identity
        self._charged = FalseCharges(adversary, steps, charges)
        super().__init__(
            steps,
            *given,
            charges=lambda: adversary.charged(steps.chain, self._charged.brought(), me.peer_id),
            chance=lambda chain: adversary.revealed(Step(chain.version), chance(chain)),
            **named,
        )
        self._adversary, self._me = adversary, me

    def carry_out(self, state: StepState, instructions: Iterable[Instruction]) -> None:
        facts = state.round.facts if state.round is not None else None
        if state.round is not None:
            self._adversary.writes(state.round)
        done: list[Instruction] = []
        for instruction in instructions:
            assert facts is not None
            if isinstance(instruction, Finish):
                self._charged.certified(instruction.result)
            done += self._adversary.instructed(facts, instruction, self._me)
        super().carry_out(state, done)

    def listed(
        self, state: StepState, accumulation: Accumulation
    ) -> tuple[tuple[Work, ...], tuple[Papers | None, ...]]:
        work, _ = super().listed(state, accumulation)
        assert state.facts is not None
        said = self._adversary.listed(state.step, work, most=state.facts.limits.max_work)
        return tuple(item for item, _ in said), shown_for(said, accumulation)


def shown_for(
    said: Iterable[tuple[Work, MicrobatchId | None]], accumulation: Accumulation
) -> tuple[Papers | None, ...]:
    """Papers of some microbatches that were done, each for what is said to be done."""
    return tuple(accumulation.papers.get(shown) if shown is not None else None for _, shown in said)


class FalseEncoder(ContributionEncoder):
    """Contributes something else than the mean."""

    def __init__(self, adversary: Adversary, replica: StageReplica) -> None:
        super().__init__(replica)
        self._adversary = adversary
        self._step = Step(0)

    def encode(
        self, step: Step, accumulation: Accumulation, seeds: Sequence[bytes]
    ) -> tuple[list[memoryview], list[bytes]]:
        self._step = step
        return super().encode(step, accumulation, seeds)

    def run_of_parts(self, accumulation: Accumulation, run: range, seeds: Sequence[bytes]) -> list[memoryview]:
        parts = self.replica.parts()
        return [
            parts.contribution_codec(part).encode(self.mean_part(accumulation, parts[part]), seed=seed)
            for part, seed in zip(run, seeds, strict=True)
        ]

    def mean_part(self, accumulation: Accumulation, where: slice) -> NDArray[np.float32]:
        said, size = super().mean_part(accumulation, where), self.replica.parts().num_values
        if where.start < size:
            return self._adversary.mean(self._step, where, said)
        return self._adversary.moments(self._step, said, is_second=where.start >= 2 * size)


class FalseReducer(PartReducer):
    """Reduces to something else."""

    def __init__(self, adversary: Adversary, replica: StageReplica) -> None:
        super().__init__(replica)
        self._adversary = adversary

    def reduce(
        self,
        part: int,
        bodies: Sequence[tuple[int, Bytes]],
        *,
        norm_cap: float | None,
        seed: bytes,
        level: Level = "all",
    ) -> tuple[memoryview, bytes]:
        right = super().reduce(part, bodies, norm_cap=norm_cap, seed=seed, level=level)
        parts, step = self.replica.parts(), Step(self.replica.version)
        codec = read_and_written(level, parts.codec_name(part))[1]
        return self._adversary.reduced(step, right, codec, num_values=parts.size(part), seed=seed)


class FalsePartExchange(PartExchange):
    """Contributes and reduces falsely, and tells some members of another part than the others."""

    def __init__(self, adversary: Adversary, steps: StageSteps, mail: RoundMail, screens: Screens) -> None:
        super().__init__(steps, mail, screens)
        self._adversary, self._false_steps = adversary, steps
        self.encoder = FalseEncoder(adversary, steps.replica)
        self.reducer = FalseReducer(adversary, steps.replica)

    def send_reduced(self, state: StepState, to: Sequence[PeerId], reduced: ReducedPart) -> None:
        context, replica, held = self._false_steps.context, self._false_steps.replica, state.parts
        made = held.reductions[reduced]
        if made.reducer != context.me or reduced.cohort is not None:
            super().send_reduced(state, to, reduced)
            return
        parts, body = replica.parts(), held.reduced[reduced.part, reduced.digest]
        codec, num_values = parts.result_codec(reduced.part), parts.size(reduced.part)
        for place, peer in enumerate(to):
            said = self._adversary.reduced_for(state.step, place, body, codec, num_values=num_values)
            if said is body:
                super().send_reduced(state, (peer,), reduced)
                continue
            squares = squares_of(codec, said, num_values)
            other = replace(reduced, digest=bulk_digest(said), squares=squares)
            held.reduced[other.part, other.digest] = said
            held.reductions[other] = replace(made, digest=other.digest, squares=squares).signed_by(context.identity)
            super().send_reduced(state, (peer,), other)
            del held.reduced[other.part, other.digest], held.reductions[other]  # it shows nobody that there are two
