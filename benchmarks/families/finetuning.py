"""LoRA and QLoRA on a chat file, in a swarm beside peft alone on the same conversations; and a QLoRA peer's memory.

python -m benchmarks.families.finetuning --json
"""

import asyncio
import itertools
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.families import qlora_peer
from benchmarks.families.given import some_text, write_given
from benchmarks.families.trained import trained
from bootstrap.state.run_folder import PreparedRun, prepare_run
from swarm.checkpoint.archive import read_checkpoint
from swarm.checkpoint.huggingface import export_huggingface
from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.targets import IGNORED_TARGET
from swarm.core.state.schedule import learning_rate
from swarm.data.batches import Batch, BatchReader, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.manifest.checkpoint import fields_from
from swarm.manifest.file import parse_manifest
from swarm.manifest.text import manifest_text
from swarm.model.adapters.base import base_layout
from swarm.model.adapters.making import as_kept
from verification.pipeline.headers import document_bounds

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
        (root / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations()))
    fields = fields_from(given, {"stages": 2})
    fields["model"].pop("preset")
    fields["data"] |= {"text": [str(root / "chats.jsonl")], "kind": "chat", "sequence_length": 64}
    fields["data"] |= {"held_out_share": 0.1}
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


def conversations() -> list[list[dict[str, str]]]:
    """In each somebody has a line of source code ended, and then the next one."""
    lines = [line.split() for line in some_text().splitlines() if len(line.split()) > 3]
    turns = [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in lines]
    return [
        [
            {"role": role, "content": said}
            for turn in pair
            for role, said in zip(("user", "assistant"), turn, strict=True)
        ]
        for pair in zip(turns[::2], turns[1::2], strict=False)
    ]


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
    """peft and PyTorch's AdamW, on the conversations of each of the swarm's steps, from the swarm's first adapters."""
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
            batch = reader.batch(MicrobatchId(number))
            torch.autograd.backward((_loss_sum(adapted, batch),))
            count += _num_learnt(batch)
        for value in trained_ones:
            assert value.grad is not None
            value.grad.div_(count)
        adam.param_groups[0]["lr"] = learning_rate(optimizer, step)
        adam.step()
        adam.zero_grad()
    return adapted.eval()


def _loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Of the answers, each conversation a row of its own, padded at its end, as transformers' trainers have them."""
    ids, labels = zip(*_conversations_of(batch), strict=True)
    ids_DL = pad_sequence(list(ids), batch_first=True)
    labels_DL = pad_sequence(list(labels), batch_first=True, padding_value=IGNORED_TARGET)
    mask_DL = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    logits_DLV = model(input_ids=ids_DL, attention_mask=mask_DL, use_cache=False).logits
    return functional.cross_entropy(logits_DLV.flatten(0, 1), labels_DL.flatten(), reduction="sum")


def _conversations_of(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens of each, and the token that is to follow each if it is learnt."""
    tokens_N, targets_N = batch[0].ravel(), batch[1].ravel()
    starts = [*range(0, tokens_N.size, batch[0].shape[1]), *document_bounds(batch[1]), tokens_N.size]
    found = []
    for start, stop in itertools.pairwise(sorted(set(starts))):
        labels_L = np.where(targets_N[start:stop] >= 0, targets_N[start:stop], IGNORED_TARGET)
        found.append((torch.from_numpy(tokens_N[start:stop]), torch.from_numpy(labels_L)))
    return found


def _num_learnt(batch: Batch) -> int:
    return int((batch[1] >= 0).sum())


def _held_out_loss(run: PreparedRun, model: Any) -> float:
    """A token that is learnt."""
    held_out = TokenFile(run.data.held_out_path, run.settings.data.token_bytes)
    batches = held_out_batches(run.settings, held_out, limit_tokens=4096)
    with torch.no_grad():
        total = sum(float(_loss_sum(model, batch)) for batch in batches)
    return total / sum(map(_num_learnt, batches))


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--smoke", is_flag=True, help="LoRA alone, four steps, no large model.")
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, smoke: bool, as_json: bool) -> None:
    """Fine-tune a small model with LoRA and QLoRA, and measure a large one's peer."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("plain",) if smoke else ("plain", "nf4")
        found: dict[str, Any] = {
            kind: asdict(row_of(kind, Path(folder), steps=4 if smoke else steps)) for kind in kinds
        }
        found["round_share"] = qlora_peer.round_share()
        if not smoke:
            found["large_peer"] = qlora_peer.measured(Path(folder))
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name}: {value}")


if __name__ == "__main__":
    main()
