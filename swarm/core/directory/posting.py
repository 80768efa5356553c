"""The run key's word that a peer is to serve another stage, and who is posted to a stage that nobody serves any more.

Nobody goes to another stage by himself in a run of strangers: whoever could choose would wait, with all of his, for the
stage that he wants to be empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from swarm.core.forms import StageNumber
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.record import SignedValue
from swarm.core.seats import drawn


@dataclass(frozen=True)
class Posting(SignedValue):
    """From one stage to another."""

    DOMAIN: ClassVar[str] = "posting"
    run_id: str
    peer_id: PeerId
    source: StageNumber
    target: StageNumber
    era: int
    """Of the stages: with it the word is over."""
    version: Version
    """Of the source, as far as it was certified: whoever comes to a stage later is not sent away by an earlier word."""


def refills(
    work: Sequence[Mapping[PeerId, int]], target: StageIndex, *, min_replicas: int, num_arriving: int, seed: bytes
) -> tuple[tuple[PeerId, StageIndex], ...]:
    """Who goes from where to the stage `target`, of which nobody is left: as many as make its share of all.

    `work`: of each stage, what is certified of those who train there now; votes weigh by it, and so does this draw. The
    `seed` is told to nobody before the draw. `num_arriving`: so many are on their way, or there. A stage gives nobody
    away below `min_replicas`, and no more than half of those it has.
    """
    num_here = [0 if stage == target else len(peers) for stage, peers in enumerate(work)]
    wanted = max(min_replicas, (sum(num_here) + num_arriving) // len(work)) - num_arriving
    may_give = [min(num - min_replicas, (num + 1) // 2) for num in num_here]
    stage_of = {peer: StageIndex(stage) for stage, peers in enumerate(work) if stage != target for peer in peers}
    weights = {peer: work[stage][peer] for peer, stage in stage_of.items()}
    gone: list[tuple[PeerId, StageIndex]] = []
    for peer in drawn(weights, "refill", seed):
        source = stage_of[peer]
        if len(gone) < wanted and may_give[source] > 0 and weights[peer] > 0:
            may_give[source] -= 1
            gone.append((peer, source))
    return tuple(gone)
