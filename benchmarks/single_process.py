"""A run's model trained by one process: the loss and the speed that a swarm is compared with.

    python -m benchmarks.single_process --manifest run.toml --json
    python -m benchmarks.single_process --newest-demo --json

The same model, initial weights, data, batch and schedule as the run's; plain PyTorch (`benchmarks.whole_model`).
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from swarm.core.errors import SettingsError
from swarm.core.ids import MicrobatchId
from swarm.core.settings import RunSettings
from swarm.data.batches import Batch, BatchReader
from swarm.data.token_file import TokenFile
from swarm.local.compute_pools import bound_pools

EXISTING = click.Path(path_type=Path, exists=True)
DEMOS = Path("demo-out")
"""Where `make demo` puts them."""
SMOKE_TOKENS = 256


@dataclass(frozen=True)
class WholeRun:
    """What a run is made of, for one process."""

    settings: RunSettings
    weights: list[NDArray[np.float32]]
    """Initial, flat, of each stage."""
    train: TokenFile
    held_out: TokenFile


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured."""

    tokens: int
    steps: int
    threads: int
    skipped_steps: int
    """Steps at the start that are in no figure of speed."""
    microbatches_together: int
    """In one forward, where that was fastest; the next two figures are of it."""
    tokens_per_s: float
    cpu_s_per_token: float
    tokens_per_s_by_together: dict[int, float]
    loss: list[list[float]]
    """[step, mean training loss before the step]."""
    held_out_loss: float | None
    """Nats a token, over the windows the host evaluates; None if it was not asked for."""


def load_run(*, manifest_path: Path | None, run_dir: Path | None, scratch: Path) -> WholeRun:
    """The run of a manifest, or of a host's folder. Raises SettingsError."""
    from swarm.data.prepare import prepare_data
    from swarm.manifest.default import default_manifest_text
    from swarm.manifest.file import freeze, parse_manifest, read_manifest
    from swarm.model.initial import initial_weights

    if run_dir is not None:
        return _run_of_folder(run_dir)
    if manifest_path is None:
        manifest = parse_manifest(default_manifest_text(), scratch / "run.toml")
    else:
        manifest = read_manifest(manifest_path)
    data = prepare_data(manifest.data, scratch / "data")
    settings = freeze(manifest, data, ())
    weights = [*initial_weights(settings.model, settings.data.seed, manifest.initial_checkpoint)]
    return WholeRun(settings, weights, data.train(), data.held_out())


def newest_of(demos: Path) -> Path:
    """The run of the demo that was begun last. Raises SettingsError."""
    reports = sorted(demos.glob("*/run/report.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise SettingsError(f"--newest-demo: no demo has ended in {demos}; `make demo` makes one")
    return reports[-1].parent


def _run_of_folder(run_dir: Path) -> WholeRun:
    from swarm.checkpoint.state import StageState, state_digest
    from swarm.core.canonical import unpack
    from swarm.manifest.value import settings_from_value
    from swarm.model.initial import initial_weights
    from swarm.model.stack import stage_layout
    from swarm.optim.exact import ExactOptimizer

    path = run_dir / "run.settings"
    if not path.exists():
        raise SettingsError(f"--run-dir {run_dir}: holds no run.settings; give the --dir of `swarm host`")
    settings = settings_from_value(unpack(path.read_bytes(), max_bytes=1 << 20))
    weights = [*initial_weights(settings.model, settings.data.seed, None)]
    for stage, flat in enumerate(weights):
        layout = stage_layout(settings.model, stage)
        optimizer = ExactOptimizer.of(settings.optimizer, layout)
        state = StageState(0, layout, flat, dict(optimizer.state_arrays()), dict(optimizer.scalars))
        if state_digest(state) != settings.initial_state_digests[stage]:
            raise SettingsError(
                f"--run-dir {run_dir}: began with other weights than its seed's; give --manifest instead"
            )
    files = [
        TokenFile(run_dir / "data" / name, settings.data.token_bytes) for name in ("train.tokens", "held_out.tokens")
    ]
    return WholeRun(settings, weights, *files)


def microbatch_ids(settings: RunSettings, steps: int, report: dict[str, Any] | None) -> list[list[MicrobatchId]]:
    """Ids of each step: those a swarm's report lists, or in order."""
    if report is not None:
        listed = report["microbatches"]
        return [[MicrobatchId(number) for number in listed[key]] for key in sorted(listed, key=int)][:steps]
    each = settings.microbatches_per_step
    return [[MicrobatchId(number) for number in range(step * each, (step + 1) * each)] for step in range(steps)]


def joined(batches: Sequence[Batch]) -> Batch:
    """Several microbatches as one."""
    return np.concatenate([tokens for tokens, _ in batches]), np.concatenate([targets for _, targets in batches])


@dataclass
class _Speed:
    """Of the steps with so many microbatches in a forward."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0


def train(
    run: WholeRun,
    ids: Sequence[Sequence[MicrobatchId]],
    *,
    together: Sequence[int] = (1,),
    skip_steps: int = 0,
    time_limit_s: float | None = None,
    evaluate_tokens: int = 65536,
) -> Figures:
    """Train on these microbatches, a list for each step; stop early after `time_limit_s` of timed steps.

    Steps take turns in how many microbatches go `together`, which changes speed alone.
    """
    import torch

    from benchmarks.whole_model import WholeModel, host_windows

    settings = run.settings
    whole = WholeModel(settings, run.weights)
    reader = BatchReader(settings, run.train)
    losses: list[list[float]] = []
    tokens = 0
    speeds = {size: _Speed() for size in together}
    for number, numbers in enumerate(ids):
        size = together[number % len(together)]
        wall, cpu = time.perf_counter(), time.process_time()
        done = whole.train_step(number, _batches(reader, numbers, size))
        losses.append([number, done.loss])
        tokens += done.num_tokens
        if number >= skip_steps:
            speed = speeds[size]
            speed.tokens += done.num_tokens
            speed.wall_s += time.perf_counter() - wall
            speed.cpu_s += time.process_time() - cpu
        timed_s = sum(speed.wall_s for speed in speeds.values())
        if time_limit_s is not None and timed_s > time_limit_s and all(speed.tokens for speed in speeds.values()):
            break
    held_out = None
    if evaluate_tokens:
        held_out = whole.held_out_loss(host_windows(settings, run.held_out, evaluate_tokens=evaluate_tokens))
    best = max(speeds, key=lambda size: speeds[size].tokens_per_s)
    return Figures(
        tokens=tokens,
        steps=len(losses),
        threads=torch.get_num_threads(),
        skipped_steps=skip_steps,
        microbatches_together=best,
        tokens_per_s=speeds[best].tokens_per_s,
        cpu_s_per_token=speeds[best].cpu_s / max(1, speeds[best].tokens),
        tokens_per_s_by_together={size: speed.tokens_per_s for size, speed in speeds.items()},
        loss=losses,
        held_out_loss=held_out,
    )


def _batches(reader: BatchReader, numbers: Sequence[MicrobatchId], size: int) -> Iterator[Batch]:
    for at in range(0, len(numbers), size):
        yield joined([reader.batch(number) for number in numbers[at : at + size]])


@click.command()
@click.option(
    "--manifest", "manifest_path", type=click.Path(path_type=Path, exists=True), help="Default: the default one."
)
@click.option("--run-dir", type=click.Path(path_type=Path, exists=True), help="The --dir of a `swarm host`, instead.")
@click.option("--report", "report_path", type=click.Path(path_type=Path, exists=True), help="Train on this run's ids.")
@click.option("--newest-demo", is_flag=True, help="Both of the newest demo in ./demo-out.")
@click.option("--tokens", type=click.IntRange(min=1), help="Default: all of the run's.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--together", type=click.IntRange(min=1), default=[1], multiple=True, help="Microbatches a forward, in turn."
)
@click.option("--skip-steps", type=click.IntRange(min=0), default=0, show_default=True, help="Steps not timed.")
@click.option("--time-limit", type=click.FloatRange(min=0), help="Stop after this many timed seconds.")
@click.option("--evaluate-tokens", type=click.IntRange(min=0), default=65536, show_default=True)
@click.option("--smoke", is_flag=True, help="One step: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    manifest_path: Path | None,
    run_dir: Path | None,
    report_path: Path | None,
    newest_demo: bool,
    tokens: int | None,
    threads: int,
    together: tuple[int, ...],
    skip_steps: int,
    time_limit: float | None,
    evaluate_tokens: int,
    smoke: bool,
    as_json: bool,
) -> None:
    """Train a run's model in one process; print tokens/s, CPU seconds a token and the held-out loss."""
    bound_pools(threads)  # before torch is first imported
    if smoke:
        tokens, evaluate_tokens = SMOKE_TOKENS, SMOKE_TOKENS
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            if newest_demo:
                run_dir = newest_of(DEMOS)
                report_path = run_dir / "report.json"
            run = load_run(manifest_path=manifest_path, run_dir=run_dir, scratch=scratch)
        except SettingsError as error:
            raise click.ClickException(str(error)) from error
        settings = run.settings
        per_step = settings.microbatches_per_step * settings.microbatch_tokens
        steps = settings.optimizer.total_steps if tokens is None else -(-tokens // per_step)
        report = None if report_path is None else json.loads(report_path.read_text())
        figures = train(
            run,
            microbatch_ids(settings, steps, report),
            together=together,
            skip_steps=skip_steps,
            time_limit_s=time_limit,
            evaluate_tokens=evaluate_tokens,
        )
    if as_json:
        click.echo(json.dumps(asdict(figures)))
        return
    click.echo(f"{figures.tokens} tokens in {figures.steps} steps, {figures.threads} threads")
    click.echo(f"{figures.tokens_per_s:.0f} tokens/s, {figures.cpu_s_per_token * 1e6:.1f} CPU us a token")
    click.echo(f"training loss {figures.loss[0][1]:.4f} -> {figures.loss[-1][1]:.4f}, held-out {figures.held_out_loss}")


if __name__ == "__main__":
    main()
