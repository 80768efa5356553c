"""What several liars at once do to the loss before they are banned, and after.

    python -m benchmarks.verification.damage_by_liars [--keep damage.jsonl] [--json]

Several of 8 or 16 peers of one stage lie from step 30 on, all in the same way. Gradient attacks: 3 of 8 and 7 of 16;
attacks on what is sent on or back: 4 of 8. Runs are those of `benchmarks.verification.time_to_ban`, at the manifest's
budgets, and end 100 versions after the last ban. Beside each stands the run of the same seed without liars.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.kept_pieces import KeptPieces
from benchmarks.verification.time_to_ban import stage_of, tiny_run
from swarm.local.compute_pools import bound_pools

FROM_STEP = 30
MOST_STEPS, SMOKE_STEPS = 300, 10
AFTER = 100
"""Versions after the last ban at which the loss is to be that of a run without liars again."""
SEEDS = 5

LARGEST_AFTER, WITHIN = 1.2, 0.03
"""Goals: the largest held-out loss over the one before the attack; distance from the run without liars, in the end."""


@dataclass(frozen=True)
class Liars:
    """So many of so many peers of a stage lie so."""

    attack: str
    number: int
    replicas: int

    def __str__(self) -> str:
        return f"{self.attack} {self.number} of {self.replicas}"


ON_CONTRIBUTIONS = (
    "sign_flip",
    "alie",
    "stale_weights",
    "sign_flip_1000",
    "ipm",
    "zeros",
    "copied_gradient",
    "partial_work",
    "label_flip",
    "dropped_batch",
    "skipped_layers",
)
ON_HOPS = tuple(f"{what}_{how}" for what in ("activation", "gradient") for how in ("noise", "swap", "negate", "zeros"))
CASES = (
    *(Liars(attack, 3, 8) for attack in ON_CONTRIBUTIONS),
    *(Liars(attack, 4, 8) for attack in ON_HOPS),
    *(Liars(attack, 7, 16) for attack in ON_CONTRIBUTIONS),
)
SMOKE_CASE = Liars(ON_CONTRIBUTIONS[0], 1, 3)


def run(attack: str | None, number: int, replicas: int, seed: int, from_step: int, most_steps: int) -> dict[str, Any]:
    """Held-out losses and bans of one run; without an attack it goes to the last step."""
    from peer.sim import SimulatedSwarm
    from peer.sim.swarm import EVALUATED_EVERY

    stage = stage_of(attack) if attack else 1
    attacks = {(stage, index): f"{attack}@{from_step}" for index in range(1, 1 + number)}
    tiny = replace(tiny_run(1.0, total_steps=most_steps), num_replicas=replicas, microbatches_per_step=2 * replicas)
    swarm = SimulatedSwarm(tiny, attacks=attacks, seed=seed)
    outcome = swarm.run(EVALUATED_EVERY)
    while outcome.steps < most_steps and not _is_over(outcome.bans, number, outcome.steps):
        outcome = swarm.run(EVALUATED_EVERY)
    bans = [ban for ban in outcome.bans if (ban.stage, ban.index) in attacks]
    return {
        "banned": [int(ban.version) for ban in bans],
        "others_banned": len(outcome.bans) - len(bans) + len(outcome.quarantined),
        "held_out": dict(outcome.held_out),
        "lost_microbatches": outcome.lost_microbatches,
        "audits": asdict(outcome.audits),
    }


def _is_over(bans: Sequence[Any], number: int, steps: int) -> bool:
    return number > 0 and len(bans) >= number and steps >= max(int(ban.version) for ban in bans) + AFTER


def beside(row: Mapping[str, Any], calm: Mapping[str, Any], from_step: int) -> dict[str, Any]:
    """The losses of a run with liars, and as shares of those of the run without, `calm`, at the same versions."""
    held_out = {int(version): loss for version, loss in row["held_out"].items()}
    over = {version: loss / calm["held_out"][str(version)] for version, loss in held_out.items()}
    last = max(row["banned"], default=MOST_STEPS)
    after = {version: loss for version, loss in held_out.items() if version > from_step}
    return {
        "last_ban": last if row["banned"] else None,
        "loss_before": held_out[from_step],
        "largest_after_over_before": max(after.values()) / held_out[from_step],
        "largest_over_calm": max(over[version] for version in after if version <= last + 10),
        "over_calm_100_after": next((over[version] for version in sorted(after) if version >= last + AFTER), None),
    }


def summary(case: Liars, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst of the seeds."""
    ends = [row["over_calm_100_after"] for row in rows]
    seen = [end for end in ends if end is not None]
    largest = [row["largest_after_over_before"] for row in rows]
    over = [row["largest_over_calm"] for row in rows]
    lasts = [row["last_ban"] or MOST_STEPS for row in rows]
    return {
        **asdict(case),
        "seeds": len(rows),
        "banned": [len(row["banned"]) for row in rows],
        "others_banned": sum(row["others_banned"] for row in rows),
        "last_ban": [statistics.median(lasts), max(lasts)],
        "largest_after_over_before": [statistics.median(largest), max(largest)],
        "largest_over_calm": [statistics.median(over), max(over)],
        "over_calm_100_after": [statistics.median(seen), max(seen)] if seen else None,
        "runs_without_100_after": len(ends) - len(seen),
        "holds": max(largest) <= LARGEST_AFTER and len(seen) == len(ends) and max(seen) <= 1 + WITHIN,
        "rows": [dict(row) for row in rows],
    }


@click.command()
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Keep pieces here, and go on from them.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Seconds after which no new piece is begun.")
@click.option("--case", "named", multiple=True, type=click.Choice([str(case) for case in CASES]), help="[default: all]")
@click.option("--seeds", type=click.IntRange(min=1), default=SEEDS, show_default=True)
@click.option("--smoke", is_flag=True, help="One case, for a few steps: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    keep: Path | None, stop_after: float | None, named: tuple[str, ...], seeds: int, smoke: bool, as_json: bool
) -> None:
    """Losses while several lie at once."""
    bound_pools(1)  # before torch is first imported
    from_step, most_steps = FROM_STEP, MOST_STEPS
    cases, made = [case for case in CASES if not named or str(case) in named], []
    if smoke:
        cases, seeds, from_step, most_steps = [SMOKE_CASE], 1, 0, SMOKE_STEPS
    with KeptPieces(keep, total=2 * len(cases) * seeds, stop_after_s=stop_after) as pieces:
        for case in cases:
            rows = []
            for seed in range(seeds):
                length = (case.replicas, seed, from_step, most_steps)
                calm = pieces.get(f"nobody of {case.replicas}/{seed}", partial(run, None, 0, *length))
                row = pieces.get(f"{case}/{seed}", partial(run, case.attack, case.number, *length))
                rows.append(row | beside(row, calm, from_step))
            made.append(summary(case, rows))
    if as_json:
        click.echo(json.dumps({"goals": [LARGEST_AFTER, WITHIN], "cases": made}))
        return
    for row in made:
        ends = row["over_calm_100_after"]
        click.echo(
            f"{row['attack']} {row['number']} of {row['replicas']}: banned {row['banned']}, last ban at "
            f"{row['last_ban'][0]:.0f} (worst {row['last_ban'][1]}); largest loss over that before "
            f"{row['largest_after_over_before'][0]:.3f} ({row['largest_after_over_before'][1]:.3f}), over the calm "
            f"run {row['largest_over_calm'][0]:.3f} ({row['largest_over_calm'][1]:.3f}), 100 after the last ban "
            + (f"{ends[0]:.3f} ({ends[1]:.3f})" if ends else "-")
        )


if __name__ == "__main__":
    main()
