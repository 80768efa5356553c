"""A large stage's cohorts, which its reductions are split into, and the draw of those who vote.

Both are drawn from the name of the version that a round starts from: the same for everyone, and fixed for the version.
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


def cohorts(members: Sequence[PeerId], name: bytes) -> tuple[tuple[PeerId, ...], ...]:
    """The cohorts of a round that starts from the version of this name, nearly equal, each in the order of ids.

    Drawn, so that who would like to be together cannot see to it.
    """
    if len(members) <= COHORT_MEMBERS:
        return (tuple(members),)
    number = -(-len(members) // COHORT_MEMBERS)
    order = rank(members, "cohort", name)
    return tuple(tuple(sorted(order[first::number])) for first in range(number))


def committee(work: Mapping[PeerId, int], name: bytes) -> dict[PeerId, int]:
    """Those of the members who vote on a round that starts from the version of this name, in the order of ids, each
    with what its vote weighs by the `work` of all. Where they are many the seats are spread over them: who has done
    twice as much has twice as many.
    """
    weights = seats(work)
    return weights if len(weights) <= COMMITTEE else spread(weights, COMMITTEE, "committee", name)
