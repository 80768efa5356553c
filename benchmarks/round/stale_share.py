"""The cost of delayed updates: held-out loss against the share of a batch that is stale.

    python -m benchmarks.round.stale_share [--json]

With averaging.delay = 1 the microbatches that are begun while a round runs are computed on the version before. Here a
given share of every step's microbatches is, in one process, with a stage's own model and exact optimizer, so that
nothing but the share differs: equal data, order, weights and schedule. Extrapolation computes the stale ones on weights
moved on by the last update; NAdamW is another optimizer.

At equal seconds the synchronous run takes fewer steps. If a step's computing takes c seconds and its round r, a
synchronous step costs c + r and a delayed one max(c, r); the round covers r / c of the next step's computing, so a
stale share s means r = s * c, and N delayed steps take as long as N / (1 + s) synchronous ones, whose schedule is as
short. c is measured; r is not, it follows from s.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.single_process import WholeRun, joined, load_run
from swarm.core.ids import MicrobatchId
from swarm.local.compute_pools import bound_pools

Correction = Literal["none", "nadamw", "extrapolate"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
SHARES = (0.0, 0.25, 0.5, 1.0)
QUARTER = 0.25
"""The share that is judged."""
SMOKE_TOKENS = 512
BAR = 1.03
"""The best correction at a quarter stale against the synchronous run."""

MANIFEST = """\
[model]
preset = "{preset}"
stages = 1
[data]
sequence_length = 128
chunk_tokens = 516
seed = {seed}
[batch]
microbatch_size = 4
target_tokens = {batch_tokens}
[optimizer]
learning_rate = {learning_rate}
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run."""

    seed: int
    steps: int
    stale_share: float
    correction: Correction
    held_out_loss: float
    compute_s: float
    """Median CPU seconds of a step, all of it computing: its seconds where one thread has a core to itself."""


def train(
    run: WholeRun,
    *,
    steps: int,
    stale_share: float,
    correction: Correction,
    sync_steps: int,
    seed: int,
    evaluate_tokens: int,
) -> Outcome:
    """`steps` steps in which the first `stale_share` of the microbatches is one version behind."""
    import torch

    from benchmarks.whole_model import host_windows
    from swarm.data.batches import Batch, BatchReader
    from swarm.model.stage import StageModel, Weights
    from swarm.optim.exact import ExactOptimizer, extrapolated
    from swarm.optim.gradient_sum import GradientSum

    optimizer_settings = replace(
        run.settings.optimizer, total_steps=steps, warmup_steps=round(0.1 * steps), correction=correction
    )
    settings = replace(run.settings, optimizer=optimizer_settings)
    model = StageModel(settings.model, 0)
    layout = model.layout
    optimizer = ExactOptimizer.of(optimizer_settings, layout)
    reader = BatchReader(settings, run.train)
    gradient = GradientSum(layout.num_values)

    def add(weights: Weights, batch: Batch) -> None:
        tokens_BL, targets_BL = (torch.from_numpy(array) for array in batch)
        _, num_tokens, saved = model.loss(weights, tokens_BL, targets_BL, keep=True)
        assert saved is not None
        model.loss_backward(saved, gradient.flat)
        gradient.add_tokens(num_tokens)

    flat: NDArray[np.float32] = run.weights[0]
    fresh = stale = model.weights(flat)
    ahead: Weights | None = None
    each = settings.microbatches_per_step
    num_stale = round(stale_share * each)
    seconds = []
    for step in range(steps):
        started = time.process_time()
        batches = [reader.batch(MicrobatchId(step * each + index)) for index in range(each)]
        late = num_stale if step >= sync_steps else 0
        gradient.zero()
        for weights, part in ((stale, batches[:late]), (fresh, batches[late:])):
            if part:
                add(weights, joined(part))
        new = np.empty_like(flat)
        optimizer.step(flat, gradient.take_mean(), step=step, clip_norm=optimizer_settings.max_norm, out=new)
        # The next step's stale microbatches see this step's version, moved on by the update that made it.
        stale = fresh if ahead is None else ahead
        if correction == "extrapolate":
            moved = np.empty_like(flat)
            extrapolated(new, flat, moved)
            ahead = model.weights(moved)
        flat, fresh = new, model.weights(new)
        seconds.append(time.process_time() - started)
    loss_sum, count = 0.0, 0
    for tokens_BL, targets_BL in host_windows(settings, run.held_out, evaluate_tokens=evaluate_tokens):
        found, num_tokens, _ = model.loss(fresh, torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL), keep=False)
        loss_sum, count = loss_sum + found, count + num_tokens
    return Outcome(
        seed=seed,
        steps=steps,
        stale_share=stale_share,
        correction=correction,
        held_out_loss=loss_sum / count,
        compute_s=statistics.median(seconds),
    )


def _steps_in_equal_time(steps: int, stale_share: float) -> int:
    """Synchronous steps in the time of `steps` delayed ones with this stale share."""
    return round(steps / (1.0 + stale_share))


def _by_correction(outcomes: Sequence[Outcome], *, steps: int, stale_share: float) -> dict[str, float]:
    """Mean held-out loss over the seeds."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.steps == steps and outcome.stale_share == stale_share:
            found.setdefault(outcome.correction, []).append(outcome.held_out_loss)
    return {correction: statistics.mean(losses) for correction, losses in found.items()}


def tables(outcomes: Sequence[Outcome], shares: Sequence[float], *, steps: int) -> dict[str, Any]:
    """Held-out losses by stale share, at equal tokens and at equal seconds.

    Delayed and synchronous runs are compared by the best each can do, with whichever optimizer.
    """
    compute_s = statistics.median(outcome.compute_s for outcome in outcomes)
    synchronous = min(_by_correction(outcomes, steps=steps, stale_share=0.0).values())
    rows: list[dict[str, Any]] = []
    for share in shares:
        losses = _by_correction(outcomes, steps=steps, stale_share=share)
        best = min(losses, key=lambda name: losses[name])
        fewer = _steps_in_equal_time(steps, share)
        rows.append(
            {
                "stale_share": share,
                "held_out_loss": losses,
                "best": best,
                "best_over_synchronous": losses[best] / synchronous,
                "round_s": share * compute_s,
                "seconds": steps * compute_s,
                "synchronous_steps_in_equal_seconds": fewer,
                "synchronous_in_equal_seconds": _by_correction(outcomes, steps=fewer, stale_share=0.0),
            }
        )
    quarter: float = next(row["best_over_synchronous"] for row in rows if row["stale_share"] == QUARTER)
    return {
        "rows": rows,
        "step_compute_s": compute_s,
        "quarter_stale_over_synchronous": quarter,
        "bar": BAR,
        "holds": quarter <= BAR,
    }


def _show(found: dict[str, Any]) -> None:
    def losses(row: dict[str, Any], of: str) -> str:
        return " | ".join(f"{row[of][name]:.4f}" if name in row[of] else "" for name in CORRECTIONS)

    click.echo("Equal tokens:")
    click.echo("| stale share | " + " | ".join(CORRECTIONS) + " | best / synchronous |")
    click.echo("|---" * (len(CORRECTIONS) + 2) + "|")
    for row in found["rows"]:
        share, best = row["stale_share"], f"{row['best_over_synchronous']:.4f} ({row['best']})"
        click.echo(f"| {share:.2f} | {losses(row, 'held_out_loss')} | {best} |")
    click.echo("Synchronous, in the seconds of the delayed run with this stale share:")
    click.echo("| stale share | steps | " + " | ".join(CORRECTIONS[:2]) + " | delayed, best |")
    click.echo("|---" * 5 + "|")
    for row in found["rows"]:
        synchronous = row["synchronous_in_equal_seconds"]
        click.echo(
            f"| {row['stale_share']:.2f} | {row['synchronous_steps_in_equal_seconds']} | {synchronous['none']:.4f} "
            f"| {synchronous['nadamw']:.4f} | {row['held_out_loss'][row['best']]:.4f} |"
        )
    verdict = "holds" if found["holds"] else "does not hold"
    click.echo(f"a quarter stale within {BAR - 1:.0%} of synchronous: {verdict}")
    click.echo(f"computing takes {found['step_compute_s']:.3f} s a step")


@click.command()
@click.option("--tokens", type=click.IntRange(min=1), default=200_000, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--preset", default="tiny", show_default=True)
@click.option("--batch-tokens", type=click.IntRange(min=2048), default=2048, show_default=True, help="In a step.")
@click.option("--learning-rate", default=2e-3, show_default=True)
@click.option(
    "--sync-steps", type=click.IntRange(min=0), default=20, show_default=True, help="At the start: none stale."
)
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=32768, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--quarter", is_flag=True, help="Only nothing stale, and a quarter.")
@click.option("--smoke", is_flag=True, help="Two small steps of each: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    tokens: int,
    seeds: int,
    preset: str,
    batch_tokens: int,
    learning_rate: float,
    sync_steps: int,
    evaluate_tokens: int,
    threads: int,
    quarter: bool,
    smoke: bool,
    as_json: bool,
) -> None:
    """Held-out loss against stale share and correction, at equal tokens and at equal seconds."""
    bound_pools(threads)  # before torch is first imported
    if smoke:
        seeds, tokens, batch_tokens, sync_steps, evaluate_tokens = 1, 2 * SMOKE_TOKENS, SMOKE_TOKENS, 0, SMOKE_TOKENS
    steps, shares = max(1, tokens // batch_tokens), (0.0, QUARTER) if quarter else SHARES
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(seeds):
            manifest = Path(scratch) / "run.toml"
            manifest.write_text(
                MANIFEST.format(preset=preset, seed=seed, batch_tokens=batch_tokens, learning_rate=learning_rate)
            )
            run = load_run(manifest_path=manifest, run_dir=None, scratch=Path(scratch))
            for share, correction, length in _plan(steps, shares):
                outcome = train(
                    run,
                    steps=length,
                    stale_share=share,
                    correction=correction,
                    sync_steps=sync_steps,
                    seed=seed,
                    evaluate_tokens=evaluate_tokens,
                )
                outcomes.append(outcome)
                click.echo(json.dumps(asdict(outcome)), err=True)
    found = tables(outcomes, shares, steps=steps)
    if as_json:
        click.echo(json.dumps({**found, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        _show(found)


def _plan(steps: int, shares: Sequence[float]) -> list[tuple[float, Correction, int]]:
    """Stale share, correction and steps of every run of one seed."""
    delayed: list[tuple[float, Correction, int]] = [
        (share, correction, steps)
        for share in shares
        for correction in CORRECTIONS
        if share or correction != "extrapolate"  # with nothing stale, nothing is extrapolated
    ]
    shorter: list[tuple[float, Correction, int]] = [
        (0.0, correction, _steps_in_equal_time(steps, share))
        for share in shares
        if share
        for correction in CORRECTIONS[:2]
    ]
    return delayed + shorter


if __name__ == "__main__":
    main()
