"""Who serves which stage: joiners go where they help most, few move, and none in vain.

A pipeline is as fast as its slowest stage. A stage's capacity is the power of its peers over the stage's cost: the
microbatches a second it could do. Every decision here raises the lowest capacity, or the number of a stage's replicas
to the run's minimum, and is a function of facts that are the same for all: whoever decides at once decides the same.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.core.ids import PeerId, StageIndex

GIVEN_AT_ONCE = 3
"""Of so many replicas a stage gives at most one in a plan, so that those who stay are a quorum of its voters."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One peer of one stage, as it counts: joining peers and those on their way count where they go."""

    peer_id: PeerId
    stage: StageIndex
    power: float
    """Work a second as others measured it; a stage of cost 1 does one microbatch a second with a power of 1."""
    may_move: bool = True
    """False while it joins or drains, and for a while after it came."""


@dataclass(frozen=True, kw_only=True)
class RebalancingSettings:
    """When moving peers is worth it."""

    min_replicas: int = 2
    """A stage gives no peer away below this many, and recruits up to it whatever its capacity."""
    hysteresis: float = 0.05
    """Least gain of throughput, as a share, that a plan of moves must bring."""
    power_noise: float = 0.1
    """Standard error of one peer's measured power, as a share: gains within three of the slowest stage's are chance."""
    payback_s: float = 1200.0
    """Within this time moves must have brought in what they cost. Less than peers stay."""

    def __post_init__(self) -> None:
        assert self.min_replicas >= 1
        assert min(self.hysteresis, self.power_noise) >= 0
        assert self.payback_s > 0

    def least_gain(self, num_replicas: int) -> float:
        """Share by which the throughput must rise where the slowest stage has so many replicas."""
        return self.hysteresis + 3 * self.power_noise / math.sqrt(max(1, num_replicas))


@dataclass(frozen=True)
class Move:
    """A peer leaves its stage for another, and why."""

    peer_id: PeerId
    source: StageIndex
    target: StageIndex
    reason: str


@dataclass(frozen=True)
class Choice:
    """Where a joiner goes, and why."""

    stage: StageIndex
    reason: str


class _Stages:
    """Capacities and replicas, and the peers of each stage that may go, by power."""

    def __init__(self, peers: Iterable[Placement], costs: Sequence[float]) -> None:
        assert costs
        assert min(costs) > 0, f"costs {list(costs)}"
        self.costs = costs
        self.num_replicas = [0] * len(costs)
        self.gave: set[int] = set()
        self.received: set[int] = set()
        power = [0.0] * len(costs)
        self.movable: list[list[tuple[float, PeerId]]] = [[] for _ in costs]
        for peer in sorted(peers, key=_by_id):  # sums of floats depend on their order
            self.num_replicas[peer.stage] += 1
            power[peer.stage] += peer.power
            if peer.may_move:
                self.movable[peer.stage].append((peer.power, peer.peer_id))
        for movable in self.movable:
            movable.sort()
        self.may_give = [max(1, num // GIVEN_AT_ONCE) for num in self.num_replicas]
        self.capacity = [sum_ / cost for sum_, cost in zip(power, costs, strict=True)]

    def slowest(self) -> int:
        return min(range(len(self.costs)), key=lambda stage: (self.capacity[stage], stage))

    def donors(self, target: int, min_replicas: int) -> list[int]:
        """Stages that can spare a peer, the fastest first.

        Who gets peers gives none in the same plan: until all have arrived it would have neither.
        """
        able = [
            stage
            for stage, num in enumerate(self.num_replicas)
            if stage != target
            and stage not in self.received
            and num > min_replicas
            and self.may_give[stage]
            and self.movable[stage]
        ]
        return sorted(able, key=lambda stage: (-self.capacity[stage], stage))

    def after(self, source: int, target: int, power: float) -> float:
        """The lower of two stages' capacities once so much power has gone from one to the other."""
        return min(
            self.capacity[source] - power / self.costs[source], self.capacity[target] + power / self.costs[target]
        )

    def fittest(self, source: int, target: int) -> int:
        """Place in `movable[source]` of the peer that leaves the two stages most alike."""
        movable = self.movable[source]
        apart = self.capacity[source] - self.capacity[target]
        wanted = apart / (1 / self.costs[source] + 1 / self.costs[target])
        above = bisect_left(movable, (wanted, PeerId("")))
        below = bisect_left(movable, (movable[max(0, above - 1)][0], PeerId("")))  # of equals the one of least id
        near = {below, min(above, len(movable) - 1)}
        return max(sorted(near), key=lambda place: self.after(source, target, movable[place][0]))

    def move(self, source: int, target: int, place: int) -> tuple[float, PeerId]:
        """Take the peer at `place` from one stage to the other, where it stays."""
        self.gave.add(source)
        self.may_give[source] -= 1
        self.received.add(target)
        power, peer_id = self.movable[source].pop(place)
        self.num_replicas[source] -= 1
        self.num_replicas[target] += 1
        self.capacity[source] -= power / self.costs[source]
        self.capacity[target] += power / self.costs[target]
        return power, peer_id


def plan_moves(
    peers: Iterable[Placement],
    costs: Sequence[float],
    move_s: Sequence[float],
    settings: RebalancingSettings,
) -> tuple[Move, ...]:
    """Who should move now, if anybody: the same for everyone who knows the same peers, in any order.

    `costs` is each stage's work for one microbatch, `move_s` how long a peer that moves to it does no work. Time grows
    as n log n in the number of peers.
    """
    stages = _Stages(peers, costs)
    refills = _refill(stages, settings)
    return (*refills, *_level(stages, move_s, settings))


def best_stage(num_replicas: Sequence[int], capacity: Sequence[float], *, min_replicas: int = 1) -> Choice:
    """Where one more peer helps most: a stage short of replicas, else the slowest.

    Peers on their way to a stage must be counted in it. Only more power in the slowest stage raises the pipeline's
    throughput, whatever the joiner's own.
    """
    stages = range(len(capacity))
    fewest = min(stages, key=lambda stage: (num_replicas[stage], capacity[stage], stage))
    if num_replicas[fewest] < min_replicas:
        return Choice(StageIndex(fewest), f"stage {fewest} has {num_replicas[fewest]} of {min_replicas} replicas")
    slowest = min(stages, key=lambda stage: (capacity[stage], stage))
    return Choice(
        StageIndex(slowest),
        f"stage {slowest} is the slowest of {len(capacity)}: {capacity[slowest]:.3g} microbatches/s",
    )


def _refill(stages: _Stages, settings: RebalancingSettings) -> list[Move]:
    """Bring every stage to its minimum of replicas, as far as others can spare peers."""
    moves: list[Move] = []
    while True:
        target = min(
            range(len(stages.costs)),
            key=lambda stage: (min(stages.num_replicas[stage], settings.min_replicas), stages.capacity[stage], stage),
        )
        num = stages.num_replicas[target]
        donors = stages.donors(target, settings.min_replicas)
        if num >= settings.min_replicas or not donors:
            return moves
        source = donors[0]
        _, peer_id = stages.move(source, target, stages.fittest(source, target))
        why = f"stage {target} has {num} of {settings.min_replicas} replicas"
        moves.append(Move(peer_id, StageIndex(source), StageIndex(target), why))


def _level(stages: _Stages, move_s: Sequence[float], settings: RebalancingSettings) -> list[Move]:
    """Moves, the first of them most urgent, as many as bring most within the time; none if they bring too little."""
    slowest = stages.slowest()
    before = stages.capacity[slowest]
    least = before * (1 + settings.least_gain(stages.num_replicas[slowest]))
    total_cost = sum(stages.costs)
    level = sum(capacity * cost for capacity, cost in zip(stages.capacity, stages.costs, strict=True)) / total_cost
    if level <= least:  # even perfect balance would not bring enough
        return []
    moves: list[Move] = []
    lost, longest_s = 0.0, 0.0  # microbatches not done because peers were on their way; when the last has arrived
    best_net, num_best = 0.0, 0
    while (found := _next_move(stages, settings)) is not None:
        source, target, place = found
        power, peer_id = stages.move(source, target, place)
        lost += power / total_cost * move_s[target]
        longest_s = max(longest_s, move_s[target])
        now = stages.capacity[stages.slowest()]
        moves.append(
            Move(
                peer_id,
                StageIndex(source),
                StageIndex(target),
                f"stage {target} limits the pipeline to {before:.3g} microbatches/s; {len(moves) + 1} moves make it "
                f"{now:.3g}",
            )
        )
        net = (now - before) * max(0.0, settings.payback_s - longest_s) - lost
        if now > least and net > best_net:
            best_net, num_best = net, len(moves)
    return moves[:num_best]


def _next_move(stages: _Stages, settings: RebalancingSettings) -> tuple[int, int, int] | None:
    """Source, target and the peer's place, if a move brings the slowest stage up and makes no other as slow."""
    target = stages.slowest()
    lowest = stages.capacity[target]
    if target in stages.gave:
        return None
    for source in stages.donors(target, settings.min_replicas):
        if stages.capacity[source] <= lowest:
            return None
        place = stages.fittest(source, target)
        if stages.after(source, target, stages.movable[source][place][0]) > lowest * (1 + 1e-9):
            return source, target, place
    return None


def _by_id(peer: Placement) -> PeerId:
    return peer.peer_id
