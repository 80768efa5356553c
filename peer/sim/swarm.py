"""The steps of a simulated swarm's stages, one after another; a run is a function of its seed.

A virtual step: what is due is audited, bans act, the step's microbatches pass through the peers that are left, each
stage ends its round. The order of arrival is drawn, for sums depend on it.
"""

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from peer.adversary.attacked_pass import AttackedPass
from peer.adversary.false_rounds import FalseEncoder, FalseReducer
from peer.adversary.hooks import HONEST
from peer.adversary.kinds import parse
from peer.pipeline.exchange_store import ExchangeStore
from peer.sim.audits import Shown, StageAudits, put_out
from peer.sim.justice import AuditCounts, Banned, StageJustice, is_out
from peer.sim.pipeline import SimulatedPeer, carry, held_out_loss
from peer.sim.stages import SimulatedStage
from peer.sim.tiny_run import HELD_OUT, TinyRun
from peer.state.replica import StageReplica
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.audit.hash_chain import HashChain
from swarm.core.errors import LocalError, SettingsError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.settings import ModelSettings, RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.identity.key import Identity
from swarm.manifest.signed_run import SignedRun
from swarm.manifest.value import run_id, settings_bytes
from swarm.model.initial import initial_weights
from swarm.model.stage import StageModel
from swarm.optim.stage_step import first_state, stage_clip_norm
from verification.audit.standing import StandingTable

EVALUATED_EVERY = 10
"""Steps."""
EVALUATED_MICROBATCHES = 32
NOT_SIMULATED = ("forged_records", "replayed_records", "inflated_records", "charges", "framing", "written_result")
"""They lie in the directory, of which a simulated swarm has none: everybody knows who is there; or in what nobody takes
and somebody else does instead, later: here nothing takes time."""


@dataclass(frozen=True)
class Outcome:
    """What came of a simulated run."""

    steps: int
    losses: Mapping[int, float]
    """Training loss by step, in nats a token."""
    held_out: Mapping[int, float]
    """By version: every 10, and the last."""
    bans: tuple[Banned, ...]
    quarantined: tuple[PeerId, ...]
    audits: AuditCounts
    lost_microbatches: int
    """A peer on the way could make no finite message of them."""
    state_digests: tuple[bytes, ...] = field(repr=False)
    """Of each stage."""


ModelOf = Callable[[ModelSettings, int, int], StageModel]
"""(model, stage, index of the peer) -> what it computes with."""


class SimulatedSwarm:
    """`num_replicas` peers in each stage, some of whom misbehave."""

    def __init__(
        self,
        tiny: TinyRun,
        *,
        attacks: Mapping[tuple[int, int], str] | None = None,
        seed: int,
        model_of: ModelOf | None = None,
    ) -> None:
        """`attacks` by stage and index of the peer, each `KIND@STEP`. Raises SettingsError for one that does nothing
        there, or that is not simulated. `model_of` says what each peer computes with, for itself and as an auditor."""
        self._tiny, self._seed = tiny, seed
        self._model_of = model_of or (lambda model, stage, index: _stage_model(model, stage))
        states = _first_states(tiny.settings(), seed)
        digests = tuple(state_digest(state) for state in states)
        self.settings = settings = replace(tiny.settings(), initial_state_digests=digests)
        run_key = _identity(f"{seed}/run key")
        self.run_id = run_id(settings, run_key.peer_id)
        signed_run = SignedRun(settings_bytes(settings), run_key.peer_id)
        signed_run = replace(signed_run, signature=run_key.sign(signed_run.signed_bytes()))
        self.counts = AuditCounts()
        self.stages = [self._stage(stage, state, attacks or {}, run_key) for stage, state in enumerate(states)]
        self.audits = [
            StageAudits(stage, self.run_id, StageJustice(stage, signed_run, self.run_id, run_key, self.counts))
            for stage in self.stages
        ]
        founders = frozenset(peer for stage in self.stages for peer in stage.peers)
        self.standing = StandingTable(founders=founders)
        self.bans: list[Banned] = []
        self._losses: dict[int, float] = {}
        self._held_out: dict[int, float] = {}
        self._lost = 0

    @property
    def version(self) -> Version:
        return self.stages[0].chain.version

    def run(self, steps: int) -> Outcome:
        """Take so many steps."""
        for _ in range(steps):
            if self.version % EVALUATED_EVERY == 0:
                self._evaluate()
            self.step()
        self._evaluate()
        return self.outcome()

    def step(self) -> list[Banned]:
        """Take one step; who was banned before its first microbatch."""
        step, banned = Step(self.version), list[Banned]()
        for audits in self.audits:
            self.standing, found = audits.due(self.standing)
            banned += found
        self.bans += banned
        self._losses[step] = self._work(step)
        for stage in self.stages:
            stage.round(put_out(self.standing, list(stage.peers), stage.chain.version))
        return banned

    def outcome(self) -> Outcome:
        """Of the steps so far."""
        peers = sorted(peer for stage in self.stages for peer in stage.peers)
        banned = {ban.peer_id for ban in self.bans}
        return Outcome(
            steps=self.version,
            losses=dict(self._losses),
            held_out=dict(self._held_out),
            bans=tuple(self.bans),
            quarantined=tuple(sorted(put_out(self.standing, peers, self.version) - banned)),
            audits=replace(self.counts),
            lost_microbatches=self._lost,
            state_digests=tuple(state_digest(stage.members[0].replica.state) for stage in self.stages),
        )

    def shown(self, stage: int, index: int, step: int) -> Shown:
        """What audits of a peer's contribution to one of the last steps would find."""
        return self.audits[stage].shown(Step(step), self.peer(stage, index).peer_id)

    def peer(self, stage: int, index: int) -> SimulatedPeer:
        return next(peer for peer in self.stages[stage].peers.values() if peer.index == index)

    # -- within -------------------------------------------------------------------------------------------

    def _work(self, step: Step) -> float:
        """The step's microbatches, by the peers that are left; nats a token."""
        rng = random.Random(f"{self._seed}/{step}")
        live = [self._live(stage) for stage in self.stages]
        each = self.settings.microbatches_per_step
        orders = [rng.sample(peers, len(peers)) for peers in live]
        lines = [[order[number % len(order)] for order in orders] for number in range(each)]
        leased = {peer.peer_id: iter(self.stages[0].chain.leases.ids_of(peer.peer_id)) for peer in live[0]}
        ids = [next(leased[line[0].peer_id]) for line in lines]
        loss_sum, done = 0.0, 0
        for number in rng.sample(range(each), each):
            microbatch = ids[number]
            batch = self._tiny.batch(microbatch, seed=self._seed)
            found = carry(lines[number], microbatch, step, *batch)
            if found is None:
                self._lost += 1
            else:
                loss_sum, done = loss_sum + found, done + 1
        return loss_sum / max(1, done * self.settings.microbatch_tokens)

    def _live(self, stage: SimulatedStage) -> list[SimulatedPeer]:
        """Of the first peers, in order."""
        version = stage.chain.version
        live = [peer for peer in stage.members if not is_out(self.standing, peer.peer_id, version)]
        if not live:
            raise LocalError(f"stage {stage.stage} has no peer left at version {version}")
        return sorted(live, key=lambda peer: peer.index)

    def _evaluate(self) -> None:
        batches = [
            self._tiny.batch(MicrobatchId(HELD_OUT + number), seed=0) for number in range(EVALUATED_MICROBATCHES)
        ]
        line = [self._live(stage)[0] for stage in self.stages]
        self._held_out[self.version] = held_out_loss(line, batches)

    def _stage(
        self, stage: int, state: StageState, attacks: Mapping[tuple[int, int], str], run_key: Identity
    ) -> SimulatedStage:
        settings, tiny = self.settings, self._tiny
        names = [f"{self._seed}/{stage}/{index}" for index in range(tiny.num_replicas)]
        everyone = [_identity(name) for name in names]
        host_chain = HashChain(_seed_of(f"{self._seed}/{stage}/host"), tiny.total_steps + 1)
        genesis = Genesis(
            run_id=self.run_id,
            stage=StageIndex(stage),
            version=Version(0),
            state_digest=settings.initial_state_digests[stage],
            members=tuple(sorted(identity.peer_id for identity in everyone)),
            leases=LeaseTable(),
            host=_identity(f"{self._seed}/coordinator").peer_id,
            run_key=run_key.peer_id,
            neighbours=(),
            host_chain_end=host_chain.end,
        )
        chain = StageChain.begin(genesis, settings)
        named = replace(state, name=chain.name)
        clip_norm, batch = stage_clip_norm(settings, stage), partial(tiny.batch, seed=self._seed)
        peers = []
        for index, (identity, name) in enumerate(zip(everyone, names, strict=True)):
            adversary = HONEST
            if (stage, index) in attacks:
                adversary = parse(attacks[stage, index], seed=identity.peer_id)
                attack = adversary.attack
                assert attack is not None
                if attack.plain_kind in NOT_SIMULATED or not attack.works_in(stage, settings.model.num_stages):
                    raise SettingsError(f"{attack}: has nothing to attack at stage {stage} of this simulation")
            model = self._model_of(settings.model, stage, index)
            replica = StageReplica(settings, model, named, clip_norm=clip_norm)
            peers.append(
                SimulatedPeer(
                    identity=identity,
                    stage=StageIndex(stage),
                    index=index,
                    stage_pass=AttackedPass(adversary, settings, self.run_id, identity, replica),
                    encoder=FalseEncoder(adversary, replica),
                    reducer=FalseReducer(adversary, replica),
                    adversary=adversary,
                    draws=HashChain(_seed_of(f"{name}/draws"), tiny.total_steps + 1),
                    exchanges=ExchangeStore.of_run(settings, identity.peer_id, None if stage else batch),
                )
            )
        return SimulatedStage(
            settings, peers, chain, host=_identity(f"{self._seed}/coordinator"), run_key=run_key, host_chain=host_chain
        )


def _first_states(settings: RunSettings, seed: int) -> list[StageState]:
    """Of version 0, without a name."""
    states = []
    for stage, flat in enumerate(initial_weights(settings.model, seed, None)):
        layout = _stage_model(settings.model, stage).layout
        states.append(first_state(settings, layout, flat))
    return states


@cache
def _stage_model(model: ModelSettings, stage: int) -> StageModel:
    """It holds no weights."""
    return StageModel(model, stage)


def _identity(name: str) -> Identity:
    return Identity.from_seed(_seed_of(name))


def _seed_of(name: str) -> bytes:
    return hashlib.sha256(f"simulated/{name}".encode()).digest()
