"""What a run goes on from when all replicas of a stage had gone: the newest state that all stages can reach together.

A run begins, and may begin again: each beginning is an era, in which every stage has a lineage of its own. The present
branch is the first era up to the version from which the second was taken, the second up to where the third was, and so
on. Peers hold states of one or two lineages on their disks, each from some oldest to some newest version.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from swarm.core.ids import PeerId

AHEAD = 8
"""Versions beyond the highest that is known, where somebody who may have made more cannot be asked."""


@dataclass(frozen=True, order=True)
class Holding:
    """Every version of a lineage from `oldest` to `newest` can be made again."""

    lineage: bytes
    oldest: int
    newest: int


@dataclass(frozen=True)
class Era:
    """One beginning of the run, as far as the present branch has it."""

    first: int
    """The version that all stages began at."""
    last: int | None
    """The version from which the next era was taken; None of the present one."""
    lineages: tuple[bytes, ...]
    """By stage."""


@dataclass(frozen=True, order=True)
class Point:
    """A version of the present branch: where an era begins is written as where the one before ends."""

    era: int
    """Index of the era, from 0."""
    version: int


def points_of(holdings: Iterable[Holding], eras: Sequence[Era], stage: int, *, newest: int) -> dict[Point, Holding]:
    """The points that one who holds these can give of the stage, each with the version by which it gives it.

    Of the present era nothing counts beyond `newest`: the version up to which it is known to be certified.
    """
    found: dict[Point, Holding] = {}
    for held in sorted(holdings):
        for index, era in enumerate(eras):
            if era.lineages[stage] != held.lineage:
                continue
            last = min(held.newest, newest if era.last is None else era.last)
            for version in range(max(held.oldest, era.first), last + 1):
                found[_written_once(Point(index, version), eras)] = Holding(held.lineage, version, version)
    return found


def point_of(version: int, eras: Sequence[Era]) -> Point | None:
    """What a state is of that was archived under this number; None if it is of an abandoned branch."""
    for index, era in enumerate(eras):
        if era.first <= version and (era.last is None or version <= era.last):
            return _written_once(Point(index, version), eras)
    return None


def _written_once(point: Point, eras: Sequence[Era]) -> Point:
    while point.era > 0 and point.version == eras[point.era].first:
        before = eras[point.era - 1].last
        assert before is not None, "only the present era has no end"
        point = Point(point.era - 1, before)
    return point


def newest_common(points: Sequence[Collection[Point]]) -> Point | None:
    """The newest that every stage has; `points` by stage."""
    common = set(points[0]).intersection(*points[1:]) if points else set()
    return max(common, default=None)


@dataclass(frozen=True)
class StageSeen:
    """Who is there of a stage, as far as the host can tell."""

    members: frozenset[PeerId]
    """By the newest certified version."""
    training: frozenset[PeerId]
    """They answer for the stage's rounds."""
    waiting: frozenset[PeerId]
    """They have come back, or are new, and found nobody who trains."""
    left: frozenset[PeerId]
    """They said goodbye."""
    silent: frozenset[PeerId]
    """They have not answered for so long that nobody expects them."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody goes on by himself: no member trains any more."""
        return self.members <= self.waiting | self.left | self.silent

    @property
    def is_complete(self) -> bool:
        """Whether everybody who may hold the newest version is here, or left before it was made."""
        return self.members <= self.training | self.waiting | self.left

    def missing(self, min_replicas: int) -> int:
        """How many more peers are waited for: as many as the run wants, but not more than there were."""
        wanted = max(1, min(min_replicas, len(self.members)))
        return max(0, wanted - len(self.training | self.waiting))


def goes_on_as(to: int, *, highest: int, is_complete: bool, last: int) -> int:
    """The number under which the state of version `to` is gone on from, so that no number is used for two versions.

    `highest`: that anybody has been heard of to have made; if all are here who can have made one (`is_complete`),
    there is no higher one. `last`: the run's; a run that is a step from its end takes that step, whatever was made.
    """
    if to >= last or (is_complete and to == highest):
        return to
    return min(highest + (1 if is_complete else AHEAD), last - 1)


def highest_said(known: int, said: Iterable[int]) -> int:
    """The highest version that is `known` to be certified, or not much more, where somebody says so: a number that is
    used up is gone for ever, and a run has so many steps."""
    return max([known, *(min(version, known + AHEAD) for version in said)])
