"""How stages become even: one member at a time goes from a stage that has to spare to the one that limits the run.

Which one goes is drawn. Each move is a trial: where the certified rate does not rise by it, the next comes after twice
as many versions, so that wrong figures, whoever made them up, cost little.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from swarm.core.directory.capacities import Witness, capacities
from swarm.core.directory.rebalancing import Move, Placement, RebalancingSettings, plan_moves
from swarm.core.ids import PeerId, StageIndex
from swarm.core.seats import drawn

SETTLES_VERSIONS = 8
"""Nobody moves before the last who came has worked for so many; the rate is measured over them."""
MOST_SETTLES_VERSIONS = 1024
LEAST_RISE = 0.25
"""Of the rise that was expected of a move: with less it has failed."""
QUORUM_PARTS = 3
"""A stage from which somebody goes keeps two of so many parts of its members."""


@dataclass(frozen=True)
class StageFigures:
    """A stage as it is certified, and as its members see it."""

    members: Set[PeerId]
    witnesses: Mapping[PeerId, Witness]
    """Those of them who are there."""
    settled: Set[PeerId]
    """Those who have worked there for `SETTLES_VERSIONS`."""

    @property
    def can_spare(self) -> bool:
        """Whether those who are left are a quorum without one more."""
        num_silent = len(self.members) - len(self.witnesses)
        return num_silent == 0 or (num_silent + 1) * QUORUM_PARTS <= len(self.members)


class _Trial(NamedTuple):
    move: Move
    rate: float
    """Microbatches a second, before."""
    expected: float
    """After it."""


class Evening:
    """Of one run, as its host has seen it."""

    def __init__(self, costs: Sequence[float], move_s: float, rules: RebalancingSettings) -> None:
        """`costs`: of a microbatch in each stage, by the model. `move_s`: how long a peer that moves does no work."""
        self._costs = costs
        self._move_s = [move_s] * len(costs)
        self._rules = rules
        self._trial: _Trial | None = None
        self._settles = SETTLES_VERSIONS
        self._settled_from = 0

    def waits(self, version: int, *, is_moving: bool) -> bool:
        """Whether it is too soon to look, where every stage is at `version`. `is_moving`: somebody is on the way."""
        if is_moving or version < self._settled_from:
            self._settled_from = version
        return version < self._settled_from + self._settles

    def look(
        self, stages: Sequence[StageFigures], *, version: int, rate: float, seed: Callable[[StageIndex], bytes]
    ) -> Move | None:
        """Who is to go now. `rate`: microbatches a second, certified, over the last `SETTLES_VERSIONS`.

        `seed`: to draw by who goes to a stage; nobody else can know it before.
        """
        if self._trial is not None and self._has_failed(self._trial, stages, rate):
            self._settled_from = version
            return None
        could = capacities([stage.witnesses for stage in stages], self._costs, rate=rate)
        if could is None:
            return None
        power = [
            cost * capacity / len(stage.witnesses)
            for cost, capacity, stage in zip(self._costs, could, stages, strict=True)
        ]
        peers = [
            Placement(peer, StageIndex(number), power[number], stage.can_spare and peer in stage.settled)
            for number, stage in enumerate(stages)
            for peer in stage.witnesses
        ]
        for move in plan_moves(peers, self._costs, self._move_s, self._rules)[:1]:
            for peer in drawn(_helping(stages[move.source], could, move), "evening", seed(move.target))[:1]:
                drawn_move = Move(peer, move.source, move.target, move.reason)
                self._try(drawn_move, could, power[move.source], rate)
                return drawn_move
        return None

    def _try(self, move: Move, could: Sequence[float], power: float, rate: float) -> None:
        after = list(could)
        after[move.source] -= power / self._costs[move.source]
        after[move.target] += power / self._costs[move.target]
        self._trial = _Trial(move, rate, rate * max(1.0, min(after) / min(could)))

    def _has_failed(self, trial: _Trial, stages: Sequence[StageFigures], rate: float) -> bool:
        """What came of the last move, by what is certified since; one who did not arrive was no trial."""
        self._trial = None
        if trial.move.peer_id not in stages[trial.move.target].members:
            return False
        if rate >= trial.rate + LEAST_RISE * (trial.expected - trial.rate):
            self._settles = SETTLES_VERSIONS
            return False
        self._settles = min(2 * self._settles, MOST_SETTLES_VERSIONS)
        return True


def _helping(source: StageFigures, could: Sequence[float], move: Move) -> dict[PeerId, int]:
    """Those without whom their stage does more than the slowest does now, and their work, by which they are drawn."""
    work = {peer: one.work for peer, one in source.witnesses.items()}
    whole = sum(work.values())
    return {
        peer: tokens
        for peer, tokens in work.items()
        if tokens > 0 and peer in source.settled and could[move.source] * (whole - tokens) > min(could) * whole
    }
