"""Models whose hops lie in a subspace against one whose hops do not: loss at equal tokens, bytes, and time on a line.

    python -m benchmarks.subspace --json

A small Llama is cut into a stage for each layer and trained in one process with the peers' own code
(`benchmarks.fleet.simulated_run`): equal data, order, batch and schedule. Hops go in int8, or in bf16 where so few
values take less so: int8 has scales and keeps the largest few aside. The rate stays where it is after the warm-up, so
that a curve's points are as good as shorter runs. The reference loss is what the ordinary model has after a third of
its steps; a share's steps to it are read off its own curve. Its time to it is reckoned, not measured: its tokens over
the plan's tokens a second (`swarm.core.plan`) on an emulated line.

Every training run that ended is a line of `--out`, and is not made again: a benchmark that was cut goes on where it
was.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.round.codecs_in_training import EXACT
from benchmarks.single_process import WholeRun, load_run
from swarm.core.plan import Assumptions, activation_bytes_per_token, plan_run, targets_bytes_per_token
from swarm.core.settings import RunSettings
from swarm.local.compute_pools import bound_pools

if TYPE_CHECKING:
    from benchmarks.fleet.simulated_run import SimulatedRun

SHARES = (1, 4, 8, 16, 32)
"""By so many a hop has fewer values."""
LINES_MBIT = (20.0, 100.0)
REFERENCE_AFTER = 1 / 3
"""Of the ordinary model's steps."""
MEASURED = 24
"""Held-out losses in a run's curve."""
SAME = 1e-5
"""Relative difference of the exported model's held-out loss that is rounding."""

MANIFEST = """\
[model]
stages = {layers}
subspace = {subspace}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = {width}
intermediate_size = {mlp}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = {tokens}
[data]
sequence_length = {tokens}
chunk_tokens = 1040
seed = {seed}
[codecs]
averaging = "fp32"
activations = "{wire}"
activation_gradients = "{wire}"
[batch]
microbatch_size = 8
target_tokens = {batch_tokens}
[optimizer]
learning_rate = {rate}
warmup_steps = 1
schedule = "wsd"
"""
REAL = """\
[model]
stages = 8
subspace = {subspace}
[model.config]
model_type = "llama"
vocab_size = 32000
hidden_size = 2048
intermediate_size = 5632
num_hidden_layers = 24
num_attention_heads = 16
num_key_value_heads = 4
max_position_embeddings = 1024
[data]
sequence_length = 1024
[batch]
microbatch_size = 1
target_tokens = 1048576
"""
"""What a share is worth at a size for which one would want it: 1.2 billion parameters in eight stages, a peer in
each."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run."""

    subspace: int
    seed: int
    width: int
    steps: int
    batch_tokens: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    cell: Cell
    curve: tuple[tuple[int, float], ...]
    """(step, held-out loss in nats a byte, through the run's codec); the last is at the end."""
    bytes_a_token: float
    """Over one boundary, there and back, with what goes with an activation."""
    plain_loss: float
    """Held out, with nothing encoded."""
    exported_loss: float
    """Of the ordinary model that is exported, likewise."""
    cpu_s: float


def read_runs(path: Path) -> dict[Cell, Trained]:
    """Of a file that may not be there yet."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        said = json.loads(line)
        cell = Cell(**said.pop("cell"))
        curve = tuple((int(step), float(loss)) for step, loss in said.pop("curve"))
        found[cell] = Trained(cell=cell, curve=curve, **said)
    return found


def train(cell: Cell, scratch: Path, *, evaluate_tokens: int) -> Trained:
    """From the seed's first weights."""
    from benchmarks.fleet.simulated_run import SimulatedRun

    started = time.process_time()
    settings_path = scratch / "run.toml"
    settings_path.write_text(manifest_of(cell))
    run = load_run(manifest_path=settings_path, run_dir=None, scratch=scratch)
    warmup_steps = max(1, cell.steps // 20)
    optimizer = replace(run.settings.optimizer, total_steps=cell.steps, warmup_steps=warmup_steps)
    settings = replace(run.settings, optimizer=optimizer)
    simulated = SimulatedRun(run, settings, 1)
    curve: list[tuple[int, float]] = []
    activation_bytes = 0
    looks = {round(cell.steps * number / MEASURED) for number in range(1, MEASURED + 1)}
    for number in range(cell.steps):
        before = simulated.activation_bytes
        simulated.step(number)
        activation_bytes += simulated.activation_bytes - before  # and not those of evaluating
        if number + 1 in looks:
            curve.append((number + 1, simulated.held_out_loss(evaluate_tokens)))
    carried = cell.steps * settings.step_tokens(1) * (settings.model.num_stages - 1)
    plain, exported = _plain_losses(run, settings, simulated, evaluate_tokens)
    return Trained(
        cell=cell,
        curve=tuple(curve),
        bytes_a_token=activation_bytes / carried + targets_bytes_per_token(settings),
        plain_loss=plain,
        exported_loss=exported,
        cpu_s=time.process_time() - started,
    )


def manifest_of(cell: Cell) -> str:
    """The run's."""
    return MANIFEST.format(
        subspace=cell.subspace,
        layers=4,
        width=cell.width,
        mlp=cell.width * 5 // 2,
        tokens=64,
        seed=cell.seed,
        batch_tokens=cell.batch_tokens,
        rate=cell.rate,
        wire=min(("int8", "bf16"), key=lambda codec: activation_bytes_per_token(codec, cell.width // cell.subspace)),
    )


def _plain_losses(
    run: WholeRun, settings: RunSettings, simulated: "SimulatedRun", evaluate_tokens: int
) -> tuple[float, float]:
    """Of the trained model, and of what is exported of it."""
    from benchmarks.fleet.simulated_run import SimulatedRun
    from swarm.checkpoint.huggingface import exported_weights

    trained = [replicas[0].state.weights for replicas in simulated.stages]
    whole, parts = exported_weights(settings.model, lambda stage, layout: trained[stage])
    losses = []
    for model, weights in ((settings.model, trained), (whole, [read() for _, read in parts])):
        plain = replace(settings, model=model, codecs=EXACT)
        losses.append(SimulatedRun(replace(run, weights=weights), plain, 1).held_out_loss(evaluate_tokens))
    return losses[0], losses[1]


# -- what is read off -------------------------------------------------------------------------------------


def steps_to(loss: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Where the curve first comes down to it, straight between its points; None if it does not."""
    if curve[0][1] <= loss:
        return float(curve[0][0])
    for (early, high), (late, low) in pairwise(curve):
        if low <= loss:
            return early + (late - early) * (high - loss) / (high - low)
    return None


def loss_at(steps: float, curve: Sequence[tuple[int, float]]) -> float:
    """Straight between its points; before the first the first's."""
    for (early, high), (late, low) in pairwise(curve):
        if steps <= late:
            return high + (low - high) * max(0.0, (steps - early) / (late - early))
    return curve[-1][1]


def reference_of(curve: Sequence[tuple[int, float]]) -> float:
    """The ordinary model's loss after a third of its steps."""
    at = REFERENCE_AFTER * curve[-1][0]
    return min(curve, key=lambda point: abs(point[0] - at))[1]


def tokens_per_s(manifest: str, folder: Path, line_mbit: float, *, tflops: float, peers: int) -> float:
    """The plan's, where each peer has such a line both ways."""
    settings, sizes, width = _planned(manifest, folder)
    links = Assumptions(
        uplink_mbit=line_mbit, downlink_mbit=line_mbit, peers_per_stage=peers, tflops=tflops, session_hours=24.0
    )
    return plan_run(settings, sizes, width, links).tokens_per_s


@cache
def _planned(manifest: str, folder: Path) -> tuple[RunSettings, Sequence[int], int]:
    """The run, parameters of its stages, and its width."""
    from swarm.manifest.file import assumed_data, freeze, parse_manifest
    from swarm.manifest.model import hidden_size, stage_num_parameters

    parsed = parse_manifest(manifest, folder / "run.toml")
    settings = freeze(parsed, assumed_data(parsed), ())
    return settings, stage_num_parameters(settings.model), hidden_size(settings.model)


def table(runs: Mapping[Cell, Trained], *, folder: Path, tflops: float) -> dict[str, dict[str, Any]]:
    """Of every share, over the seeds; each seed's own ordinary run is its reference."""
    by_share: dict[int, list[Trained]] = {share: [] for share in SHARES}
    for trained in runs.values():
        by_share[trained.cell.subspace].append(trained)
    references = {found.cell.seed: reference_of(found.curve) for found in by_share[1]}
    dense = {found.cell.seed: found for found in by_share[1]}
    rows: dict[str, dict[str, Any]] = {}
    for share, unordered in by_share.items():
        found = sorted((one for one in unordered if one.cell.seed in dense), key=lambda one: one.cell.seed)
        if not found:
            continue
        steps = [steps_to(references[one.cell.seed], one.curve) for one in found]
        plain = [steps_to(references[one.cell.seed], dense[one.cell.seed].curve) for one in found]
        times = [made / of for made, of in zip(steps, plain, strict=True) if made is not None and of is not None]
        more = statistics.mean(times) if len(times) == len(found) else None
        speedups = _speedups(found[0].cell, share, more, folder, tflops)
        rows["D" if share == 1 else f"D/{share}"] = {
            "held_out": [round(one.curve[-1][1], 4) for one in found],
            "bytes_a_token": found[0].bytes_a_token,
            "steps_to_reference": steps,
            "steps_over_dense": more,
            "export_equal": all(abs(one.exported_loss / one.plain_loss - 1) <= SAME for one in found),
            "dense_time_over": speedups,
            "dense_at_equal_time": {
                f"{line:g} Mbit/s": statistics.mean(
                    loss_at(
                        one.cell.steps / speedups[f"trained, {line:g} Mbit/s"]["times_dense"],
                        dense[one.cell.seed].curve,
                    )
                    for one in found
                )
                for line in LINES_MBIT
            },
        }
    return rows


def _speedups(cell: Cell, share: int, more: float | None, folder: Path, tflops: float) -> dict[str, Any]:
    """(time to the reference of the ordinary model) / (this one's), on each line: of the model that was trained, with a
    batch that fills its pipeline, and of one of real size if it takes as many more steps."""
    small = [manifest_of(replace(cell, subspace=made, batch_tokens=1 << 20)) for made in (1, share)]
    real = [REAL.format(subspace=made) for made in (1, share)]
    found: dict[str, Any] = {}
    for line in LINES_MBIT:
        for name, pair, peers in (("trained", small, 1), ("1.2B", real, 1), ("1.2B, 4 peers a stage", real, 4)):
            plain, made = (tokens_per_s(text, folder, line, tflops=tflops, peers=peers) for text in pair)
            found[f"{name}, {line:g} Mbit/s"] = {
                "tokens_per_s": round(made, 1),
                "times_dense": made / plain,
                "ratio": None if more is None else round(made / plain / more, 2),
            }
    return found


@click.command()
@click.option("--shares", default=",".join(map(str, SHARES)), show_default=True, help="The values' divisors.")
@click.option("--seeds", default="1,2,3", show_default=True, help="With commas; of first weights and order of samples.")
@click.option("--width", type=click.IntRange(min=64), default=128, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=900, show_default=True)
@click.option("--batch-tokens", type=click.IntRange(min=512), default=1024, show_default=True)
@click.option("--rate", type=float, default=1.5e-3, show_default=True)
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--tflops", type=float, default=10.0, show_default=True, help="Of a peer, in what is reckoned.")
@click.option("--out", type=click.Path(path_type=Path), help="Where runs that ended are kept. Default: nowhere.")
@click.option("--smoke", is_flag=True, help="Two steps of two: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    shares: str,
    seeds: str,
    width: int,
    steps: int,
    batch_tokens: int,
    rate: float,
    evaluate_tokens: int,
    tflops: float,
    out: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Train each share and seed that is not there yet; print the table."""
    bound_pools(1)  # before torch is first imported
    if smoke:
        shares, seeds, width, steps, batch_tokens, evaluate_tokens, out = "1,8", "1", 64, 2, 512, 512, None
    cells = [
        Cell(subspace=int(share), seed=int(seed), width=width, steps=steps, batch_tokens=batch_tokens, rate=rate)
        for seed in seeds.split(",")
        for share in shares.split(",")
    ]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        kept = out or scratch / "runs.jsonl"
        found = read_runs(kept)
        for cell in cells:
            if cell in found:
                continue
            found[cell] = train(cell, scratch, evaluate_tokens=evaluate_tokens)
            line = json.dumps(asdict(found[cell]))
            with kept.open("a", encoding="utf-8") as lines:
                lines.write(line + "\n")
            click.echo(line, err=True)
        rows = table({cell: found[cell] for cell in cells}, folder=scratch, tflops=tflops)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for share, row in rows.items():
        click.echo(f"{share}: {row}")


if __name__ == "__main__":
    main()
