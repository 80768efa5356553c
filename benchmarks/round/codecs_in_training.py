"""Codecs judged by what they are for: held-out loss against tokens and bytes, for each of them.

    python -m benchmarks.round.codecs_in_training [--json]

A small Llama is cut into a stage for each layer, with the same number of replicas in each, and trained in one process
with the peers' own code (`benchmarks.fleet.simulated_run`): equal data, order, weights and schedule, one thing changed.
First the codec of averaging, with activations in fp32; then that of activations and of their gradients, averaging in
fp32.

The learning rate is one at which runs that differ by bf16's rounding alone end within 0.1 % of each other; at twice the
rate they end up to 0.6 % apart and the codecs' differences change sign from seed to seed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.single_process import WholeRun, load_run
from swarm.core.settings import CodecSettings
from swarm.local.compute_pools import bound_pools

BARS = {"bf16": 1.01, "int8": 1.01, "int4": 1.03, "int4h": 1.03, "topk": 1.03}
"""Held-out loss over fp32's, in the mean over the seeds: fixed before anything was measured."""

EXACT = CodecSettings(activations="fp32", activation_gradients="fp32", averaging="fp32")
CASES: dict[str, CodecSettings] = {
    "exact": EXACT,
    "averaging bf16": replace(EXACT, averaging="bf16"),
    "averaging int8": replace(EXACT, averaging="int8"),
    "averaging int4": replace(EXACT, averaging="int4"),
    "averaging topk": replace(EXACT, averaging="topk"),
    "activations bf16": replace(EXACT, activations="bf16", activation_gradients="bf16"),
    "activations int8": replace(EXACT, activations="int8", activation_gradients="int8"),
    "activations int4": replace(EXACT, activations="int4", activation_gradients="int4"),
    "activations int4h": replace(EXACT, activations="int4h", activation_gradients="int4h"),
}

MANIFEST = """\
[model]
stages = 4
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = {width}
intermediate_size = {mlp}
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
[data]
sequence_length = 64
chunk_tokens = 130
seed = {seed}
[batch]
microbatch_size = 2
target_tokens = {batch_tokens}
[optimizer]
learning_rate = 1.5e-3
warmup_steps = 1
"""


SMOKE_TOKENS = 256
OUTLIER_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run."""

    case: str
    seed: int
    steps: int
    held_out_loss: float
    """Nats a byte, measured through the run's own activation codec, as a host does."""
    round_bytes: float
    """That a replica of the largest stage uploads in a step's round."""
    activation_bytes: float
    """Of a step: all boundaries between stages, there and back."""
    seconds: float


def train(run: WholeRun, case: str, *, seed: int, steps: int, replicas: int, evaluate_tokens: int) -> Outcome:
    """`steps` steps with the case's codecs."""
    from benchmarks.fleet.simulated_run import SimulatedRun, run_steps

    optimizer = replace(run.settings.optimizer, total_steps=steps, warmup_steps=round(0.1 * steps))
    settings = replace(run.settings, optimizer=optimizer, codecs=CASES[case])
    simulated = SimulatedRun(run, settings, replicas)
    started = time.monotonic()
    run_steps(simulated, steps)
    activation_bytes = simulated.activation_bytes / steps  # before evaluation sends more
    return Outcome(
        case=case,
        seed=seed,
        steps=steps,
        held_out_loss=simulated.held_out_loss(evaluate_tokens),
        round_bytes=simulated.upload_bytes / steps,
        activation_bytes=activation_bytes,
        seconds=time.monotonic() - started,
    )


def with_outliers(run: WholeRun, num_outliers: int) -> WholeRun:
    """The run, from an embedding of which so many dimensions, evenly spread, are ten times as large: so they are in
    every hop, as in checkpoints."""
    from swarm.model.stack import stage_layout

    if num_outliers == 0:
        return run
    first = run.weights[0].copy()
    (embedding_VD,) = (
        view for name, view in stage_layout(run.settings.model, 0).views(first).items() if "embed_tokens" in name
    )
    embedding_VD[:, :: embedding_VD.shape[1] // num_outliers] *= OUTLIER_FACTOR
    return replace(run, weights=[first, *run.weights[1:]])


def table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Every case against the exact one of the same seeds, and whether its bar holds."""
    exact = {outcome.seed: outcome.held_out_loss for outcome in outcomes if outcome.case == "exact"}
    rows: list[dict[str, Any]] = []
    for case in [case for case in CASES if any(outcome.case == case for outcome in outcomes)]:
        found = sorted((outcome for outcome in outcomes if outcome.case == case), key=lambda outcome: outcome.seed)
        ratios = [outcome.held_out_loss / exact[outcome.seed] for outcome in found]
        bar = BARS.get(case.split()[-1])
        rows.append(
            {
                "case": case,
                "held_out_loss": statistics.mean(outcome.held_out_loss for outcome in found),
                "held_out_losses": [outcome.held_out_loss for outcome in found],
                "over_exact": statistics.mean(ratios),
                "over_exact_by_seed": ratios,
                "round_bytes": found[0].round_bytes,
                "activation_bytes": found[0].activation_bytes,
                "bar": bar,
                "holds": bar is None or statistics.mean(ratios) <= bar,
            }
        )
    return {"rows": rows, "holds": all(row["holds"] for row in rows)}


def _show(found: dict[str, Any]) -> None:
    click.echo("| codecs | held-out loss | over exact | by seed | bar | round, bytes up | activations, bytes |")
    click.echo("|---" * 7 + "|")
    for row in found["rows"]:
        seeds = ", ".join(f"{ratio - 1:+.2%}" for ratio in row["over_exact_by_seed"])
        bar = "" if row["bar"] is None else f"{row['bar'] - 1:+.0%} {'holds' if row['holds'] else 'missed'}"
        click.echo(
            f"| {row['case']} | {row['held_out_loss']:.4f} | {row['over_exact'] - 1:+.2%} | {seeds} | {bar} "
            f"| {row['round_bytes']:,.0f} | {row['activation_bytes']:,.0f} |"
        )


@click.command()
@click.option("--tokens", type=click.IntRange(min=512), default=153_600, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True, help="In each stage.")
@click.option("--batch-tokens", type=click.IntRange(min=128), default=512, show_default=True, help="In a step.")
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=32768, show_default=True)
@click.option("--width", type=click.IntRange(min=16), default=64, show_default=True)
@click.option(
    "--outliers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Dimensions that begin ten times as large.",
)
@click.option("--cases", default=",".join(CASES), help="With commas, 'exact' among them. Default: all.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--smoke", is_flag=True, help="One small step of each: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    tokens: int,
    seeds: int,
    replicas: int,
    batch_tokens: int,
    evaluate_tokens: int,
    width: int,
    outliers: int,
    cases: str,
    threads: int,
    smoke: bool,
    as_json: bool,
) -> None:
    """Held-out loss and bytes of a run under every codec."""
    bound_pools(threads)  # before torch is first imported
    if smoke:
        tokens, seeds, replicas, batch_tokens, evaluate_tokens = SMOKE_TOKENS, 1, 2, SMOKE_TOKENS, SMOKE_TOKENS
    steps, chosen = max(1, tokens // batch_tokens), cases.split(",")
    if "exact" not in chosen or not set(chosen) <= set(CASES):
        raise click.BadParameter(f"--cases takes exact and of {', '.join(CASES)}")
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(seeds):
            manifest = Path(scratch) / "run.toml"
            sizes = {"width": width, "mlp": width * 5 // 2}
            manifest.write_text(MANIFEST.format(seed=seed, batch_tokens=batch_tokens, **sizes))
            run = with_outliers(load_run(manifest_path=manifest, run_dir=None, scratch=Path(scratch)), outliers)
            for case in chosen:
                outcome = train(run, case, seed=seed, steps=steps, replicas=replicas, evaluate_tokens=evaluate_tokens)
                outcomes.append(outcome)
                left_s = (time.monotonic() - begun) / len(outcomes) * (seeds * len(chosen) - len(outcomes))
                click.echo(f"{json.dumps(asdict(outcome))} about {left_s / 60:.1f} min left", err=True)
    found = table(outcomes)
    if as_json:
        click.echo(json.dumps({**found, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        _show(found)


if __name__ == "__main__":
    main()
