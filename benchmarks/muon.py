"""Muon as the swarm has it beside torch's: loss on the same batches, and what turning a matrix costs.

    python -m benchmarks.muon --json

The default model, of one stage, is trained from the same weights on the same microbatches three times: by the swarm's
exact Muon, by `torch.optim.Muon` beside `torch.optim.AdamW`, and by the swarm's AdamW. Then a matrix is turned by both.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.single_process import WholeRun, load_run, microbatch_ids, train
from swarm.core.settings import RunSettings
from swarm.local.compute_pools import bound_pools
from swarm.manifest.default import default_manifest_text

Name = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    loss: float
    """Mean of the last tenth of the steps' training losses."""
    held_out_loss: float


@dataclass(frozen=True)
class Turning:
    """Of one matrix."""

    rows: int
    columns: int
    cpu_s: float
    products_per_s: float
    torch_cpu_s: float


@dataclass(frozen=True)
class Figures:
    steps: int
    tokens: int
    muon: Trained
    torch_muon: Trained
    adamw: Trained
    off_torch: float
    """Of held-out losses: ours over torch's, less one."""
    turning: tuple[Turning, ...]


def with_optimizer(run: WholeRun, name: Name) -> WholeRun:
    return replace(run, settings=replace(run.settings, optimizer=replace(run.settings.optimizer, name=name)))


def ours(run: WholeRun, *, evaluate_tokens: int) -> Trained:
    """By the swarm's model of the one stage and its exact optimizer."""
    from swarm.local.alone import held_out_loss, trained_alone

    settings, chosen = run.settings, run.settings.optimizer
    steps = microbatch_ids(settings, chosen.total_steps, None)
    flat, losses = trained_alone(settings, chosen, run.weights[0], run.train, steps)
    return Trained(_end_of(losses), held_out_loss(settings, flat, run.held_out, limit_tokens=evaluate_tokens))


def torchs(run: WholeRun, *, evaluate_tokens: int) -> Trained:
    steps = microbatch_ids(run.settings, run.settings.optimizer.total_steps, None)
    figures = train(run, steps, evaluate_tokens=evaluate_tokens)
    assert figures.held_out_loss is not None
    return Trained(_end_of([loss for _, loss in figures.loss]), figures.held_out_loss)


def _end_of(losses: list[float]) -> float:
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def turning_of(rows: int, columns: int) -> Turning:
    """On one core."""
    import numpy as np
    import torch

    from kernels import orthogonal
    from kernels.norms import tree_norm

    matrix = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    norm = tree_norm(matrix.reshape(-1))
    orthogonal.turned(matrix[:8, :8].copy(), norm)  # compiled
    cpu_s = _cpu_s(lambda: orthogonal.turned(matrix, norm))
    weight = torch.nn.Parameter(torch.zeros(rows, columns))
    weight.grad = torch.from_numpy(matrix)
    torch_cpu_s = _cpu_s(torch.optim.Muon([weight]).step)
    return Turning(rows, columns, cpu_s, orthogonal.products_of(rows, columns) / cpu_s, torch_cpu_s)


def _cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


SMOKE: dict[str, dict[str, Any]] = {
    "data": {"max_text_mb": 1, "sequence_length": 64},
    "batch": {"microbatch_size": 2, "target_tokens": 256},
}


def manifest_text(steps: int, learning_rate: float, more: Mapping[str, Mapping[str, Any]]) -> str:
    given: dict[str, dict[str, Any]] = {
        "model": {"stages": 1},
        "optimizer": {
            "total_steps": steps,
            "warmup_steps": min(20, steps // 4),
            "learning_rate": learning_rate,
            "schedule": "wsd",
            "decay_steps": steps // 5,
        },
    }
    return default_manifest_text({**given, **more})


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=3e-3, show_default=True)
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=65536, show_default=True)
@click.option("--smoke", is_flag=True, help="Two steps and a small matrix: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, learning_rate: float, evaluate_tokens: int, smoke: bool, as_json: bool) -> None:
    """Compare the exact Muon with torch's."""
    bound_pools(1)  # before torch is first imported
    shapes = [(64, 256)] if smoke else [(2048, 2048), (2048, 8192)]
    if smoke:
        steps, evaluate_tokens = 2, 512
    with tempfile.TemporaryDirectory() as scratch:
        manifest = Path(scratch) / "run.toml"
        manifest.write_text(manifest_text(steps, learning_rate, SMOKE if smoke else {}))
        run = load_run(manifest_path=manifest, run_dir=None, scratch=Path(scratch))
        muon = ours(with_optimizer(run, "muon"), evaluate_tokens=evaluate_tokens)
        torch_muon = torchs(with_optimizer(run, "muon"), evaluate_tokens=evaluate_tokens)
        adamw = ours(with_optimizer(run, "adamw"), evaluate_tokens=evaluate_tokens)
    figures = Figures(
        steps=steps,
        tokens=steps * _step_tokens(run.settings),
        muon=muon,
        torch_muon=torch_muon,
        adamw=adamw,
        off_torch=muon.held_out_loss / torch_muon.held_out_loss - 1.0,
        turning=tuple(turning_of(*shape) for shape in shapes),
    )
    if as_json:
        click.echo(json.dumps(asdict(figures)))
        return
    click.echo(f"{figures.steps} steps, {figures.tokens} tokens; held-out loss, nats a token:")
    for name, trained in (("muon", muon), ("torch's muon", torch_muon), ("adamw", adamw)):
        click.echo(f"  {name}: {trained.held_out_loss:.4f}")
    for one in figures.turning:
        click.echo(
            f"{one.rows} x {one.columns}: turned in {one.cpu_s:.2f} CPU s, {one.products_per_s / 1e9:.0f}e9 products a "
            f"second; torch, in bf16, {one.torch_cpu_s:.2f}"
        )


def _step_tokens(settings: RunSettings) -> int:
    return settings.microbatches_per_step * settings.microbatch_tokens


if __name__ == "__main__":
    main()
