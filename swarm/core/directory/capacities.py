"""What each stage could do, of what is certified of it and what those on both sides of its exchanges saw.

An exchange between two stages is seen by who calls and by who is called, so each boundary has the members of two
stages as witnesses; they weigh by their certified work, as votes do. What is certified is a stage's least, whoever says
that it is slow. Who says that it is fast needs three fifths of the witnesses' weight.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.core.ids import PeerId
from swarm.core.seats import seats

BELIEVED_SHARE = 0.6
"""Of the witnesses' weight: so much has to agree on what nothing certified bounds."""
LEAST_SHARE = 0.01
"""Of an exchange, that passes in the stage it goes to: what is seen of two boundaries may be in the wrong order."""


@dataclass(frozen=True)
class Witness:
    """A member of a stage, and what it says that its exchanges take at the least; 0: it does not know yet."""

    work: int
    """Tokens, certified, of the last versions."""
    answered_s: float
    """From a microbatch's arrival here to its answer; at the first stage from where it begins to where it ends."""
    waited_s: float
    """From where it was sent to the next stage to its answer; at the last stage 0."""


def capacities(
    stages: Sequence[Mapping[PeerId, Witness]], costs: Sequence[float], *, rate: float
) -> tuple[float, ...] | None:
    """Microbatches a second that each stage could do; None while nobody has seen how long some exchange takes.

    `rate`: microbatches a second that are certified of all stages. `costs`: of a microbatch in each, by the model.
    Nobody calls the first stage, so that its members alone know what it takes. They count for no more than what
    members of the other stages could do in their place.
    """
    assert len(stages) >= 2
    assert min(costs) > 0
    exchange_s = [_seen(stages[0], (), believed_share=1 - BELIEVED_SHARE)]
    for before, after in pairwise(stages):
        exchange_s.append(_seen(after, before.items(), believed_share=BELIEVED_SHARE))
    if not min(exchange_s) > 0 or not all(stages):
        return None
    found = []
    for members, whole_s, onward_s in zip(stages, exchange_s, [*exchange_s[1:], 0.0], strict=True):
        found.append(max(rate, len(members) / max(whole_s - onward_s, LEAST_SHARE * whole_s)))
    powers = [cost * capacity / len(members) for cost, capacity, members in zip(costs, found, stages, strict=True)]
    found[0] = max(rate, min(found[0], len(stages[0]) * statistics.median(powers[1:]) / costs[0]))
    return tuple(found)


def _seen(
    answering: Mapping[PeerId, Witness], calling: Iterable[tuple[PeerId, Witness]], *, believed_share: float
) -> float:
    """Seconds: the least that witnesses of that share of the weight do not exceed; 0 if nobody knows."""
    said = {peer: (one.answered_s, one.work) for peer, one in answering.items() if one.answered_s > 0}
    said |= {peer: (one.waited_s, one.work) for peer, one in calling if one.waited_s > 0}
    weights = seats({peer: work for peer, (_, work) in said.items()})
    wanted, weight = believed_share * sum(weights.values()), 0
    for seconds, peer in sorted((said[peer][0], peer) for peer in weights):
        weight += weights[peer]
        if weight >= wanted:
            return seconds
    return 0.0
