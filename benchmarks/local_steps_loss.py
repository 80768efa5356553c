"""Windows of local steps against synchronous steps and one member alone: held-out loss at equal tokens.

    python -m benchmarks.local_steps_loss --json

Every training run that ended is a line of `--out`, and is not made again: a benchmark that was cut goes on where it
was. Of several rates and batches the table takes the best.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from time import process_time
from typing import Any

import click

from benchmarks.single_process import WholeRun, load_run
from benchmarks.windows.method import Method, parse_method
from swarm.local.compute_pools import bound_pools

ALONE = "alone"
SYNCHRONOUS = "synchronous"
DEFAULT_METHODS = (
    ALONE,
    SYNCHRONOUS,
    "H10-int2",
    "H30-int2",
    "H10-int4",
)
TUNED_RATES = {ALONE: 2e-3, SYNCHRONOUS: 4e-3}
"""The best of 1e-3, 2e-3, 4e-3 and 8e-3 that were tried with each at the default steps and batch."""
RATE_OF_WINDOWS = 3e-3

MANIFEST = """\
[model]
stages = 1
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 64
intermediate_size = 160
num_hidden_layers = {layers}
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
[data]
sequence_length = 64
chunk_tokens = 130
seed = {seed}
[batch]
microbatch_size = 2
target_tokens = 128
"""
MICROBATCH_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run."""

    method: str
    members: int
    seed: int
    rate: float
    """The schedule's highest."""
    steps: int
    """Inner steps of each member."""
    batch_tokens: int
    """Of a member's inner step."""
    layers: int = 2

    @property
    def member_tokens(self) -> int:
        return self.steps * self.batch_tokens


Losses = Mapping[Cell, float]


def read_losses(path: Path) -> dict[Cell, float]:
    """Of the cells in a file that may not be there yet."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        said = json.loads(line)
        found[Cell(**{field.name: said[field.name] for field in fields(Cell) if field.name in said})] = said["held_out"]
    return found


def train_cells(cells: Iterable[Cell], out: Path, scratch: Path, *, evaluate_tokens: int) -> None:
    """Those that are not in `out`; each is written there as it ends."""
    found = read_losses(out)
    runs: dict[tuple[int, int], WholeRun] = {}
    for cell in cells:
        if cell in found:
            continue
        if (cell.seed, cell.layers) not in runs:
            runs[cell.seed, cell.layers] = _load(cell, scratch)
        started = process_time()
        found[cell] = round(_held_out(cell, runs[cell.seed, cell.layers], evaluate_tokens), 5)
        line = json.dumps(asdict(cell) | {"held_out": found[cell], "cpu_s": round(process_time() - started, 1)})
        with out.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")
        click.echo(line, err=True)


def _load(cell: Cell, scratch: Path) -> WholeRun:
    manifest = scratch / "run.toml"
    manifest.write_text(MANIFEST.format(seed=cell.seed, layers=cell.layers))
    return load_run(manifest_path=manifest, run_dir=None, scratch=scratch)


def _held_out(cell: Cell, run: WholeRun, evaluate_tokens: int) -> float:
    from benchmarks.windows.training import train

    return train(
        run,
        _method_of(cell.method),
        members=cell.members,
        microbatches=cell.batch_tokens // MICROBATCH_TOKENS,
        steps=cell.steps,
        rate=cell.rate,
        evaluate_tokens=evaluate_tokens,
    )


def _method_of(name: str) -> Method:
    return parse_method(SYNCHRONOUS if name == ALONE else name)


def curve_alone(losses: Losses, seeds: Sequence[int], *, layers: int) -> list[tuple[int, float]]:
    """(tokens, mean loss over those seeds) of one member alone at its best rate and batch, by tokens."""
    found: dict[tuple[int, int, float], dict[int, float]] = defaultdict(dict)
    for cell, loss in losses.items():
        if cell.method == ALONE and cell.layers == layers:
            found[cell.member_tokens, cell.batch_tokens, cell.rate][cell.seed] = loss
    best: dict[int, float] = {}
    for (tokens, _, _), by_seed in found.items():
        if set(seeds) <= set(by_seed):
            mean = statistics.mean(by_seed[seed] for seed in seeds)
            best[tokens] = min(mean, best.get(tokens, mean))
    return sorted(best.items())


def tokens_alone(loss: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """With how many tokens one member alone comes down to that loss, which is linear in log tokens between its runs.

    The first two runs' line goes on before them; None for what lies beyond the longest run.
    """
    for (few, high), (many, low) in pairwise(curve):
        if loss >= low:
            return exp(log(few) + (high - loss) / (high - low) * (log(many) - log(few)))
    return None


def table(losses: Losses, *, steps: int, batch_tokens: int, layers: int) -> dict[str, dict[str, Any]]:
    """Every method and number of members of that size, at the best of its rates by the first seed that has several.

    `time_to_loss_over_one` is against one member alone on the same seeds; None where it was not run so long.
    """
    rates: dict[tuple[str, int], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for cell, loss in losses.items():
        if (cell.steps, cell.batch_tokens, cell.layers) == (steps, batch_tokens, layers):
            rates[cell.method, cell.members][cell.rate][cell.seed] = loss
    rows = {}
    for (name, members), by_rate in sorted(rates.items()):
        first = min(seed for by_seed in by_rate.values() for seed in by_seed)
        rate = min(by_rate, key=lambda rate: by_rate[rate].get(first, inf))
        seeds = sorted(by_rate[rate])
        held_out = [by_rate[rate][seed] for seed in seeds]
        member_tokens = steps * batch_tokens
        reached = tokens_alone(statistics.mean(held_out), curve_alone(losses, seeds, layers=layers))
        rows[f"{name} x{members}"] = {
            "held_out": held_out,
            "seeds": seeds,
            "rate": rate,
            "tokens": members * member_tokens,
            "bytes_up_per_parameter_per_window": 0.0 if name == ALONE else _method_of(name).bytes_up,
            "time_to_loss_over_one": None if reached is None else reached / member_tokens,
        }
    return rows


@click.command()
@click.option("--methods", default=",".join(DEFAULT_METHODS), show_default=True, help="By name, with commas.")
@click.option("--members", default="4", show_default=True, help="Numbers of them, with commas.")
@click.option("--seeds", default="1,2,3", show_default=True, help="With commas; of first weights and order of samples.")
@click.option("--rates", help="Highest learning rates, with commas. Default: one for each method that was found best.")
@click.option("--steps", type=click.IntRange(min=2), default=1200, show_default=True, help="Inner ones, of a member.")
@click.option("--batch-tokens", type=click.IntRange(min=128), default=512, show_default=True, help="Of an inner step.")
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--lengths", default="1,2,4", show_default=True, help="Of one member's runs alone, in those --steps.")
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=65536, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Where runs that ended are kept. Default: nowhere.")
@click.option("--smoke", is_flag=True, help="A few steps: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    methods: str,
    members: str,
    seeds: str,
    rates: str | None,
    steps: int,
    batch_tokens: int,
    layers: int,
    lengths: str,
    evaluate_tokens: int,
    out: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Train each method in one process; print held-out losses and times to them."""
    bound_pools(1)  # before torch is first imported
    if smoke:
        steps, batch_tokens, evaluate_tokens, out = 4, MICROBATCH_TOKENS, MICROBATCH_TOKENS, None
        members, seeds, lengths = "2", "1", "1,2"
    cells = [
        Cell(
            method=name,
            members=count,
            seed=seed,
            rate=rate,
            steps=steps * times,
            batch_tokens=batch_tokens,
            layers=layers,
        )
        for seed in _numbers(seeds)
        for name in methods.split(",")
        for count in ([1] if name == ALONE else _numbers(members))
        for times in (_numbers(lengths) if name == ALONE else [1])
        for rate in _rates(rates, name)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        kept = out or Path(scratch) / "cells.jsonl"
        train_cells(cells, kept, Path(scratch), evaluate_tokens=evaluate_tokens)
        rows = table(read_losses(kept), steps=steps, batch_tokens=batch_tokens, layers=layers)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        click.echo(f"{name}: {row}")


def _rates(listed: str | None, method: str) -> list[float]:
    if listed is None:
        return [TUNED_RATES.get(method, RATE_OF_WINDOWS)]
    return [float(rate) for rate in listed.split(",")]


def _numbers(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",")]


if __name__ == "__main__":
    main()
