"""Replicas of a simulated stage audit each other: real draws, replays, evidence and judgements.

Decisions are those of `peer.audit` and the host's. What several auditors drew is replayed once for all that compute
with the same model. Neighbours show all that passed. Peers that misbehave audit nobody, but for who accuses whom it
finds honest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from peer.sim.justice import Banned, StageJustice, is_out
from peer.sim.pipeline import SimulatedPeer
from peer.sim.stages import Round, SimulatedStage
from swarm.checkpoint.state import chunk_hash, merkle_path, merkle_root, state_chunks, state_digest
from swarm.core.audit.chance import REVEALED_AFTER
from swarm.core.audit.hash_chain import check_reveal
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, Step, Version
from swarm.core.round.contribution import Contribution, Work
from swarm.model.stage import StageModel
from swarm.optim.carried_moments import Carried
from swarm.optim.second_moments import second_moments
from verification.audit.amplified import Amplified, moved_bounds_in_force
from verification.audit.draws import AuditBudget, contribution_rate, draw, hop_draw, microbatch_rate, reducer_rate
from verification.audit.running_bias import RunningBiases
from verification.audit.standing import AuditDebt, StandingTable, Suspicion
from verification.audit.tolerance import CAUTION, Comparison, Grade
from verification.kinds.bias import Bias
from verification.kinds.equivocation import Equivocation
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.reducer_fraud import ReducerFraud
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.kinds.step_fraud import OldChunk, StepFraud
from verification.pipeline.hop_claim import HopClaim, claims_of
from verification.replay.compared import ComparedContribution, compared_claim, compared_contribution, worst
from verification.replay.reduced_again import digest_again
from verification.replay.stage_replay import StageReplay
from verification.replay.stepped_again import needs_of
from verification.round.papers import Bytes, Exhibit
from verification.state.anchor import Anchor
from verification.state.past import Past
from verification.state.state_statement import StateStatement


@dataclass(frozen=True)
class Shown:
    """What a replay of all of a contribution's work shows, drawn or not."""

    contribution: Contribution
    is_wrong: bool
    """The contribution is."""
    wrong_microbatches: tuple[bool, ...]
    """In the order of its work: whether what was sent on of each is."""
    extents: tuple[float, ...]
    """Of each of these that is wrong, the largest `Comparison.extent` in it, the contribution's first."""


@dataclass
class StageAudits:
    """Audits in one stage."""

    stage: SimulatedStage
    run_id: str
    justice: StageJustice
    _found: dict[tuple[Step, PeerId, int | None, StageModel], Sequence[Comparison]] = field(default_factory=dict)
    """By step, target, place of the microbatch in its work (None: of the contribution), and what computed it again."""
    _again: dict[tuple[Step, PeerId, StageModel], tuple[Sequence[Exhibit], Sequence[Bytes], Sequence[memoryview]]] = (
        field(default_factory=dict)
    )
    """What went into a contribution, its parts, and those that came out when it was computed again in the same way."""
    _replays: dict[StageModel, StageReplay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings, self.counts = self.stage.settings, self.justice.counts
        self._budget = AuditBudget.of_run(settings.audits)
        self._known: dict[PeerId, tuple[int, bytes]] = {}
        bounds = moved_bounds_in_force(settings)
        self._biases = {peer: RunningBiases(member.draws.secret, bounds) for peer, member in self.stage.peers.items()}

    def due(self, table: StandingTable) -> tuple[StandingTable, list[Banned]]:
        """Audit what is revealed at the stage's present version: the table after it, and who is banned by it."""
        version = self.stage.chain.version
        step = Step(version - REVEALED_AFTER)
        table, banned = self._states(table)
        last, held = self.stage.rounds.get(Step(version - 1)), self.stage.rounds.get(step)
        if last is not None:
            table, found = self._contradictions(table, last)
            banned += found
        self._found = {key: found for key, found in self._found.items() if key[0] >= step}
        self._again = {key: again for key, again in self._again.items() if key[0] >= step}
        if held is None:
            return table, banned
        for auditor in (self.stage.peers[peer] for peer in held.roster.members):
            if is_out(table, auditor.peer_id, version) or not _audits(auditor, step):
                continue
            reveal = self._revealed(auditor, step)
            table, found = self._reduced(table, held, auditor, reveal)
            banned += found
            for made in held.roster.contributions:
                target = self.stage.peers[made.peer_id]
                for place in self._drawn(table, held, auditor, reveal, made) if target is not auditor else ():
                    if not any(is_out(table, peer.peer_id, version) for peer in (auditor, target)):
                        table, found = self._audit(table, held, auditor, made, target, place)
                        banned += found
        return table, banned

    def _drawn(
        self, table: StandingTable, held: Round, auditor: SimulatedPeer, reveal: bytes, made: Contribution
    ) -> Iterator[int | None]:
        """What the auditor replays: None for the contribution, places in its work for what was done of a microbatch."""
        who, target, replicas = auditor.peer_id, made.peer_id, len(held.roster.members)
        factor = table.budget_factor(target, made.stage, self.stage.chain.version)
        drawn = draw(reveal, made.digest(), auditor=who, target=target)
        if drawn.hits_contribution(contribution_rate(replicas, self._budget, factor=factor)):
            yield None
        rate = microbatch_rate(replicas, self._budget, factor=factor)
        for place, work in enumerate(made.work if self.stage.settings.model.num_stages > 1 else ()):  # else no hops
            if hop_draw(reveal, work.microbatch_id, auditor=who, target=target).hits_hop(rate):
                yield place

    def shown(self, step: Step, peer: PeerId) -> Shown:
        """What audits of the peer's contribution to `step` would find. The step is one of the stage's last."""
        held = self.stage.rounds[step]
        made = held.roster.contribution_of(peer)
        assert made is not None, f"{peer} contributed nothing to step {step}"
        target = self.stage.peers[peer]
        found = [self._compared(held, target, target, made, place) for place in (None, *range(len(made.work)))]
        wrong = [worst(compared).grade is Grade.FRAUD for compared in found]
        extents = [max(one.extent for one in compared) for compared in found]
        return Shown(made, wrong[0], tuple(wrong[1:]), tuple(compress(extents, wrong)))

    def moved(self, step: Step, peer: PeerId) -> Amplified:
        """What the error of the peer's contribution to `step` moves. The step is one of the stage's last."""
        held, target = self.stage.rounds[step], self.stage.peers[peer]
        made = held.roster.contribution_of(peer)
        assert made is not None, f"{peer} contributed nothing to step {step}"
        return self._whole(held, target, made, target.replica.model, None).amplified

    # -- one audit ----------------------------------------------------------------------------------------

    def _audit(
        self,
        table: StandingTable,
        held: Round,
        auditor: SimulatedPeer,
        made: Contribution,
        target: SimulatedPeer,
        place: int | None,
    ) -> tuple[StandingTable, list[Banned]]:
        version, counts = self.stage.chain.version, self.counts
        try:
            found = worst(self._compared(held, auditor, target, made, place))
        except (TransientError, RemoteError):
            counts.debts += 1
            return table.after(AuditDebt(target.peer_id, Version(made.step)), version), []
        except LocalError:
            counts.skipped += 1
            return table, []
        counts.contributions += place is None
        counts.hops += place is not None
        if self._is_honest_work(target, made.step):
            counts.honest += 1
            counts.largest_honest_share = max(counts.largest_honest_share, found.measured / found.fraud)
            counts.largest_moved_share = max(counts.largest_moved_share, found.moved / found.moved_fraud)
            counts.differing += found.measured > 0
        if place is None and found.grade is not Grade.FRAUD:
            table = self._sum_up(table, held, auditor, target, made)
        if found.grade is Grade.SUSPICIOUS:
            counts.suspicious += 1
            return table.after(Suspicion(target.peer_id, version), version), []
        if found.grade is Grade.HONEST and not auditor.adversary.accuses_falsely(made.step):
            return table, []
        return self._accuse(table, held, auditor, target, made, place)

    def _compared(
        self, held: Round, auditor: SimulatedPeer, target: SimulatedPeer, made: Contribution, place: int | None
    ) -> Sequence[Comparison]:
        """What a replay shows. Raises TransientError for what is not served, else as the replay does."""
        key = (made.step, target.peer_id, place, auditor.replica.model)
        if key not in self._found:
            replay = self._standing_at(held, auditor.replica.model)
            if place is None:
                self._found[key] = [self._whole(held, target, made, auditor.replica.model, None).found]
            else:
                claims = self._claims(target, made, made.work[place])
                self._found[key] = [compared_claim(replay, claim, caution=CAUTION) for claim in claims]
        return self._found[key]

    def _whole(
        self, held: Round, target: SimulatedPeer, made: Contribution, model: StageModel, seed: bytes | None
    ) -> ComparedContribution:
        """What a replay of the contribution shows, under an auditor's seed. Raises as `_compared`."""
        replay, key = self._standing_at(held, model), (made.step, target.peer_id, model)
        if key not in self._again:
            exhibits = [self._exhibit(target, made, work) for work in made.work]
            self._again[key] = (
                exhibits,
                self._parts(held, target, made),
                replay.encoded_contribution(exhibits, made.step),
            )
        shown, parts, replayed = self._again[key]
        second = second_moments(self.stage.settings.optimizer, held.state.moments)
        return compared_contribution(*(replay, shown, parts, replayed), second=second, seed=seed, caution=CAUTION)

    def _sum_up(
        self, table: StandingTable, held: Round, auditor: SimulatedPeer, target: SimulatedPeer, made: Contribution
    ) -> StandingTable:
        """One audit more by this auditor: if all of them are led one way, the run key sees for itself."""
        biases, counts = self._biases[auditor.peer_id], self.counts
        moved = self._whole(held, target, made, auditor.replica.model, biases.seed_for(target.peer_id)).amplified
        if moved.sketch is None:
            return table
        num_values = target.replica.layout.num_values
        found = biases.after(target.peer_id, made.step, moved.sketch, num_values=num_values)
        if self._is_honest_work(target, made.step):
            counts.largest_bias_share = max(counts.largest_bias_share, found.share)
        if not found.is_led:
            return table
        counts.led += 1
        version = self.stage.chain.version
        table = table.after(Suspicion(target.peer_id, version), version)
        if moved.measured <= 2 * biases.bounds.bias:
            return table
        case = Bias.of(self._contribution_case(held, target, made))
        return self.justice.add_up(table, case, by=auditor.peer_id)

    def _is_honest_work(self, target: SimulatedPeer, step: Step) -> bool:
        attack = target.adversary.attack
        return attack is None or int(step) < attack.from_step

    # -- fetched ------------------------------------------------------------------------------------------

    def _revealed(self, auditor: SimulatedPeer, step: Step) -> bytes:
        """The auditor's value of that version, checked as the audited do."""
        value = auditor.draws.reveal(int(step))
        known, length = self._known.get(auditor.peer_id), auditor.draws.length
        check_reveal(auditor.draws.end, int(step), value, known=known, length=length)
        self._known[auditor.peer_id] = (int(step), value)
        return value

    def _exhibit(self, target: SimulatedPeer, made: Contribution, work: Work) -> Exhibit:
        if target.adversary.withholds:
            raise TransientError(f"microbatch {work.microbatch_id} of step {made.step} is not shown")
        exhibit = self._passed(target, made, work)
        num_stages = self.stage.settings.model.num_stages
        exhibit.check(target.peer_id, run_id=self.run_id, stage=self.stage.stage, num_stages=num_stages)
        exhibit.check_work(work, target.peer_id)
        return exhibit

    def _claims(self, target: SimulatedPeer, made: Contribution, work: Work) -> list[HopClaim]:
        """What the target signed of a microbatch, from its neighbours: they hold the same bytes as it does."""
        passed = target.exchanges.of(made.step, work.microbatch_id)
        ids = None if self.stage.stage else self._passed(target, made, work).x
        claims = claims_of(target.peer_id, passed, passed, ids=ids)
        for claim in claims:
            claim.check(self.stage.settings, run_id=self.run_id)
        return claims

    def _passed(self, target: SimulatedPeer, made: Contribution, work: Work) -> Exhibit:
        exhibit = target.exchanges.exhibit(made.step, work)
        if exhibit is None:
            raise LocalError(f"microbatch {work.microbatch_id} of step {made.step} is kept no more")
        return exhibit

    def _parts(self, held: Round, target: SimulatedPeer, made: Contribution) -> list[Bytes]:
        if target.adversary.withholds:
            raise TransientError(f"parts of the contribution to step {made.step} are not shown")
        return [held.outcome.inputs[index, target.peer_id] for index in range(len(made.part_digests))]

    def _standing_at(self, held: Round, model: StageModel) -> StageReplay:
        replay = self._replays.get(model)
        if replay is None:
            replay = self._replays[model] = StageReplay(self.stage.settings, self.stage.stage, model=model)
        if not replay.holds(held.chain.version):
            replay.release()
            carried = Carried.of(held.state)
            replay.hold(held.chain.version, held.state.weights, None, ahead_is_known=True, carried=carried)
        return replay

    # -- accused ------------------------------------------------------------------------------------------

    def _accuse(
        self,
        table: StandingTable,
        held: Round,
        auditor: SimulatedPeer,
        target: SimulatedPeer,
        made: Contribution,
        place: int | None,
    ) -> tuple[StandingTable, list[Banned]]:
        mismatch: ReplayMismatch | HopMismatch
        if place is None:
            mismatch = self._contribution_case(held, target, made)
        else:
            found = self._compared(held, auditor, target, made, place)
            claim = self._claims(target, made, made.work[place])[found.index(worst(found))]
            past, chunks = Past(beginning=self._anchor(held)), tuple(state_chunks(held.state))
            mismatch = HopMismatch(claim=claim, past=past, state_chunks=chunks)
        return self.justice.accuse(table, mismatch, by=auditor.peer_id, step=made.step, whole=place is None)

    def _contribution_case(self, held: Round, target: SimulatedPeer, made: Contribution) -> ReplayMismatch:
        return ReplayMismatch(
            contribution=made,
            parts=tuple(self._parts(held, target, made)),
            exhibits=tuple(self._exhibit(target, made, work) for work in made.work),
            past=Past(beginning=self._anchor(held)),
            state_chunks=tuple(state_chunks(held.state)),
            bodies=(),
        )

    def _anchor(self, held: Round) -> Anchor:
        return Anchor.of_chain(held.chain, state_digest(held.state)).signed_by(self.justice.run_key)

    # -- rounds and states --------------------------------------------------------------------------------

    def _contradictions(self, table: StandingTable, held: Round) -> tuple[StandingTable, list[Banned]]:
        """Two statements of one peer that members of the round held side by side, and work that is not its own."""
        banned: list[Banned] = []
        for one, other in held.outcome.contradictions:
            case = Equivocation(one=one, other=other)
            if case.contradiction is None or is_out(table, case.accused, self.stage.chain.version):
                continue
            table, found = self.justice.accuse(table, case, by=None, step=held.roster.step, whole=True)
            banned += found
        for lie in held.outcome.lies:
            if not is_out(table, lie.accused, self.stage.chain.version):
                table, found = self.justice.accuse(table, lie, by=None, step=held.roster.step, whole=True)
                banned += found
        return table, banned

    def _reduced(
        self, table: StandingTable, held: Round, auditor: SimulatedPeer, reveal: bytes
    ) -> tuple[StandingTable, list[Banned]]:
        """Parts that others reduced, as far as the auditor has drawn them."""
        banned: list[Banned] = []
        replicas, version = len(held.roster.members), self.stage.chain.version
        parts = held.roster.num_parts
        for made in held.outcome.reductions:
            reducer = made.reducer
            if reducer == auditor.peer_id or is_out(table, reducer, version):
                continue
            factor = table.budget_factor(reducer, made.stage, version)
            drawn = draw(reveal, made.statement_digest, auditor=auditor.peer_id, target=reducer)
            if not drawn.hits_part(made.part, reducer_rate(replicas, self._budget, num_parts=parts, factor=factor)):
                continue
            self.counts.parts += 1
            bodies = [held.outcome.inputs[made.part, one.peer_id] for one in made.inputs]
            again = digest_again(made, bodies, self.stage.settings, auditor.replica.parts())
            if again != made.digest:
                case = ReducerFraud(reduction=made, bodies=tuple(bodies))
                table, found = self.justice.accuse(table, case, by=auditor.peer_id, step=held.roster.step, whole=True)
                banned += found
        return table, banned

    def _states(self, table: StandingTable) -> tuple[StandingTable, list[Banned]]:
        """What members state of a snapshot's state, held against what the last certified result makes of the one
        before."""
        stage, banned = self.stage, list[Banned]()
        version = stage.chain.version
        held = stage.rounds.get(Step(version - 1))
        if held is None or version % stage.settings.checkpoint.snapshot_every:
            return table, banned
        state = stage.members[0].replica.state
        chunks = state_chunks(state)
        hashes, total_bytes = tuple(map(chunk_hash, chunks)), sum(map(len, chunks))
        for peer in stage.members:
            said = peer.adversary.stated(Step(version), hashes)
            if said == hashes or is_out(table, peer.peer_id, version):
                continue
            case = self._wrong_state(held, peer, said, hashes, total_bytes)
            table, found = self.justice.accuse(table, case, by=None, step=Step(version), whole=True)
            banned += found
        return table, banned

    def _wrong_state(
        self, held: Round, peer: SimulatedPeer, said: tuple[bytes, ...], right: tuple[bytes, ...], total_bytes: int
    ) -> StepFraud:
        """What proves that the peer states another state than it must have."""
        chain, outcome, old = self.stage.chain, held.outcome, state_chunks(held.state)
        statement = StateStatement(
            run_id=chain.run_id,
            stage=chain.stage,
            version=chain.version,
            name=chain.name,
            peer_id=peer.peer_id,
            state_digest=merkle_root(said, total_bytes),
            total_bytes=total_bytes,
        )
        chunk = next(index for index, (one, other) in enumerate(zip(said, right, strict=True)) if one != other)
        needs = needs_of(old[0], chunk, layout=peer.replica.layout, cut=peer.replica.parts())
        old_hashes = [chunk_hash(body) for body in old]
        return StepFraud(
            statement=statement.signed_by(peer.identity),
            chunk=chunk,
            leaf=said[chunk],
            path=merkle_path(said, chunk),
            past=Past(beginning=self._anchor(held), results=(outcome.result,)),
            old_chunks=tuple(
                OldChunk(index=index, path=merkle_path(old_hashes, index), body=old[index])
                for index in needs.old_chunks
            ),
            parts=needs.parts,
            bodies=(tuple(outcome.bodies[part] if outcome.bodies else b"" for part in needs.parts),),
        )


def _audits(peer: SimulatedPeer, step: Step) -> bool:
    """Peers that misbehave audit nobody, but for who accuses whom it finds honest."""
    return peer.is_honest or peer.adversary.accuses_falsely(step)


def put_out(table: StandingTable, peers: Sequence[PeerId], version: Version) -> frozenset[PeerId]:
    """Those of them who are out."""
    return frozenset(peer for peer in peers if is_out(table, peer, version))
