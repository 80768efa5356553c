"""How a peer finds out that another stage needs it more, from what all peers say of themselves.

What a stage's work takes is the median of what its peers say, so that a few boasters move nobody. Everyone plans for
all with the same plan (`swarm.core.directory.rebalancing`); whoever is named in it twice running, goes, and says so
where it goes to: until it has arrived nobody else is named, and until the roster of the stage that it left is without
it nobody goes from there, for what is left would be no quorum. The directory's records are anybody's: only runs among
friends move.
"""

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.core.canonical import Value
from swarm.core.directory.rebalancing import Placement, RebalancingSettings, plan_moves
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.core.record import Record
from swarm.core.settings import RunSettings
from swarm.network.transport import Directory

log = logging.getLogger(__name__)

MEASURED_AFTER = 4
"""Microbatches a peer has done before it says how long one takes."""
SETTLES_FOR = 20
"""Looks that a peer stays in a stage at least: what a microbatch takes there is known by then."""
MOST_SECONDS = 1e6


@dataclass(frozen=True)
class Said(Record, kind="placement"):
    """What a peer says of itself in a stage's topic."""

    since_ms: int
    """When it came to the stage, or set out for it; of two records of a peer the later counts."""
    microbatch_s: float
    """Compute of one microbatch; 0: not measured yet."""
    may_move: bool
    moving: bool = False
    """It is on its way here, and serves nothing yet."""

    @classmethod
    def of_record(cls, record: Mapping[str, Value]) -> "Said":
        """What a record in the directory says, among others' fields. Raises RemoteError("malformed")."""
        return cls.from_value({name: record[name] for name in cls.__dataclass_fields__ if name in record})

    def _check_fields(self) -> None:
        if not 0 <= self.microbatch_s <= MOST_SECONDS:
            raise RemoteError("malformed", f"a microbatch of {self.microbatch_s} s")


def placements(
    found: Sequence[Mapping[PeerId, Mapping[str, Value]]],
) -> tuple[list[Placement], list[float]] | None:
    """The peers of all stages from their topics' records, and what a microbatch costs in each stage.

    None while some stage has not been measured, and while anybody is on the way. A peer counts where it was last; what
    cannot be read counts nowhere.
    """
    latest: dict[PeerId, tuple[int, Said]] = {}
    for stage, records in enumerate(found):
        for peer, record in sorted(records.items()):
            with contextlib.suppress(RemoteError):
                said = Said.of_record(record)
                if peer not in latest or said.since_ms > latest[peer][1].since_ms:
                    latest[peer] = (stage, said)
    if any(said.moving for _, said in latest.values()):
        return None
    costs = []
    for stage in range(len(found)):
        measured = [said.microbatch_s for at, said in latest.values() if at == stage and said.microbatch_s > 0]
        if not measured:
            return None
        costs.append(statistics.median(measured))
    peers = [Placement(peer, StageIndex(at), 1.0, said.may_move) for peer, (at, said) in sorted(latest.items())]
    return peers, costs


class Mover:
    """Looks, every `limits.rebalance_s`, whether this peer should serve another stage."""

    def __init__(
        self,
        settings: RunSettings,
        directory: Directory,
        me: PeerId,
        stage: StageIndex,
        topic: Callable[[int], str],
        microbatch_s: Callable[[], float],
        members: Callable[[], Sequence[PeerId]],
    ) -> None:
        """`members`: of the stage, by its last certificate."""
        self._settings = settings
        self._directory = directory
        self._me = me
        self._stage = stage
        self._topic = topic
        self._microbatch_s = microbatch_s
        self._members = members
        self._since_ms = round(time.time() * 1000)
        self._settled_at = time.monotonic() + SETTLES_FOR * settings.limits.rebalance_s
        self.target: StageIndex | None = None
        """Where this peer is to go."""

    def said(self) -> dict[str, Value]:
        """For this peer's record."""
        return Said(self._since_ms, self._microbatch_s(), time.monotonic() >= self._settled_at).to_value()

    async def run(self) -> None:
        """Look until this peer is to go; then, until cancelled, say where it goes."""
        named: StageIndex | None = None
        while True:
            await asyncio.sleep(self._settings.limits.rebalance_s)
            target, reason = await self._look()
            if target is not None and target == named:
                log.warning("this peer moves from stage %d to stage %d: %s", self._stage, target, reason)
                self.target = target
                await say_on_the_way(self._directory, self._topic(target), self._settings.deadlines.lease_s)
            named = target

    async def _look(self) -> tuple[StageIndex | None, str]:
        num_stages = self._settings.model.num_stages
        try:
            found = [await self._directory.lookup(self._topic(stage)) for stage in range(num_stages)]
        except TransientError as error:
            return None, str(error)
        facts = placements(found)
        if facts is None:
            return None, "not measured yet, or somebody is on the way"
        peers, costs = facts
        here = {peer.peer_id for peer in peers if peer.stage == self._stage}
        if not here.issuperset(self._members()):
            return None, "the stage's roster still names one who has left"
        rules = RebalancingSettings(min_replicas=self._settings.limits.min_replicas)
        move_s = self._settings.deadlines.drain_s + self._settings.deadlines.step_s
        for move in plan_moves(peers, costs, [move_s] * num_stages, rules):
            if move.peer_id == self._me and move.source == self._stage:
                return move.target, move.reason
        return None, "not named"


async def say_on_the_way(directory: Directory, topic: str, lease_s: float) -> None:
    """Until cancelled: this peer counts in the stage of `topic`, to which it is on its way."""
    said = Said(round(time.time() * 1000), 0.0, may_move=False, moving=True).to_value()
    while True:
        with contextlib.suppress(TransientError):
            await directory.publish(topic, said, ttl_s=lease_s)
        await asyncio.sleep(lease_s / 3)
