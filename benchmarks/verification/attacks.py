"""Aggregation rules under attack: held-out loss with some of a stage's contributors lying.

    python -m benchmarks.verification.attacks [--json]

The demo's model, batch and schedule, two stages of 8 contributors each, trained in one process with the peers' own code
(`benchmarks.fleet.simulated_run`), gradients in int8. The last 2 or 3 contributors of every stage lie in every step;
they know what the honest ones send. Votes are honest: what is attacked is the tensors.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.single_process import WholeRun, load_run
from swarm.local.compute_pools import bound_pools

if TYPE_CHECKING:
    from benchmarks.fleet.simulated_run import Tamper

Floats = NDArray[np.float32]

BATCH_SEQUENCES = 16
SEQUENCE_LENGTH, SMOKE_SEQUENCE_LENGTH = 128, 16
NUM_CONTRIBUTORS = 8
NUM_LIARS = (2, 3)
RULES = ("mean", "centered_clip", "trimmed_mean", "median")

# Strengths: fixed before anything was measured.
FLIP_FACTOR = 1000.0
"""Sign flip x1000: each liar's own mean gradient times minus this. x1: times minus one."""
ALIE_DEVIATIONS = 1.5
"""A Little Is Enough (Baruch, Baruch, Goldberg, 2019): the honest mean less so many of their standard deviations, in
every coordinate."""
INNER_PRODUCT_SHARE = 0.5
"""Inner-product manipulation (Xie, Koyejo, Gupta, "Fall of Empires", 2019): minus this times the honest mean."""

ATTACKS = ("sign flip x1000", "sign flip x1", "ALIE", "inner product")
NO_ATTACK = "none"
BARELY_HARMED = 1.05
"""Held-out loss over that of the mean without liars: at most this is called resisting."""

MANIFEST = """\
[model]
preset = "tiny"
stages = 2
[data]
sequence_length = {sequence_length}
chunk_tokens = {chunk_tokens}
seed = {seed}
[batch]
microbatch_size = 2
target_tokens = {batch_tokens}
[optimizer]
learning_rate = 3e-3
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run."""

    rule: str
    attack: str
    num_liars: int
    seed: int
    steps: int
    held_out_loss: float | None
    """Nats a byte; None if the run diverged to values that are not finite."""
    seconds: float


def lies(attack: str, honest: Sequence[Floats], own: Sequence[Floats]) -> list[Floats]:
    """What liars send in place of their own mean gradients, knowing the honest ones."""
    if attack == "sign flip x1000":
        return [np.float32(-FLIP_FACTOR) * mean for mean in own]
    if attack == "sign flip x1":
        return [-mean for mean in own]
    rows_NV = np.stack(honest)
    middle = rows_NV.mean(axis=0, dtype=np.float32)
    if attack == "ALIE":
        return [middle - np.float32(ALIE_DEVIATIONS) * rows_NV.std(axis=0, dtype=np.float32)] * len(own)
    assert attack == "inner product", attack
    return [np.float32(-INNER_PRODUCT_SHARE) * middle] * len(own)


def _tamper(attack: str, num_liars: int) -> "Tamper | None":
    if attack == NO_ATTACK:
        return None

    def tamper(stage: int, step: int, means: list[Floats]) -> list[Floats]:
        honest, own = means[:-num_liars], means[-num_liars:]
        return [*honest, *lies(attack, honest, own)]

    return tamper


def train(
    run: WholeRun, rule: str, attack: str, num_liars: int, *, seed: int, steps: int, evaluate_tokens: int
) -> Outcome:
    """`steps` steps under that rule, with those liars in every stage."""
    from benchmarks.fleet.simulated_run import SimulatedRun, run_steps

    optimizer = replace(run.settings.optimizer, total_steps=steps, warmup_steps=round(0.1 * steps))
    averaging: Any = replace(run.settings.averaging, rule=rule)  # type: ignore[arg-type]
    settings = replace(run.settings, optimizer=optimizer, averaging=averaging)
    simulated = SimulatedRun(run, settings, NUM_CONTRIBUTORS, tamper=_tamper(attack, num_liars))
    started = time.monotonic()
    loss = simulated.held_out_loss(evaluate_tokens) if math.isfinite(run_steps(simulated, steps)) else math.inf
    return Outcome(
        rule=rule,
        attack=attack,
        num_liars=num_liars,
        seed=seed,
        steps=steps,
        held_out_loss=loss if math.isfinite(loss) else None,
        seconds=time.monotonic() - started,
    )


Case = tuple[str, str, int]
"""Rule, attack, liars."""


def cases(num_liars: Sequence[int]) -> list[Case]:
    """Of every run of one seed."""
    attacked = [(rule, attack, liars) for liars in num_liars for attack in ATTACKS for rule in RULES]
    return [(rule, NO_ATTACK, 0) for rule in RULES] + attacked


def table(outcomes: Sequence[Outcome], chosen: Sequence[Case]) -> dict[str, Any]:
    """Losses by attack and rule, and over the mean's without liars."""
    losses: dict[Case, float] = {}
    for rule, attack, liars in chosen:
        found = [
            math.inf if outcome.held_out_loss is None else outcome.held_out_loss
            for outcome in outcomes
            if (outcome.rule, outcome.attack, outcome.num_liars) == (rule, attack, liars)
        ]
        losses[rule, attack, liars] = statistics.mean(found)
    calm = losses["mean", NO_ATTACK, 0]
    rows = [
        {
            "rule": rule,
            "attack": attack,
            "num_liars": liars,
            "held_out_loss": loss if math.isfinite(loss) else None,
            "over_calm": loss / calm if math.isfinite(loss) else None,
            "resists": loss <= BARELY_HARMED * calm,
        }
        for (rule, attack, liars), loss in losses.items()
    ]
    return {"rows": rows, "calm_loss": calm}


def _show(found: dict[str, Any]) -> None:
    click.echo("| liars of 8 | attack | " + " | ".join(RULES) + " |")
    click.echo("|---" * (len(RULES) + 2) + "|")
    by_case: dict[tuple[int, str], dict[str, Any]] = {}
    for row in found["rows"]:
        by_case.setdefault((row["num_liars"], row["attack"]), {})[row["rule"]] = row
    for (liars, attack), rules in by_case.items():
        cells = [
            "diverged"
            if rules[rule]["over_calm"] is None
            else f"{rules[rule]['held_out_loss']:.3f} ({rules[rule]['over_calm'] - 1:+.1%})"
            for rule in RULES
        ]
        click.echo(f"| {liars} | {attack} | " + " | ".join(cells) + " |")


@click.command()
@click.option("--tokens", type=click.IntRange(min=2048), default=122_880, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=16384, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--smoke", is_flag=True, help="One small step of each: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(tokens: int, seeds: int, evaluate_tokens: int, threads: int, smoke: bool, as_json: bool) -> None:
    """Held-out loss of the demo's model under every rule and attack."""
    bound_pools(threads)  # before torch is first imported
    sequence_length, chosen = SEQUENCE_LENGTH, cases(NUM_LIARS)
    if smoke:
        chosen = cases(NUM_LIARS[:1])
        tokens, seeds, sequence_length, evaluate_tokens = 0, 1, SMOKE_SEQUENCE_LENGTH, 2 * SMOKE_SEQUENCE_LENGTH
    shape = {
        "sequence_length": sequence_length,
        "chunk_tokens": 2 * (sequence_length + 1),
        "batch_tokens": BATCH_SEQUENCES * sequence_length,
    }
    steps = max(1, tokens // shape["batch_tokens"])
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(seeds):
            manifest = Path(scratch) / "run.toml"
            manifest.write_text(MANIFEST.format(seed=seed, **shape))
            run = load_run(manifest_path=manifest, run_dir=None, scratch=Path(scratch))
            for rule, attack, liars in chosen:
                outcome = train(run, rule, attack, liars, seed=seed, steps=steps, evaluate_tokens=evaluate_tokens)
                outcomes.append(outcome)
                left_s = (time.monotonic() - begun) / len(outcomes) * (seeds * len(chosen) - len(outcomes))
                click.echo(f"{json.dumps(asdict(outcome))} about {left_s / 60:.1f} min left", err=True)
    found = table(outcomes, chosen)
    if as_json:
        click.echo(json.dumps({**found, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        _show(found)


if __name__ == "__main__":
    main()
