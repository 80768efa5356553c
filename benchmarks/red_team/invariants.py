"""What must hold after every run in which somebody lied, each with what shows that it does not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.red_team.virtual_swarm import Seen, VirtualSwarm
from swarm.core.ids import PeerId

MOST_LOSS_RATIO = 1.2
MOST_TASKS_A_PEER = 60
"""Of a whole swarm's tasks at the end; an honest run has some 20 a peer."""
SQUARES_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Broken:
    """An invariant that did not hold."""

    what: str
    """A word for it."""
    said: str

    def __str__(self) -> str:
        return f"{self.what}: {self.said}"


OPEN = frozenset[str]()
"""Holes that are known and not closed yet: they are told of, and fail nothing."""


def broken(swarm: VirtualSwarm, *, honest_loss: float) -> list[Broken]:
    """`honest_loss`: of the same run where nobody lies."""
    seen = swarm.seen
    return [
        *_shut_out(swarm, seen),
        *(Broken("ended", said) for said in seen.broken[:3]),
        *_goes_on(swarm, seen),
        *_equal(seen),
        *_written(seen),
        *_claims(swarm, seen),
        *_loss(seen, honest_loss),
        *_memory(swarm, seen),
    ]


def _shut_out(swarm: VirtualSwarm, seen: Seen) -> Iterator[Broken]:
    honest = {peer.peer_id for peer in swarm.honest}
    for event in seen.events:
        if event["event"] in ("banned", "quarantined") and event["peer_id"] in honest:
            yield Broken("shut_out", f"{event['peer_id'][-6:]} is {event['event']}: {event.get('reason', '')}")
    for peer in sorted(seen.shut_out_by_peers):
        yield Broken("shut_out", f"{peer[-6:]} is out to another honest peer")


def _goes_on(swarm: VirtualSwarm, seen: Seen) -> Iterator[Broken]:
    steps = swarm.setting.steps
    if seen.version < steps:
        yield Broken("stopped", f"{seen.version} of {steps} steps in {seen.elapsed_s:.0f} s")


def _equal(seen: Seen) -> Iterator[Broken]:
    for (stage, version), held in sorted(seen.applied.items()):
        if len(set(held.values())) > 1:
            yield Broken("unequal", f"stage {stage} has {len(set(held.values()))} versions {version}")


def _written(seen: Seen) -> Iterator[Broken]:
    """A certified result says of each part what its bytes come to, and no part is empty that somebody brought."""
    for (stage, step), result in sorted(seen.results.items()):
        found = seen.squares.get((stage, step), ())
        for part, squares in zip(result.parts, found, strict=False):
            if not part.is_empty and not math.isclose(part.squares, squares, rel_tol=SQUARES_TOLERANCE, abs_tol=1e-300):
                yield Broken("written", f"stage {stage} step {step}: squares of {part.squares:g}, not {squares:g}")


def _claims(swarm: VirtualSwarm, seen: Seen) -> Iterator[Broken]:
    """Nobody weighs, or is credited, more than its neighbours saw it do."""
    for (stage, step), result in sorted(seen.results.items()):
        for made in result.roster.contributions:
            had = seen.receipts.get((stage, made.peer_id), set())
            extra = [one for one in made.work if (int(one.microbatch_id), one.attempt) not in had]
            if extra and swarm.is_liar(made.peer_id):
                yield Broken("claims", f"stage {stage} step {step}: {len(extra)} microbatches without a receipt")


def _loss(seen: Seen, honest_loss: float) -> Iterator[Broken]:
    ratio = seen.held_out / honest_loss
    if not ratio <= MOST_LOSS_RATIO:
        yield Broken("loss", f"held-out loss {seen.held_out:.3f}, {ratio:.2f} of an honest run's")


def _memory(swarm: VirtualSwarm, seen: Seen) -> Iterator[Broken]:
    most = MOST_TASKS_A_PEER * len(swarm.peers)
    if seen.tasks > most:
        yield Broken("memory", f"{seen.tasks} tasks at the end, more than {most}")


def shut_out(swarm: VirtualSwarm) -> set[PeerId]:
    """Honest peers that are."""
    honest = {peer.peer_id for peer in swarm.honest}
    said = {event["peer_id"] for event in swarm.seen.events if event["event"] in ("banned", "quarantined")}
    return (said & honest) | swarm.seen.shut_out_by_peers
