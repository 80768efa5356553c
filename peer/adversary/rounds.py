"""A round played falsely: as a reducer, as a leader, as a voter."""

from dataclasses import replace

import numpy as np

from peer.adversary.hooks import Adversary
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.ids import PeerId, Step
from swarm.core.round.averaging_round import AggregatePart, Instruction, RoundFacts, SendBallot, SendVote
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Exclusion, Roster
from swarm.core.round.voting import Vote
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


class TwoVotes(Adversary):
    """With each vote goes another one, for another value of the same phase."""

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        if not isinstance(instruction, SendVote) or not self.acts_in(facts.step):
            return (instruction,)
        asked, value = instruction.proposal, bytes(32)
        other = Vote(me.peer_id, me.sign(facts.election.ballot(asked.phase, asked.view, value)))
        return (instruction, SendVote(instruction.to, replace(asked, value=value), other))


def _victim(peers: tuple[PeerId, ...], me: PeerId) -> PeerId | None:
    return next((peer for peer in peers if peer != me), None)


def _signed(roster: Roster, me: Identity) -> Roster:
    return replace(roster, signature=me.sign(roster.signed_bytes()))
