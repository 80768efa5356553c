"""What comes of an accusation in a simulated stage: jurors vote, the run key judges, and liars are banned.

Evidence, votes, verdicts and strikes are the real ones; everything is said and heard at once.
"""

from dataclasses import dataclass, field
from typing import Protocol

from peer.sim.stages import SimulatedStage
from swarm.core.audit.chance import REVEALED_AFTER
from swarm.core.canonical import signed_bytes
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.identity.key import Identity
from swarm.manifest.signed_run import SignedRun
from verification.audit.amplified import moved_bounds_in_force
from verification.audit.evidence import MAX_EVIDENCE_BYTES, Evidence
from verification.audit.running_bias import RunningBiases
from verification.audit.standing import FAULT, Standing, StandingTable
from verification.audit.strikes import Strikes
from verification.audit.tolerance import Grade
from verification.audit.verdicts import (
    Accusation,
    Ban,
    JurorVote,
    Pardon,
    Quarantine,
    jurors,
)
from verification.kinds.bias import Bias
from verification.replay.judge import judge


@dataclass(frozen=True)
class Banned:
    """One that was found out."""

    peer_id: PeerId
    stage: StageIndex
    index: int
    """Among the first peers of its stage."""
    step: Step
    """Of the contribution, vote, part or state in which the lie was."""
    kind: str
    """Of the evidence."""
    whole: bool
    """Whether it is about more than what was sent on of a microbatch."""

    @property
    def version(self) -> Version:
        """From which on nobody takes anything from it."""
        return Version(self.step + REVEALED_AFTER)


@dataclass
class AuditCounts:
    """What all audits came to."""

    hops: int = 0
    contributions: int = 0
    parts: int = 0
    """Reduced ones, aggregated again."""
    honest: int = 0
    """Of hops and contributions that were done as they should be."""
    largest_honest_share: float = 0.0
    """Of the fraud bound, in those."""
    largest_moved_share: float = 0.0
    """Of the bound on what a contribution's error moves, in those."""
    largest_bias_share: float = 0.0
    """Of the law for all audits of one peer by one auditor together, in those."""
    led: int = 0
    """Audits after which an auditor found a peer led one way."""
    differing: int = 0
    """Of those, where the replay had other values at all."""
    suspicious: int = 0
    frauds: int = 0
    acquitted: int = 0
    juries: int = 0
    misled: int = 0
    """Juries that found otherwise than the run key did."""
    faults: int = 0
    """Of frauds, those that were not done again."""
    debts: int = 0
    """Audits that were not served."""
    skipped: int = 0


class Case(Protocol):
    """One of `verification.kinds`."""

    def to_evidence(self, run: SignedRun) -> Evidence: ...


@dataclass
class StageJustice:
    """Judgements of one stage's peers."""

    stage: SimulatedStage
    signed_run: SignedRun
    run_id: str
    run_key: Identity
    counts: AuditCounts
    _strikes: Strikes = field(default_factory=Strikes)

    def __post_init__(self) -> None:
        settings = self.stage.settings
        bounds = moved_bounds_in_force(settings)
        self._biases = RunningBiases(self.run_key.sign(signed_bytes("bias-secret", [self.run_id])), bounds)

    def add_up(self, table: StandingTable, case: Bias, *, by: PeerId) -> StandingTable:
        """One more contribution of a peer that an auditor finds led one way, replayed by the run key."""
        evidence = Evidence.from_bytes(case.to_evidence(self.signed_run).to_bytes(), max_bytes=MAX_EVIDENCE_BYTES)
        peer, biases = case.accused, self._biases
        verdict = judge(evidence, run_key=self.run_key.peer_id, bias_seed=biases.seed_for(peer))
        moved, version = verdict.amplified, self.stage.chain.version
        if moved is None or moved.sketch is None or moved.measured <= biases.bounds.bias:
            self.counts.acquitted += 1
            return self._struck(table, by, evidence)
        num_values = self.stage.members[0].replica.layout.num_values
        if not biases.after(peer, case.contribution.step, moved.sketch, num_values=num_values).is_led:
            return table
        charge = (self.run_id, peer, evidence.stage, evidence.version, Bias.KIND, evidence.digest())
        return table.after(Quarantine(*charge).signed_by(self.run_key), version)

    def accuse(
        self, table: StandingTable, case: Case, *, by: PeerId | None, step: Step, whole: bool
    ) -> tuple[StandingTable, list[Banned]]:
        """Before the run key, with a file that is all it looks at, and in a stage of five before jurors.

        `by` is None where whoever hears both statements accuses alike.
        """
        self.counts.frauds += 1
        data = case.to_evidence(self.signed_run).to_bytes()
        evidence = Evidence.from_bytes(data, max_bytes=MAX_EVIDENCE_BYTES)
        verdict, version = judge(evidence, run_key=self.run_key.peer_id), self.stage.chain.version
        charge = (self.run_id, evidence.accused, evidence.stage, evidence.version, evidence.kind, evidence.digest())
        if by is not None:
            table = self._tried(table, Accusation(*charge), by, step, guilty=verdict.guilty)
        if not verdict.guilty:
            self.counts.acquitted += 1
            return (table if by is None else self._struck(table, by, evidence)), []
        target = self.stage.peers[evidence.accused]
        if verdict.is_local and not target.adversary.stands_by_its_work:
            return self._fault(table, evidence), []
        ban = Ban(*charge).signed_by(self.run_key)
        ban.check(self.run_id, self.run_key.peer_id)
        banned = Banned(ban.peer_id, ban.stage, target.index, step, ban.kind, whole=whole)
        return table.after(ban, version), [banned]

    def _tried(
        self, table: StandingTable, accusation: Accusation, accuser: PeerId, step: Step, *, guilty: bool
    ) -> StandingTable:
        """Before jurors, who replay as the run key does. Whom they find guilty is out until the run key has spoken."""
        chain = self.stage.chain
        drawn = jurors(chain.basis, accuser=accuser, accused=accusation.peer_id, beacon=lambda: self.stage.beacon)
        if drawn is None:
            return table
        votes = []
        for peer in (self.stage.peers[juror] for juror in drawn.weights):
            found = peer.adversary.finds(guilty and not peer.adversary.is_lazy(step))
            grade = Grade.FRAUD if found else Grade.HONEST
            votes.append(JurorVote(*accusation.facts, accuser, step, peer.peer_id, grade).signed_by(peer.identity))
        convicts = drawn.convicts(vote.juror for vote in votes if vote.verdict is Grade.FRAUD)
        self.counts.juries += 1
        self.counts.misled += convicts != guilty
        if not convicts:
            return table
        made = Quarantine(*accusation.facts, votes=tuple(votes))
        made.check(self.run_id, self.run_key.peer_id, jury=drawn)
        table = table.after(made, chain.version)
        return table if guilty else self._pardoned(table, accusation.peer_id, acquitted=True)

    def _struck(self, table: StandingTable, accuser: PeerId, evidence: Evidence) -> StandingTable:
        """Its word was untrue: the third time it is kept out."""
        version = self.stage.chain.version
        self._strikes = self._strikes.after(accuser, version, evidence.digest())
        if not self._strikes.are_too_many(accuser):
            return table
        charge = (self.run_id, accuser, self.stage.stage, version, "false_accusation", evidence.digest())
        return table.after(Quarantine(*charge).signed_by(self.run_key), version)

    def _fault(self, table: StandingTable, evidence: Evidence) -> StandingTable:
        """The accused does its work again and gets it right: out, and back at once, but for the third time."""
        peer, version = evidence.accused, self.stage.chain.version
        if evidence.version <= table.on_probation_since(peer):
            return table  # it is the same fault
        self.counts.faults += 1
        charge = (self.run_id, peer, evidence.stage, evidence.version, FAULT, evidence.digest())
        table = table.after(Quarantine(*charge).signed_by(self.run_key), version)
        return self._pardoned(table, peer, acquitted=False) if table.may_return(peer) else table

    def _pardoned(self, table: StandingTable, peer: PeerId, *, acquitted: bool) -> StandingTable:
        version = self.stage.chain.version
        return table.after(Pardon(self.run_id, peer, version, acquitted=acquitted).signed_by(self.run_key), version)


def is_out(table: StandingTable, peer: PeerId, version: Version) -> bool:
    """Whether nobody takes anything from the peer. Probation is not simulated: debts and faults cost no time."""
    return table.standing(peer, version) in (Standing.BANNED, Standing.QUARANTINED)
