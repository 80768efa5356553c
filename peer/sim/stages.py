"""The end of a step at a simulated stage: contributions, the averaging round, the exact step.

The step itself is made once: all replicas of a stage hold the same bytes.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from peer.adversary.false_rounds import shown_for
from peer.sim.pipeline import SimulatedPeer
from peer.sim.rounds import RoundOutcome, SimulatedRound
from swarm.averaging.seeds import part_seeds
from swarm.checkpoint.state import StageState
from swarm.core.audit.beacon import Beacon
from swarm.core.audit.chance import REVEALED_AFTER, Chance, HostWord
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.ticket import Ticket
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.contribution import Contribution, Roster
from swarm.core.settings import RunSettings
from swarm.core.state.result_size import most_work
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import Identity
from verification.round.papers import Papers

PHASE_S = 1.0


@dataclass(frozen=True)
class Round:
    """A round that is over, and what an audit of it needs."""

    chain: StageChain
    """Of the version that it started from."""
    state: StageState
    """Of that version."""
    outcome: RoundOutcome

    @property
    def roster(self) -> Roster:
        return self.outcome.result.roster


class SimulatedStage:
    """One stage: its peers and its past."""

    def __init__(
        self,
        settings: RunSettings,
        peers: Sequence[SimulatedPeer],
        chain: StageChain,
        *,
        host: Identity,
        run_key: Identity,
        host_chain: HashChain,
    ) -> None:
        """`host_chain`: the host's chain for the stage."""
        self.settings = settings
        self.peers = {peer.peer_id: peer for peer in peers}
        self.chain = chain
        self.rounds: dict[Step, Round] = {}
        """The last ones."""
        self._host, self._run_key, self._host_chain = host, run_key, host_chain
        self._shown: dict[PeerId, tuple[Papers | None, ...]] = {}
        """What each shows for the entries of its last contribution."""

    @property
    def stage(self) -> StageIndex:
        return self.chain.stage

    @property
    def members(self) -> list[SimulatedPeer]:
        return [self.peers[peer] for peer in self.chain.members]

    def round(self, put_out: Container[PeerId]) -> None:
        """End the step that the stage is at; those put out are not there. Whom a leader left out asks to be let in."""
        chain, step = self.chain, Step(self.chain.version)
        first = self.members[0].replica
        state = first.frozen_state()
        facts = chain.facts(
            self.settings,
            num_parts=first.num_parts,
            phase_s=PHASE_S,
        )
        outcome = SimulatedRound(
            chain,
            facts,
            [peer for peer in self.members if peer.peer_id not in put_out],
            joins=[peer for peer in self.peers if peer not in chain.members and peer not in put_out],
            host=self._host,
            run_key=self._run_key,
            contribute=self._contribute,
            show=lambda peer, entry: self._shown[peer][entry],
            settings=self.settings,
        ).run()
        self.rounds[step] = Round(chain, state, outcome)
        for old in [old for old in self.rounds if int(old) < int(step) - self.settings.audits.retained_versions]:
            del self.rounds[old]
        self._take(outcome)

    def _contribute(self, peer: SimulatedPeer) -> tuple[Contribution, Sequence[memoryview]]:
        chain, replica, step = self.chain, peer.replica, Step(self.chain.version)
        closed = replica.close(step)
        seeds = part_seeds(chain.run_id, chain.stage, chain.version, peer.peer_id, num_parts=replica.num_parts)
        encoded, digests = peer.encoder.encode(step, closed, seeds)
        done = tuple(closed.work[key] for key in sorted(closed.work)) if encoded else ()
        said = peer.adversary.listed(step, done, most=most_work(self.settings.microbatches_per_step))
        work, self._shown[peer.peer_id] = tuple(item for item, _ in said), shown_for(said, closed)
        peer.exchanges.forget(int(step) + 1)
        chance = peer.adversary.revealed(step, self._chance(peer))
        charges = peer.adversary.charged(chain, (), peer.peer_id) if work else ()
        facts = chain.run_id, chain.stage, step, chain.name, peer.peer_id
        unsigned = Contribution(*facts, work, tuple(digests), chance, charges=charges)
        return replace(unsigned, signature=peer.identity.sign(unsigned.signed_bytes())), encoded

    def _chance(self, peer: SimulatedPeer) -> Chance:
        chain, step = self.chain, int(self.chain.version)
        ticket = None
        if peer.peer_id not in chain.basis.link_of:
            ticket = Ticket(chain.run_id, peer.peer_id, chain.stage, peer.draws.end).signed_by(self._run_key)
        return Chance(peer.draws.reveal(step - REVEALED_AFTER), self._said, ticket)

    @property
    def _said(self) -> HostWord:
        """The host's word on what is certified."""
        version = int(self.chain.version)
        return HostWord(version, self._host_chain.reveal(version - 1))

    @property
    def beacon(self) -> Beacon:
        """Of the last round."""
        return Beacon.of(self.rounds[Step(self.chain.version - 1)].roster, self._said)

    def _take(self, outcome: RoundOutcome) -> None:
        """Make the new version."""
        first, result = self.members[0].replica, outcome.result
        self.chain = self.chain.advance(result, self.settings)
        new = first.next_version(first.certified_gradient(result.parts, outcome.bodies), self.chain.name)
        for peer in self.peers.values():
            peer.replica.swap(new if peer.replica.model.device == first.model.device else peer.replica.placed(new))
