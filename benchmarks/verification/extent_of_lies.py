"""What lies and flipped bits change of a tensor, held against the rule that tells them apart.

    python -m benchmarks.verification.extent_of_lies [--seeds 3] [--steps 12] [--kind sign_flip ...] [--json]
    python -m benchmarks.verification.extent_of_lies --kind bit_flips --flips 1 --seeds 15 --steps 20
    python -m benchmarks.verification.extent_of_lies --pleading [--seeds 5]

In each seed one peer of four misbehaves from step 5 on, in the simulation of `peer.sim`, and nobody audits. Every
contribution of its is replayed whole, and every microbatch of it by itself. Of what is past the fraud bound the extent
is shown (docs/verification.md, section 9): an error past `LOCAL` is a lie, whatever its maker pleads.

With --pleading everything is audited, and the peer does its work again rightly whenever it is asked.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from benchmarks.verification.time_to_ban import NOT_REPLAYED
from swarm.attacks import KINDS, Attack
from swarm.core.ids import PeerId
from verification.audit.tolerance import LOCAL

FROM_STEP = 5
LIAR = 2


@dataclass(frozen=True)
class Extents:
    """What was found of one attack, in contributions or in microbatches."""

    kind: str
    where: str
    replayed: int
    wrong: int
    local: int
    smallest: float
    """Extents of what is wrong."""
    median: float
    largest: float


def measured(kind: str, *, seeds: int, steps: int) -> list[Extents]:
    """All stages together."""
    from peer.sim import SimulatedSwarm, TinyRun
    from swarm.core.settings import AuditSettings

    tiny = TinyRun(num_replicas=4, microbatches_per_step=8, audits=AuditSettings(hop_budget=0, contribution_budget=0))
    found: dict[str, list[float | None]] = {"contribution": [], "microbatch": []}
    for stage in (stage for stage in range(2) if Attack(kind).works_in(stage, 2)):
        for seed in range(seeds):
            swarm = SimulatedSwarm(tiny, attacks={(stage, LIAR): f"{kind}@{FROM_STEP}"}, seed=seed)
            for step in range(FROM_STEP + steps):
                swarm.step()
                if step >= FROM_STEP:
                    shown = swarm.shown(stage, LIAR, step)
                    extents = iter(shown.extents)
                    found["contribution"].append(next(extents) if shown.is_wrong else None)
                    found["microbatch"] += [next(extents) if wrong else None for wrong in shown.wrong_microbatches]
    return [_extents(kind, where, all_of_it) for where, all_of_it in found.items()]


@dataclass(frozen=True)
class Pleaded:
    """What became of liars that plead, in all seeds and stages."""

    kind: str
    runs: int
    banned: int
    quarantined: int
    """For three faults."""
    faults: int
    """Pleas that were taken."""
    others: int
    """Honest peers that were banned or quarantined."""


def pleaded(kind: str, *, seeds: int, steps: int) -> Pleaded:
    """Each run until the liar is out for good, or for so many steps of lying."""
    from peer.sim import SimulatedSwarm, TinyRun
    from swarm.core.settings import AuditSettings

    tiny = TinyRun(
        num_replicas=4, microbatches_per_step=8, audits=AuditSettings(hop_budget=1.0, contribution_budget=1.5)
    )
    runs = banned = quarantined = faults = others = 0
    for stage in (stage for stage in range(2) if Attack(kind).works_in(stage, 2)):
        for seed in range(seeds):
            swarm = SimulatedSwarm(tiny, attacks={(stage, LIAR): f"pleading_{kind}@{FROM_STEP}"}, seed=seed)
            liar, out = swarm.peer(stage, LIAR).peer_id, set[PeerId]()
            while swarm.version < FROM_STEP + steps and liar not in out:
                swarm.step()
                out = {*(ban.peer_id for ban in swarm.bans), *swarm.outcome().quarantined}
            was_banned = liar in {ban.peer_id for ban in swarm.bans}
            runs, banned, faults = runs + 1, banned + was_banned, faults + swarm.counts.faults
            quarantined, others = quarantined + (liar in out and not was_banned), others + len(out - {liar})
    return Pleaded(kind, runs, banned, quarantined, faults, others)


def _extents(kind: str, where: str, found: Sequence[float | None]) -> Extents:
    wrong = sorted(extent for extent in found if extent is not None)
    local = sum(extent <= LOCAL for extent in wrong)
    figures = (wrong[0], statistics.median(wrong), wrong[-1]) if wrong else (0.0, 0.0, 0.0)
    return Extents(kind, where, len(found), len(wrong), local, *figures)


@click.command()
@click.option("--kind", "kinds", multiple=True, help="Attacks of swarm.attacks; by default all that are simulated.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=12, show_default=True, help="In which the peer misbehaves.")
@click.option("--flips", type=click.FloatRange(0, 1), help="Share of microbatches with a flipped bit; else the kit's.")
@click.option("--pleading", is_flag=True, help="Audit, and let the liars plead a fault.")
@click.option("--json", "as_json", is_flag=True)
def main(kinds: Sequence[str], seeds: int, steps: int, flips: float | None, pleading: bool, as_json: bool) -> None:
    """How much of its tensor every lie of the kit changes, and every flipped bit."""
    import torch

    from peer.adversary import strengths

    torch.set_num_threads(1)
    if flips is not None:
        strengths.BIT_FLIP_SHARE = flips
    for kind in kinds or [
        kind for kind in KINDS if kind not in (*NOT_REPLAYED, "withholding") and KINDS[kind] != "the only"
    ]:
        if pleading:
            what = asdict(pleaded(kind, seeds=seeds, steps=steps))
            click.echo(json.dumps(what) if as_json else ", ".join(f"{name} {value}" for name, value in what.items()))
            continue
        for one in measured(kind, seeds=seeds, steps=steps):
            if as_json:
                click.echo(json.dumps(asdict(one)))
            elif one.wrong:
                click.echo(
                    f"{one.kind:20} {one.where:12} {one.wrong:4} of {one.replayed:4} wrong, {one.local:4} local; "
                    f"extent {one.smallest:.3f} to {one.largest:.3f}, median {one.median:.3f}"
                )


if __name__ == "__main__":
    main()
