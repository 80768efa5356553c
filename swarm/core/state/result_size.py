"""How long the longest message of a round will be: a result that is voted on, with the roster it is made of and its
reducers' words."""

from swarm.core.cohorts import COHORT_MEMBERS, MAX_MEMBERS
from swarm.core.round.contribution import MAX_CHARGES, MAX_LACKS, MAX_RATES
from swarm.core.round.voting import quorum

PEER_BYTES = 55
DIGEST_BYTES = 34
WORK_BYTES = 96
SIGNATURE_BYTES = 66
FIELDS_BYTES = 768
"""Of a message's own fields, names and signature; of a contribution also what it reveals, with a ticket."""
SPARE = 1.25
"""For microbatches that two members list, and for members and parts that are left out, with a sentence why."""


def result_bytes(num_members: int, num_parts: int, num_microbatches: int, *, each: bool = False) -> int:
    """Of a stage with so many members and parts, and so many microbatches a step, less than a third of whose members
    list as many as they may; or, if `each`, so many of every member."""
    num_cohorts = -(-num_members // COHORT_MEMBERS)
    named = MAX_RATES * (PEER_BYTES + 2) + MAX_CHARGES * (PEER_BYTES + DIGEST_BYTES)
    contribution = FIELDS_BYTES + num_parts * DIGEST_BYTES + named
    reduced = 16 + DIGEST_BYTES + num_cohorts * (PEER_BYTES + DIGEST_BYTES + 4)
    words = 4 + SIGNATURE_BYTES * (1 + (num_cohorts if num_cohorts > 1 else 0))
    liars = (num_members - 1) // 3
    honest = num_members * num_microbatches if each else num_microbatches
    listed = honest + liars * most_work(num_microbatches)
    votes = 3 * num_members * (PEER_BYTES + 68)
    roster = num_members * (contribution + 2 * PEER_BYTES) + num_cohorts * num_parts * PEER_BYTES
    lacks = min(MAX_LACKS, num_members * quorum(min(num_parts, -(-num_members // num_cohorts)))) * (PEER_BYTES + 68)
    return int(SPARE * (roster + listed * WORK_BYTES + num_parts * (reduced + words) + votes + lacks + FIELDS_BYTES))


def most_work(num_microbatches: int) -> int:
    """Microbatches that one member may list in a step of so many: all of it, and what was granted in others' place."""
    return 2 * num_microbatches


def most_members(num_parts: int, num_microbatches: int, *, each: bool = False, max_bytes: int) -> int:
    """Members of a stage whose results are at most so long; 0 if not even one."""
    sizes = ((n, result_bytes(n, num_parts, num_microbatches, each=each)) for n in range(MAX_MEMBERS, 0, -1))
    return next((n for n, size in sizes if size <= max_bytes), 0)
