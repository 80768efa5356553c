"""A round played falsely: as a reducer, as a leader, as a voter."""

from dataclasses import replace

import numpy as np

from peer.adversary.hooks import Adversary
from peer.adversary.strengths import GROUND_NAMES, GROUND_VALUE_EVERY, WRITTEN_SQUARES
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.audit.chance import Chance
from swarm.core.canonical import digest
from swarm.core.ids import PeerId, Step
from swarm.core.ranking import rank
from swarm.core.round.averaging_round import (
    AggregatePart,
    AveragingRound,
    Instruction,
    RoundFacts,
    SendBallot,
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import MAX_CHARGES, Charge, Exclusion, ReducedPart, Roster
from swarm.core.round.parts import RoundParts
from swarm.core.round.voting import Vote
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import Identity


class EquivocatingReducer(Adversary):
    """Of a part it reduces every second member gets another encoding, which is signed as well."""

    def reduced_for(self, step: Step, place: int, body: Encoded, codec: VectorCodec, *, num_values: int) -> Encoded:
        if not self.acts_in(step) or place % 2 == 0:
            return body
        values = np.empty(num_values, dtype=np.float32)
        codec.decode(body, values)
        return codec.encode(-values, seed=bytes(32))


class OmittingReducer(Adversary):
    """One contributor, always the same, is in none of the parts it reduces: as if they were nonsense."""

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        if not isinstance(instruction, AggregatePart) or not self.acts_in(facts.step):
            return (instruction,)
        victim = _victim(instruction.contributors, me.peer_id)
        left = tuple(peer for peer in instruction.contributors if peer != victim)
        if victim is None or not left:
            return (instruction,)
        excluded = [*instruction.excluded, Exclusion(victim, "malformed")]
        ordered = tuple(sorted(excluded, key=lambda departure: departure.peer_id))
        return (replace(instruction, contributors=left, excluded=ordered),)


class OmittingLeader(Adversary):
    """Where it leads, one member, always the same, is as if it had not committed."""

    def ignores(self, step: Step, members: tuple[PeerId, ...], sender: PeerId, *, me: PeerId) -> bool:
        return self.acts_in(step) and sender == _victim(members, me)

    def hears_nobody(self, step: Step) -> bool:
        return self.acts_in(step)


class EquivocatingLeader(Adversary):
    """Every second member is asked to vote for another roster of the same view, without one of the contributions."""

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        if not isinstance(instruction, SendBallot) or not self.acts_in(facts.step):
            return (instruction,)
        roster = instruction.proposal.roster
        if roster is None or len(roster.contributions) < 2:
            return (instruction,)
        other = _signed(replace(roster, contributions=roster.contributions[:-1], certificate=None), me)
        asked = Proposal.of_roster(other, instruction.proposal.proof)
        return (replace(instruction, to=instruction.to[::2]), SendBallot(instruction.to[1::2], asked))


class WrittenResult(Adversary):
    """Where it leads, the result says of each part that it is very long, and every step is clipped to nothing."""

    def writes(self, machine: AveragingRound) -> None:
        parts = machine.parts
        if self.acts_in(machine.facts.step) and not isinstance(parts.reduced, _Written):
            parts.reduced = _Written(parts)


class _Written(dict[int, ReducedPart]):
    """Reduced parts as a liar has them: with other squares, which it takes for signed."""

    def __init__(self, parts: RoundParts) -> None:
        super().__init__()
        self._parts = parts
        for part, reduced in parts.reduced.items():
            self[part] = reduced

    def __setitem__(self, part: int, reduced: ReducedPart) -> None:
        if not reduced.is_empty:
            reduced = replace(reduced, squares=WRITTEN_SQUARES)
            self._parts.stated.add(reduced)
        super().__setitem__(part, reduced)

    def setdefault(self, part: int, reduced: ReducedPart) -> ReducedPart:
        if part not in self:
            self[part] = reduced
        return self[part]


class TwoVotes(Adversary):
    """With each vote goes another one, for another value of the same phase."""

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        if not isinstance(instruction, SendVote) or not self.acts_in(facts.step):
            return (instruction,)
        asked, value = instruction.proposal, bytes(32)
        other = Vote(me.peer_id, me.sign(facts.election.ballot(asked.phase, asked.view, value)))
        return (instruction, SendVote(instruction.to, replace(asked, value=value), other))


class Grinding(Adversary):
    """It writes what it may until a hash of it puts it first: charges that nobody brings, in every contribution; and in
    some of them another value than its chain has."""

    def charged(self, chain: StageChain, charges: tuple[Charge, ...], me: PeerId) -> tuple[Charge, ...]:
        if not self.acts_in(Step(chain.version)):
            return charges
        tried = (digest("ground", [chain.name, number, me]) for number in range(GROUND_NAMES))
        accused = _victim(chain.members, me)
        ground = [Charge(accused, name) for name in tried if accused and rank(chain.members, "leader", name)[0] == me]
        return tuple([*charges, *ground][:MAX_CHARGES])

    def revealed(self, step: Step, chance: Chance) -> Chance:
        if not self.acts_in(step) or int(step) % GROUND_VALUE_EVERY != GROUND_VALUE_EVERY - 1:
            return chance
        return replace(chance, value=digest("ground", [chance.value]))


def _victim(peers: tuple[PeerId, ...], me: PeerId) -> PeerId | None:
    return next((peer for peer in peers if peer != me), None)


def _signed(roster: Roster, me: Identity) -> Roster:
    return replace(roster, signature=me.sign(roster.signed_bytes()))
