"""A large stage's cohorts, which its reductions are split into, and the draw of those who vote.

Both are drawn from a word of the host (`swarm.core.audit.chance`), which nobody in the stage can choose: voters from
the last one that is certified, cohorts from the last one that is on the roster.
"""

from collections.abc import Mapping, Sequence

from swarm.core.ids import PeerId
from swarm.core.ranking import rank
from swarm.core.seats import seats, spread

MAX_MEMBERS = 256
"""Of a stage: four cohorts. A roster holds a commitment of each to every part."""
COHORT_MEMBERS = 64
"""A stage of more is split: about a part nobody hears or sends to many more than that."""
MAX_COHORTS = -(-MAX_MEMBERS // COHORT_MEMBERS)
COMMITTEE = 127
"""Members who vote on a round, at most: with the host 128."""


def num_cohorts(num_members: int) -> int:
    """How many the members of a stage are split into."""
    return max(1, -(-num_members // COHORT_MEMBERS))


def cohorts(members: Sequence[PeerId], said: bytes) -> tuple[tuple[PeerId, ...], ...]:
    """The cohorts of a round on whose roster this is the host's last word, nearly equal, each in the order of ids.

    Drawn, so that who would like to be together cannot see to it.
    """
    number = num_cohorts(len(members))
    if number == 1:
        return (tuple(members),)
    order = rank(members, "cohort", said)
    return tuple(tuple(sorted(order[first::number])) for first in range(number))


def committee(work: Mapping[PeerId, int], said: bytes) -> dict[PeerId, int]:
    """Those of the members who vote on a round before which this is the host's last word, in the order of ids, each
    with what its vote weighs by the `work` of all. Where they are many the seats are spread over them: who has done
    twice as much has twice as many.
    """
    weights = seats(work)
    return weights if len(weights) <= COMMITTEE else spread(weights, COMMITTEE, "committee", said)
