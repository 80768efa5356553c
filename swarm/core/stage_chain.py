"""This is where a stage's certified past is folded: from its genesis through each result to who leads next.

Every member folds the same results and so knows the same members, leaders, data leases and recent ids.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

from swarm.core.canonical import Value, digest, signed_bytes
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.contribution import MAX_WORK, Result, counted_tokens
from swarm.core.data_order import DataOrder
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item, peer_item
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.leases import LeaseTable
from swarm.core.ranking import rank
from swarm.core.round_basis import MAX_NEIGHBOURS, RoundBasis
from swarm.core.round_facts import RoundFacts
from swarm.core.settings import RunSettings


@dataclass(frozen=True)
class Genesis:
    """Where a stage begins or, after a loss, begins again: signed by the run key."""

    DOMAIN: ClassVar[str] = "genesis"
    run_id: str
    stage: StageIndex
    version: Version
    state_digest: bytes
    members: tuple[PeerId, ...]
    leases: LeaseTable
    """The data position; it matters at stage 0 only."""
    coordinator: PeerId
    """It votes on every round; without it a quorum goes on."""
    run_key: PeerId
    neighbours: tuple[PeerId, ...]
    """Members of the neighbouring stages, who vote on the first round if this stage has few members."""
    era: int = 0
    """The same in the geneses of all stages that begin together, another whenever they begin again."""
    signature: bytes = b""

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "version": self.version,
            "state_digest": self.state_digest,
            "members": list(self.members),
            "leases": self.leases.to_value(),
            "coordinator": self.coordinator,
            "run_key": self.run_key,
            "neighbours": list(self.neighbours),
            "era": self.era,
        }

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self.signed_value())

    @property
    def basis(self) -> RoundBasis:
        """What the version the stage begins at is known by."""
        found = digest("genesis-name", self.signed_value())
        members = tuple(sorted(set(self.members)))
        return RoundBasis(found, found, members, members, self.neighbours)

    @property
    def name(self) -> bytes:
        """Name of the version the stage begins at."""
        return self.basis.name

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}

    @classmethod
    def from_value(cls, value: Value) -> "Genesis":
        outer = Fields("genesis", value)
        fields = Fields("genesis", outer.message("value"))
        made = cls(
            fields.text("run_id"),
            StageIndex(fields.integer("stage")),
            Version(fields.integer("version")),
            fields.octets("state_digest", length=32),
            fields.items("members", peer_item, max_items=MAX_MEMBERS),
            LeaseTable.from_value(fields.message("leases")),
            fields.peer("coordinator"),
            fields.peer("run_key"),
            fields.items("neighbours", peer_item, max_items=MAX_NEIGHBOURS),
            fields.integer("era"),
            outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        if not made.members:
            raise RemoteError("malformed", "genesis without members")
        return made


@dataclass(frozen=True)
class StageChain:
    """What is certified of a stage at `version`."""

    run_id: str
    lineage: bytes
    """Name of the genesis that all of this follows from."""
    stage: StageIndex
    version: Version
    basis: RoundBasis
    """What the version is known by to voters outside the stage."""
    coordinator: PeerId
    run_key: PeerId
    recent_ids: tuple[tuple[int, ...], tuple[int, ...]]
    """Microbatches of the last roster and of the one before."""
    leases: LeaseTable
    era: int = 0
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
            genesis.coordinator,
            genesis.run_key,
            ((), ()),
            leases,
            genesis.era,
        )

    @property
    def name(self) -> bytes:
        return self.basis.name

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Sorted."""
        return self.basis.members

    def leaders(self, step: Step) -> tuple[PeerId, ...]:
        """Who leads `step` in which view: drawn from the certificate before the step's own (see RoundFacts)."""
        if int(step) == self.version:
            return self.basis.leaders(self.stage, step)
        assert int(step) == self.version + 1
        return rank(self.members, "leader", self.name, self.stage, step)

    def facts(self, *, num_parts: int, phase_s: float, max_tokens: int) -> RoundFacts:
        """What the round that starts from this version is checked against."""
        return RoundFacts.of_basis(
            self.basis,
            run_id=self.run_id,
            stage=self.stage,
            step=Step(self.version),
            coordinator=self.coordinator,
            run_key=self.run_key,
            num_parts=num_parts,
            phase_s=phase_s,
            max_tokens=max_tokens,
        )

    def weights_of(self, result: Result) -> dict[PeerId, int]:
        """Certified token count of each contribution to the round that starts from this version."""
        recent = frozenset(self.recent_ids[0]) | frozenset(self.recent_ids[1])
        return counted_tokens(result.roster.contributions, recent)

    def advance(self, result: Result, settings: RunSettings) -> "StageChain":
        """The chain one result on. Raises RemoteError("fork") if the result starts elsewhere."""
        roster = result.roster
        if roster.previous_name != self.name or int(roster.step) != self.version or roster.members != self.members:
            raise RemoteError("fork", f"result of step {roster.step} does not follow version {self.version}")
        members = roster.members_after
        ids = tuple(item.microbatch_id for item in result.work_done())
        leases = self.leases
        if self.stage == 0:
            leases = leases.advance(
                consumed=ids, members=members, order=DataOrder.of_run(settings), ids_each=_ids_each(settings)
            )
        return StageChain(
            self.run_id,
            self.lineage,
            self.stage,
            Version(self.version + 1),
            result.basis,
            self.coordinator,
            self.run_key,
            (ids, self.recent_ids[0]),
            leases,
            self.era,
        )

    def to_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "lineage": self.lineage,
            "stage": self.stage,
            "version": self.version,
            "basis": self.basis.to_value(),
            "coordinator": self.coordinator,
            "run_key": self.run_key,
            "last_ids": list(self.recent_ids[0]),
            "earlier_ids": list(self.recent_ids[1]),
            "leases": self.leases.to_value(),
            "era": self.era,
        }

    @classmethod
    def from_value(cls, value: Value) -> "StageChain":
        """Raises RemoteError("malformed")."""
        fields = Fields("stage chain", value)
        made = cls(
            fields.text("run_id"),
            fields.octets("lineage", length=32),
            StageIndex(fields.integer("stage")),
            Version(fields.integer("version")),
            RoundBasis.from_value(fields.message("basis")),
            fields.peer("coordinator"),
            fields.peer("run_key"),
            (
                fields.items("last_ids", integer_item, max_items=MAX_MEMBERS * MAX_WORK),
                fields.items("earlier_ids", integer_item, max_items=MAX_MEMBERS * MAX_WORK),
            ),
            LeaseTable.from_value(fields.message("leases")),
            fields.integer("era"),
        )
        fields.done()
        if not made.members or not made.basis.previous_members:
            raise RemoteError("malformed", "stage chain without members")
        for listed in (made.members, made.basis.previous_members, *made.recent_ids):
            if any(one >= other for one, other in pairwise(cast(tuple[str, ...], listed))):
                raise RemoteError("malformed", "stage chain lists members or ids out of order")
        return made


def _ids_each(settings: RunSettings) -> int:
    """Ids every member of stage 0 holds: enough to carry a whole step alone, and the next one that has begun."""
    return 2 * settings.microbatches_per_step
