"""This is where replicas of a simulated stage audit each other: real draws, replays, evidence and judgements.

Decisions are those of `peer.auditor`, `peer.hop_auditor` and the host's. What several auditors drew is replayed once
for all that compute with the same model. Neighbours show all that passed. Peers that misbehave audit nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from peer.sim.pipeline import SimulatedPeer
from peer.sim.stages import Round, SimulatedStage
from swarm.checkpoint.state import state_chunks, state_digest
from swarm.core.contribution import Contribution, Work
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.host_protocol import SignedRun
from swarm.identity import Identity
from swarm.model.stage import StageModel
from verification.anchor import Anchor
from verification.draws import (
    REVEALED_AFTER,
    AuditBudget,
    check_reveal,
    contribution_rate,
    draw,
    hop_draw,
    microbatch_rate,
)
from verification.evidence import MAX_EVIDENCE_BYTES, Evidence
from verification.exchanges import Exchange
from verification.hop_claim import HopClaim, claims_of
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.papers import Bytes, Exhibit
from verification.past import Past
from verification.replay.compared import compared_claim, compared_contribution, worst
from verification.replay.judge import judge
from verification.replay.stage_replay import StageReplay
from verification.standing import FAULT, AuditDebt, Standing, StandingTable, Suspicion
from verification.tolerance import Comparison, Grade
from verification.verdicts import Ban, Pardon, Quarantine


@dataclass(frozen=True)
class Banned:
    """One that was found out."""

    peer_id: PeerId
    stage: StageIndex
    index: int
    """Among the first peers of its stage."""
    step: Step
    """Of the contribution in which the lie was."""
    kind: str
    """Of the evidence."""
    whole: bool
    """Whether its contribution was wrong, or what it sent on of a microbatch."""

    @property
    def version(self) -> Version:
        """From which on nobody takes anything from it."""
        return Version(self.step + REVEALED_AFTER)


@dataclass
class AuditCounts:
    """What all audits came to."""

    hops: int = 0
    contributions: int = 0
    honest: int = 0
    """Of work that was done as it should be."""
    largest_honest_share: float = 0.0
    """Of the fraud bound, in those."""
    differing: int = 0
    """Of those, where the replay had other values at all."""
    suspicious: int = 0
    frauds: int = 0
    acquitted: int = 0
    faults: int = 0
    """Of frauds, those that were not done again."""
    debts: int = 0
    """Audits that were not served."""
    skipped: int = 0


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
    signed_run: SignedRun
    run_id: str
    run_key: Identity
    counts: AuditCounts
    _found: dict[tuple[Step, PeerId, int | None, StageModel], Sequence[Comparison]] = field(default_factory=dict)
    """By step, target, place of the microbatch in its work (None: of the contribution), and what computed it again."""
    _replays: dict[StageModel, StageReplay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.stage.settings
        self._budget = AuditBudget.of_run(settings.audits)
        layout = self.stage.members[0].replica.layout
        self._into = torch.zeros(layout.num_values, dtype=torch.float32)
        self._known: dict[PeerId, tuple[int, bytes]] = {}

    def due(self, table: StandingTable) -> tuple[StandingTable, list[Banned]]:
        """Audit what is revealed at the stage's present version: the table after it, and who is banned by it."""
        version = self.stage.chain.version
        step = Step(version - REVEALED_AFTER)
        held, banned = self.stage.rounds.get(step), list[Banned]()
        self._found = {key: found for key, found in self._found.items() if key[0] >= step}
        if held is None:
            return table, banned
        for auditor in (self.stage.peers[peer] for peer in held.roster.members):
            if not auditor.is_honest or is_out(table, auditor.peer_id, version):
                continue
            reveal = self._revealed(auditor, step)
            for made in held.roster.contributions:
                target = self.stage.peers[made.peer_id]
                for place in self._drawn(table, held, auditor, reveal, made) if target is not auditor else ():
                    if not is_out(table, target.peer_id, version):
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
        for place, work in enumerate(made.work):
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
            counts.differing += found.measured > 0
        if found.grade is Grade.SUSPICIOUS:
            counts.suspicious += 1
            return table.after(Suspicion(target.peer_id, version), version), []
        if found.grade is Grade.HONEST:
            return table, []
        counts.frauds += 1
        return self._accuse(table, held, auditor, target, made, place)

    def _compared(
        self, held: Round, auditor: SimulatedPeer, target: SimulatedPeer, made: Contribution, place: int | None
    ) -> Sequence[Comparison]:
        """What a replay shows. Raises TransientError for what is not served, else as the replay does."""
        key = (made.step, target.peer_id, place, auditor.replica.model)
        if key not in self._found:
            replay = self._standing_at(held, auditor.replica.model)
            if place is None:
                exhibits = [self._exhibit(target, made, work) for work in made.work]
                replayed = replay.encoded_contribution(exhibits, made.step)
                self._found[key] = [compared_contribution(replay, self._parts(target, made), replayed)]
            else:
                claims = self._claims(target, made, made.work[place])
                self._found[key] = [compared_claim(replay, claim, self._into) for claim in claims]
        return self._found[key]

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
        exhibit, settings, stage = self._passed(target, made, work), self.stage.settings, self.stage.stage
        is_first, is_last = stage == 0, stage == settings.model.num_stages - 1
        before = [] if is_first else [Exchange.received(exhibit)]
        after = [] if is_last else [Exchange.sent(exhibit)]
        claims = claims_of(target.peer_id, before, after, ids=exhibit.x if is_first else None)
        for claim in claims:
            claim.check(settings, run_id=self.run_id)
        return claims

    def _passed(self, target: SimulatedPeer, made: Contribution, work: Work) -> Exhibit:
        exhibit = target.exhibits.exhibit(made.step, work.microbatch_id)
        if exhibit is None:
            raise LocalError(f"microbatch {work.microbatch_id} of step {made.step} is kept no more")
        return exhibit

    def _parts(self, target: SimulatedPeer, made: Contribution) -> list[Bytes]:
        parts = [target.exhibits.part(made.step, index) for index in range(len(made.part_digests))]
        shown = [part for part in parts if part is not None]
        if len(shown) != len(parts) or target.adversary.withholds:
            raise TransientError(f"parts of the contribution to step {made.step} are not shown")
        return shown

    def _standing_at(self, held: Round, model: StageModel) -> StageReplay:
        replay = self._replays.get(model)
        if replay is None:
            replay = self._replays[model] = StageReplay(self.stage.settings, self.stage.stage, model=model)
        if not replay.holds(held.chain.version):
            replay.release()
            replay.hold(held.chain.version, held.state.weights, None, ahead_is_known=True)
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
        """Before the run key, with a file that is all it looks at."""
        anchor = Anchor.of_chain(held.chain, state_digest(held.state)).signed_by(self.run_key)
        past, chunks = Past(beginning=anchor), tuple(state_chunks(held.state))
        mismatch: ReplayMismatch | HopMismatch
        if place is None:
            mismatch = ReplayMismatch(
                contribution=made,
                parts=tuple(self._parts(target, made)),
                exhibits=tuple(self._exhibit(target, made, work) for work in made.work),
                past=past,
                state_chunks=chunks,
                bodies=(),
            )
        else:
            found = self._compared(held, auditor, target, made, place)
            claim = self._claims(target, made, made.work[place])[found.index(worst(found))]
            mismatch = HopMismatch(claim=claim, past=past, state_chunks=chunks)
        data = mismatch.to_evidence(self.signed_run).to_bytes()
        evidence = Evidence.from_bytes(data, max_bytes=MAX_EVIDENCE_BYTES)
        verdict = judge(evidence, run_key=self.run_key.peer_id)
        if not verdict.guilty:
            self.counts.acquitted += 1
            return table, []
        if verdict.is_local and not target.adversary.stands_by_its_work:
            return self._fault(table, evidence), []
        charge = (self.run_id, evidence.accused, evidence.stage, evidence.version, evidence.kind, evidence.digest())
        ban = Ban(*charge).signed_by(self.run_key)
        ban.check(self.run_id, self.run_key.peer_id)
        banned = Banned(ban.peer_id, ban.stage, target.index, made.step, ban.kind, whole=place is None)
        return table.after(ban, self.stage.chain.version), [banned]

    def _fault(self, table: StandingTable, evidence: Evidence) -> StandingTable:
        """The accused does its work again and gets it right: out, and back at once, but for the third time."""
        peer, version = evidence.accused, self.stage.chain.version
        if evidence.version <= table.on_probation_since(peer):
            return table  # it is the same fault
        self.counts.faults += 1
        charge = (self.run_id, peer, evidence.stage, evidence.version, FAULT, evidence.digest())
        table = table.after(Quarantine(*charge).signed_by(self.run_key), version)
        if not table.may_return(peer):
            return table
        return table.after(Pardon(self.run_id, peer, version, acquitted=False).signed_by(self.run_key), version)


def is_out(table: StandingTable, peer: PeerId, version: Version) -> bool:
    """Whether nobody takes anything from the peer. Probation is not simulated: debts and faults cost no time."""
    return table.standing(peer, version) in (Standing.BANNED, Standing.QUARANTINED)


def put_out(table: StandingTable, peers: Sequence[PeerId], version: Version) -> frozenset[PeerId]:
    """Those of them who are out."""
    return frozenset(peer for peer in peers if is_out(table, peer, version))
