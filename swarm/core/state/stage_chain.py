"""A stage's certified past, folded: from its genesis through each result to who leads next.

Every member folds the same results and so knows the same members, leaders, data leases, recent ids and weights.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

from swarm.core.audit.chance import HostWord
from swarm.core.canonical import digest
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.layout import AtMost
from swarm.core.pipeline.allowances import Allowances
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.record import Record, SignedValue
from swarm.core.round.basis import MAX_NEIGHBOURS, RoundBasis, WorkOfEach, leaders_of, round_name
from swarm.core.round.contribution import Result, Roster, Work, counted_work
from swarm.core.round.facts import RoundFacts, WorkLimits
from swarm.core.seats import seats
from swarm.core.settings import RunSettings
from swarm.core.state.recent_work import RecentWork, Shares, done_in, founded, late_of, worked
from swarm.core.state.result_size import most_work
from swarm.core.state.slow_lines import slow_lines


@dataclass(frozen=True)
class Genesis(SignedValue):
    """Where a stage begins or, after a loss, begins again: signed by the run key."""

    DOMAIN: ClassVar[str] = "genesis"
    run_id: str
    stage: StageIndex
    version: Version
    state_digest: Digest
    members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    leases: LeaseTable
    """The data position; it matters at stage 0 only."""
    host: PeerId
    """It votes on every round; without it a quorum goes on."""
    run_key: PeerId
    neighbours: Annotated[tuple[PeerId, ...], AtMost(MAX_NEIGHBOURS)]
    """Members of the neighbouring stages, who vote on the first round if this stage has few members."""
    host_chain_end: Digest
    """End of the host's hash chain for the stage in this era: the host tells a value of it for each version that is
    made."""
    era: int = 0
    """The same in the geneses of all stages that begin together, another whenever they begin again."""
    work: WorkOfEach = ()
    """Tokens that each member is taken to have done before: by them votes weigh. Where the run begins all the same, and
    so if nothing is said; where it begins again, what is certified of each."""
    amendments: int = 0
    """So many of the run's amendments are in force from here on (`swarm.manifest.signed_run`)."""

    @property
    def recent_work(self) -> tuple[RecentWork, ...]:
        """As if it had been done evenly."""
        return founded(self.members, self.work)

    @property
    def basis(self) -> RoundBasis:
        """What the version the stage begins at is known by."""
        found = digest("genesis-name", self.signed_value())
        work, links = tuple(one.total for one in self.recent_work), (None,) * len(self.members)
        said = HostWord(0, self.host_chain_end)
        return RoundBasis(found, found, self.members, work, self.members, work, self.neighbours, links, said)

    @property
    def name(self) -> bytes:
        """Name of the version the stage begins at."""
        return self.basis.name

    def _check_fields(self) -> None:
        if not self.members or any(one >= other for one, other in pairwise(self.members)):
            raise RemoteError("malformed", "genesis without members, or not in order")
        if len(self.work) not in (0, len(self.members)):
            raise RemoteError("malformed", f"genesis with the work of {len(self.work)} of {len(self.members)} members")


@dataclass(frozen=True)
class StageChain(Record):
    """What is certified of a stage at `version`."""

    run_id: str
    lineage: Digest
    """Name of the genesis that all of this follows from."""
    stage: StageIndex
    version: Version
    basis: RoundBasis
    """What the version is known by to voters outside the stage."""
    host: PeerId
    run_key: PeerId
    leases: LeaseTable
    recent_work: Annotated[tuple[RecentWork, ...], AtMost(MAX_MEMBERS)]
    """Of each member."""
    era: int = 0
    """Of the genesis."""
    amendments: int = 0
    """Of the genesis."""

    @classmethod
    def begin(cls, genesis: Genesis, settings: RunSettings) -> "StageChain":
        basis = genesis.basis
        leases = genesis.leases
        if genesis.stage == 0:
            leases = leases.advance(
                consumed=(), members=basis.members, order=DataOrder.of_run(settings), ids_each=_ids_each(settings)
            )
        return cls(
            genesis.run_id,
            genesis.name,
            genesis.stage,
            genesis.version,
            basis,
            genesis.host,
            genesis.run_key,
            leases,
            genesis.recent_work,
            genesis.era,
            genesis.amendments,
        )

    @property
    def name(self) -> bytes:
        return self.basis.name

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Sorted."""
        return self.basis.members

    def leaders(self, step: Step) -> tuple[PeerId, ...]:
        """Who leads `step` in which view: by the certificate before the step's own (see RoundFacts)."""
        if int(step) == self.version:
            return self.basis.leaders(step)
        assert int(step) == self.version + 1
        return leaders_of(self.basis.work_of, step, late=self.basis.late)

    @property
    def round_name(self) -> bytes:
        """Of the round that starts from this version."""
        return round_name(self.stage, Step(self.version), self.name)

    def facts(self, settings: RunSettings, *, num_parts: int, phase_s: float) -> RoundFacts:
        """What the round that starts from this version is checked against."""
        return RoundFacts.of_basis(
            self.basis,
            run_id=self.run_id,
            stage=self.stage,
            step=Step(self.version),
            host=self.host,
            run_key=self.run_key,
            num_parts=num_parts,
            phase_s=phase_s,
            limits=work_limits(settings, Step(self.version)),
            amendments=self.amendments,
        )

    def shares(self, settings: RunSettings) -> Shares | None:
        """Of a step that starts from this version; None where neighbours sign for what is done."""
        if settings.model.num_stages > 1:
            return None
        if settings.has_windows:
            return Shares(settings.microbatches_of_one, {})
        return Shares.of_work(
            self.recent_work,
            microbatches_per_step=settings.microbatches_per_step,
            microbatch_targets=settings.microbatch_targets,
        )

    def allowances(self, settings: RunSettings) -> Allowances:
        """Of the members, in a step that starts from this version or from the next."""
        return Allowances.of_work(
            self.recent_work,
            microbatches_per_step=settings.microbatches_per_step,
            microbatch_targets=settings.microbatch_targets,
            of_sources=self.stage == 0,
        )

    def counted(self, roster: Roster, settings: RunSettings) -> dict[PeerId, tuple[Work, ...]]:
        """What counts of each contribution to the round that starts from this version."""
        leases, shares = self.leases.ids_by_holder() if self.stage == 0 else None, self.shares(settings)
        return {
            made.peer_id: counted_work(made, leases, most=None if shares is None else shares.of(made.peer_id))
            for made in roster.contributions
        }

    def weights_of(self, roster: Roster, settings: RunSettings) -> dict[PeerId, int]:
        """Certified token count of each contribution to the round that starts from this version."""
        return {peer: sum(item.num_tokens for item in work) for peer, work in self.counted(roster, settings).items()}

    def work_done(self, result: Result, settings: RunSettings) -> dict[PeerId, tuple[Work, ...]]:
        """What counts, of those who were heard: who was not, its microbatches are not trained on yet."""
        heard = result.heard()
        return {peer: work for peer, work in self.counted(result.roster, settings).items() if peer in heard}

    def advance(self, result: Result, settings: RunSettings) -> "StageChain":
        """The chain one result on. Raises RemoteError("fork") if the result starts elsewhere."""
        roster = result.roster
        if roster.previous_name != self.name or int(roster.step) != self.version or roster.members != self.members:
            raise RemoteError("fork", f"result of step {roster.step} does not follow version {self.version}")
        members = roster.members_after
        late = slow_lines(roster.committed, seats(self.basis.work_of)) | {lost.peer_id for lost in roster.left_out}
        done = worked(self.recent_work, done_in(result, self.weights_of(roster, settings)), members, late=late)
        leases = self.leases
        if self.stage == 0:
            ids = [item.microbatch_id for work in self.work_done(result, settings).values() for item in work]
            leases = leases.advance(
                consumed=ids, members=members, order=DataOrder.of_run(settings), ids_each=_ids_each(settings)
            )
        return StageChain(
            self.run_id,
            self.lineage,
            self.stage,
            Version(self.version + 1),
            result.basis_after(self.basis, tuple(one.total for one in done), late_of(done)),
            self.host,
            self.run_key,
            leases,
            done,
            self.era,
            self.amendments,
        )

    def _check_fields(self) -> None:
        known = tuple((one.peer_id, one.total) for one in self.recent_work)
        if known != tuple(self.basis.work_of.items()) or late_of(self.recent_work) != self.basis.late:
            raise RemoteError("malformed", "stage chain's members have done other work than it says")


def _ids_each(settings: RunSettings) -> int:
    """Ids every member of stage 0 holds: enough to carry a whole step alone, and the next one that has begun."""
    return 2 * settings.microbatches_of_one


def work_limits(settings: RunSettings, step: Step) -> WorkLimits:
    """Of the run's contributions to a step."""
    is_window = settings.has_windows and settings.replays
    return WorkLimits(
        max_tokens=settings.microbatch_tokens,
        max_work=settings.microbatches_of_one if is_window else most_work(settings.microbatches_of_one),
        work_multiple=settings.microbatches_per_step if is_window else 1,
        delay=settings.delay_at(step),
    )
