"""LoRA and QLoRA in a swarm beside peft alone on the same batches; and a QLoRA peer's memory.

python -m benchmarks.families.finetuning --json
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional

from benchmarks.families.given import some_text, write_given
from benchmarks.families.trained import trained
from bootstrap.state.run_folder import PreparedRun, prepare_run
from swarm.checkpoint.archive import read_checkpoint
from swarm.checkpoint.huggingface import export_huggingface
from swarm.core.ids import MicrobatchId
from swarm.core.plan import round_bytes
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.core.state.schedule import learning_rate
from swarm.data.batches import BatchReader, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.disk.mapped_file import mapped
from swarm.manifest.checkpoint import fields_from
from swarm.manifest.file import parse_manifest
from swarm.manifest.model import stage_num_parameters
from swarm.manifest.text import manifest_text
from swarm.model.adapters.base import Base, base_layout
from swarm.model.adapters.making import as_kept, write_base
from swarm.model.families import canonical_config_json
from swarm.model.initial import stage_weights
from swarm.model.stage import StageModel

RANK, LEARNING_RATE = 8, 0.01
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LARGE = CONFIG | {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
LARGE_TOKENS = 128


@dataclass(frozen=True)
class Row:
    """Of one kind of base."""

    loss_before: float
    """Held-out, in nats."""
    loss: float
    """Of the swarm's adapters, by peft."""
    loss_of_peft: float
    """Of adapters that peft alone has trained on the same batches."""
    off: float
    """The swarm's loss over peft's, minus 1."""
    loads_with_peft: bool
    base_unchanged: bool


def row_of(kind: str, root: Path, *, steps: int) -> Row:
    """A run of two stages on a checkpoint, and peft's own."""
    given = root / "given"
    if not given.exists():
        write_given(given, CONFIG)
        (root / "text.txt").write_text(some_text())
    fields = fields_from(given, {"stages": 2})
    fields["model"].pop("preset")
    fields["data"] |= {"text": [str(root / "text.txt")], "sequence_length": 32, "held_out_share": 0.1}
    tables: dict[str, Any] = {
        **fields,
        "adapters": {"rank": RANK, "alpha": 2.0 * RANK, "base": kind},
        "batch": {"microbatch_size": 4, "target_tokens": 512},
        # A stage's share of a norm is nothing that peft has.
        "optimizer": {
            **{"learning_rate": LEARNING_RATE, "warmup_steps": 2, "total_steps": steps, "weight_decay": 0.0},
            **{"max_norm": 1e9, "skip_norm_factor": 0.0},
        },
        "checkpoint": {"every_steps": steps, "snapshot_every": steps},
    }
    run = prepare_run(parse_manifest(manifest_text(tables), root / "run.toml"), root / kind, lambda what: None)
    before = run.folder.base.read_bytes()
    report = asyncio.run(trained(run, root / f"{kind}.peers"))
    info = read_checkpoint(Path(report["checkpoint"]))
    export_huggingface(info.path, root / f"{kind}.adapters")
    import peft

    ours = peft.PeftModel.from_pretrained(_base_model(run, given), root / f"{kind}.adapters").eval()
    fresh = _base_model(run, given)
    start = _held_out_loss(run, fresh)
    theirs = _trained_by_peft(run, fresh, report["microbatches"])
    loss, loss_of_peft = _held_out_loss(run, ours), _held_out_loss(run, theirs)
    is_same = run.folder.base.read_bytes() == before
    return Row(start, loss, loss_of_peft, loss / loss_of_peft - 1, loss < start, is_same)


def _base_model(run: PreparedRun, given: Path) -> Any:
    """The checkpoint as the base has it: NF4's values, in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in base_layout(run.settings.model).tensors:
            named[tensor.name].copy_(as_kept(tensor, named[tensor.name]))
    return model


def _trained_by_peft(run: PreparedRun, model: Any, microbatches: dict[str, list[int]]) -> Any:
    """peft and PyTorch's AdamW, on the microbatches of each of the swarm's steps, from the swarm's first adapters."""
    import peft

    settings, optimizer = run.settings, run.settings.optimizer
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    adapted = peft.get_peft_model(model, lora).train()
    named = dict(adapted.named_parameters())
    for state in run.states:
        for name, values in state.layout.views(state.weights).items():
            ours = name.replace(".weight", ".default.weight")
            with torch.no_grad():
                named[f"base_model.model.{ours}"].copy_(torch.from_numpy(np.array(values)))
    trained_ones = [value for value in adapted.parameters() if value.requires_grad]
    betas = optimizer.beta1, optimizer.beta2
    adam = torch.optim.AdamW(trained_ones, lr=1.0, betas=betas, eps=optimizer.epsilon, weight_decay=0.0)
    reader = BatchReader(settings, TokenFile(run.data.train_path, run.settings.data.token_bytes))
    for step, numbers in sorted((int(step), numbers) for step, numbers in microbatches.items()):
        count = 0
        for number in numbers:
            tokens_BL, targets_BL = map(torch.from_numpy, reader.batch(MicrobatchId(number)))
            torch.autograd.backward((_loss_sum(adapted, tokens_BL, targets_BL),))
            count += int((targets_BL >= 0).sum())
        for value in trained_ones:
            assert value.grad is not None
            value.grad.div_(count)
        adam.param_groups[0]["lr"] = learning_rate(optimizer, step)
        adam.step()
        adam.zero_grad()
    return adapted.eval()


def _loss_sum(model: Any, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits
    return functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten().clamp(min=-100), reduction="sum")


def _held_out_loss(run: PreparedRun, model: Any) -> float:
    batches = held_out_batches(
        run.settings, TokenFile(run.data.held_out_path, run.settings.data.token_bytes), limit_tokens=4096
    )
    total, count = 0.0, 0
    for tokens_BL, targets_BL in batches:
        with torch.no_grad():
            total += float(_loss_sum(model, torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL)))
        count += int((targets_BL >= 0).sum())
    return total / count


def large_model(stages: int) -> ModelSettings:
    """Eight layers of width 2048."""
    layers = LARGE["num_hidden_layers"]
    assert isinstance(layers, int)
    cut = tuple((at * layers // stages, (at + 1) * layers // stages) for at in range(stages))
    return ModelSettings(
        config_json=canonical_config_json(LARGE),
        stage_layers=cut,
        adapters=AdapterSettings(rank=16, alpha=32.0, base="nf4"),
    )


def round_share() -> float:
    """Bytes of a round of adapters over those of a round of the whole model, of eight layers of width 2048."""
    model = large_model(2)
    sizes = stage_num_parameters(model)
    return sum(round_bytes("int8", size, 4) for size in sizes) / sum(round_bytes("int8", s.frozen, 4) for s in sizes)


def peak_bytes(root: Path) -> int:
    """Of a process that holds all eight layers of width 2048 as QLoRA does, and takes a step on a sample."""
    path = root / "large.base"
    write_base(large_model(1), path, 0, None)
    command = [sys.executable, "-m", "benchmarks.families.finetuning", "--peak-of", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    path.unlink()
    if done.returncode:
        raise click.ClickException(done.stderr)
    return int(done.stdout)


def take_a_step(path: Path) -> None:
    """On the base in that file, in this process."""
    model = large_model(1)
    stage = StageModel(model, 0).on(Base(base_layout(model), mapped(path)))
    flat = stage_weights(model, 0, 0, None)
    into, moments = torch.zeros(stage.layout.num_values), np.zeros(2 * stage.layout.num_values, np.float32)
    tokens_BL = torch.arange(LARGE_TOKENS).unsqueeze(0)
    _, _, saved = stage.loss(stage.weights(flat), tokens_BL, tokens_BL + 1, keep=True)
    assert saved is not None
    stage.loss_backward(saved, into)
    gradient = into.numpy()
    moments[: len(flat)], moments[len(flat) :] = gradient, gradient * gradient
    assert float(np.linalg.norm(moments)) > 0


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--smoke", is_flag=True, help="LoRA alone, four steps, no large model.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--peak-of", type=click.Path(path_type=Path), hidden=True)
def main(steps: int, smoke: bool, as_json: bool, peak_of: Path | None) -> None:
    """Fine-tune a small model with LoRA and QLoRA, and measure a large one's peer."""
    torch.set_num_threads(1)
    if peak_of is not None:
        take_a_step(peak_of)
        # Of this program alone: getrusage has its parent's too.
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        click.echo(1024 * int(line.split()[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("plain",) if smoke else ("plain", "nf4")
        found: dict[str, Any] = {
            kind: asdict(row_of(kind, Path(folder), steps=4 if smoke else steps)) for kind in kinds
        }
        found["round_share"] = round_share()
        if not smoke:
            found["peak_bytes"] = peak_bytes(Path(folder))
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name}: {value}")


if __name__ == "__main__":
    main()
