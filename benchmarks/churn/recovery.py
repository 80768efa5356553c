"""How fast a swarm goes and how soon it is back after a kill: reckoned alike for a real swarm and
for a simulated one, from what came home when, who was there, and when somebody was killed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

NEAR = 0.8
"""Share of the rate that the living allow at which the swarm is back: a step's rate is off by one of its microbatches
in three."""

LATEST_PHASE = 0.92
"""Of a step, at which a kill is surely in it: just before its end and just after it are a whole step's time apart."""


class Stay(Protocol):
    """A peer's time as a member of a stage."""

    @property
    def stage(self) -> int: ...

    @property
    def power(self) -> float: ...

    @property
    def joined_at(self) -> float: ...

    @property
    def ended_at(self) -> float | None:
        """None if it never ended."""


@dataclass(frozen=True)
class Story:
    """What happened to a swarm, in seconds of any clock."""

    versions: Sequence[tuple[float, int]]
    """When every stage had each version, and microbatches that came home with it."""
    stays: Sequence[Stay]
    kills: Sequence[float]
    calm: tuple[float, float]
    """Undisturbed, with all peers."""
    churn: tuple[float, float]
    """In which the kills were."""

    def rate_between(self, start: float, stop: float) -> float:
        """Microbatches a second, between the first and the last version in that time; 0 with fewer than two."""
        inside = [(at, num) for at, num in self.versions if start <= at <= stop]
        if len(inside) < 2:
            return 0.0
        return sum(num for _, num in inside[1:]) / (inside[-1][0] - inside[0][0])

    def undisturbed_per_s(self) -> float:
        """Microbatches a second in the median step of the calm: one that the machine held up does not count."""
        start, stop = self.calm
        return median(num / (ended - begun) for (begun, _), (ended, num) in self._steps() if start <= begun < stop)

    def power(self, at: float) -> float:
        """Of the weakest stage's members together."""
        of_stage = {stay.stage: 0.0 for stay in self.stays}
        for stay in self.stays:
            if stay.joined_at <= at and (stay.ended_at is None or stay.ended_at > at):
                of_stage[stay.stage] += stay.power
        return min(of_stage.values())

    def backs_s(self) -> list[float | None]:
        """Of each kill, seconds until the first step begins that goes at `NEAR` of the rate that the living allow.

        They allow the share of the undisturbed rate that the weakest stage has of its power. None: not before the next
        kill, nor before the end.
        """
        each = self.undisturbed_per_s() / self.power(self.calm[0])
        ends = [*self.kills[1:], self.churn[1]]
        return [self._back_s(kill, end, each) for kill, end in zip(self.kills, ends, strict=True)]

    def _back_s(self, killed_at: float, until: float, each: float) -> float | None:
        for (start, _), (stop, num) in self._steps():
            if killed_at <= start < until and num / (stop - start) >= NEAR * each * self.power(start):
                return start - killed_at
        return None

    def expected_step_s(self, start: float) -> float:
        """How long a step that begins then would take undisturbed: as the last one that did with the same power of the
        weakest stage; else as the last one."""
        steps = [(begun, ended) for (begun, _), (ended, _) in self._steps() if ended <= start]
        power = self.power(start)
        for begun, ended in reversed(steps):
            is_calm = not any(begun <= kill < ended for kill in self.kills)
            if is_calm and self.power(begun) == power:
                return ended - begun
        return steps[-1][1] - steps[-1][0]

    def phases(self) -> list[float]:
        """Of each kill, how much of its step was over; at most LATEST_PHASE."""
        found = []
        for kill in self.kills:
            begun = max(at for at, _ in self.versions if at <= kill)
            found.append(min(LATEST_PHASE, (kill - begun) / self.expected_step_s(begun)))
        return found

    def killed(self) -> list[float]:
        """Power of the peer that each kill was of."""
        ended = [stay for stay in self.stays if stay.ended_at is not None]
        return [min(ended, key=lambda stay: abs((stay.ended_at or 0.0) - kill)).power for kill in self.kills]

    def moment(self, not_before: float, phase: float) -> float:
        """That phase of the first step that begins `not_before`."""
        begins_at = next(at for at, _ in self.versions if at >= not_before)
        return begins_at + phase * self.expected_step_s(begins_at)

    def _steps(self) -> Iterator[tuple[tuple[float, int], tuple[float, int]]]:
        return pairwise(self.versions)

    def mean_living(self, start: float, stop: float) -> float:
        """Members of all stages, over that time."""
        seconds = sum(
            max(0.0, min(stop, stop if stay.ended_at is None else stay.ended_at) - max(start, stay.joined_at))
            for stay in self.stays
        )
        return seconds / (stop - start)
