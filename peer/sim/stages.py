"""This is where the peers of a simulated stage end a step: contributions, one reduction for all, the exact step.

Equal computation is done once: all replicas of a stage hold the same bytes, so the first one steps for all. Votes are
left out: a result is what the contributions give, and nobody disputes it.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from peer.round_work import encode_contribution, reduce_part
from peer.sim.pipeline import SimulatedPeer
from swarm.averaging.result_decoder import squares_of
from swarm.averaging.seeds import part_seeds, reduced_seed
from swarm.checkpoint.state import StageState
from swarm.core.contribution import Contribution, Departure, ReducedPart, Result, Roster
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.settings import RunSettings
from swarm.core.stage_chain import StageChain


@dataclass(frozen=True)
class Round:
    """A round that is over, and what an audit of it needs."""

    chain: StageChain
    """Of the version that it started from."""
    state: StageState
    """Of that version."""
    roster: Roster


class SimulatedStage:
    """One stage: its peers and its past."""

    def __init__(self, settings: RunSettings, peers: Sequence[SimulatedPeer], chain: StageChain) -> None:
        self.settings = settings
        self.peers = {peer.peer_id: peer for peer in peers}
        self.chain = chain
        self.rounds: dict[Step, Round] = {}
        """The last ones."""

    @property
    def stage(self) -> StageIndex:
        return self.chain.stage

    @property
    def members(self) -> list[SimulatedPeer]:
        return [self.peers[peer] for peer in self.chain.members]

    def round(self, put_out: Container[PeerId]) -> None:
        """End the step that the stage is at; those put out contribute nothing, and are no members after it."""
        chain, step = self.chain, Step(self.chain.version)
        first = self.members[0].replica
        state = first.frozen_state()
        made: dict[PeerId, Contribution] = {}
        parts: dict[PeerId, Sequence[memoryview]] = {}
        for peer in self.members:
            if peer.peer_id not in put_out:
                made[peer.peer_id], parts[peer.peer_id] = self._contribute(peer, step)
        roster = Roster(
            run_id=chain.run_id,
            stage=chain.stage,
            step=step,
            view=0,
            revision=0,
            leader=chain.members[0],
            previous_name=chain.name,
            members=chain.members,
            contributions=tuple(made[peer] for peer in sorted(made) if made[peer].work),
            reducers=(),
            joins=(),
            leaves=tuple(Departure(peer, "put out") for peer in chain.members if peer in put_out),
            reason="full",
        )
        self.rounds[step] = Round(chain, state, roster)
        for old in [old for old in self.rounds if int(old) < int(step) - self.settings.audits.retained_versions]:
            del self.rounds[old]
        self._take(roster, parts)

    def _contribute(self, peer: SimulatedPeer, step: Step) -> tuple[Contribution, Sequence[memoryview]]:
        chain, replica = self.chain, peer.replica
        closed = replica.close(step)
        seeds = part_seeds(chain.run_id, chain.stage, chain.version, peer.peer_id, num_parts=replica.num_parts)
        encoded, digests = encode_contribution(
            replica, closed, seeds, lambda where, mean: peer.adversary.mean(step, where, mean)
        )
        work = tuple(closed.work[key] for key in sorted(closed.work)) if encoded else ()
        peer.exhibits.keep_parts(step, encoded)
        peer.exhibits.forget(int(step) + 1)
        unsigned = Contribution(chain.run_id, chain.stage, step, chain.name, peer.peer_id, work, tuple(digests))
        return replace(unsigned, signature=peer.identity.sign(unsigned.signed_bytes())), encoded

    def _take(self, roster: Roster, parts: dict[PeerId, Sequence[memoryview]]) -> None:
        """Reduce, and make the new version."""
        chain, first = self.chain, self.members[0].replica
        tokens = chain.weights_of(Result(roster, (), roster.leader))
        contributors = tuple(one.peer_id for one in roster.contributions)
        bodies, reduced = [], []
        for part in range(first.num_parts if contributors else 0):
            body, found = reduce_part(
                first,
                part,
                [(tokens[peer], parts[peer][part]) for peer in contributors if tokens[peer] > 0],
                rule=self.settings.averaging.rule,
                norm_cap=first.norm_cap(),
                seed=reduced_seed(chain.run_id, chain.stage, chain.version, part),
            )
            bodies.append(body)
            where = first.parts()[part]
            squares = squares_of(first.codec, body, where.stop - where.start)
            reduced.append(ReducedPart(part, found, contributors, squares=squares))
        result = Result(roster, tuple(reduced), roster.leader)
        self.chain = chain.advance(result, self.settings)
        gradient, norm = first.result_decoder().gradient(result.parts, bodies) or (None, None)
        new = first.next_version(gradient, self.chain.name, gradient_norm=norm)
        for peer in self.peers.values():
            peer.replica.swap(new)
