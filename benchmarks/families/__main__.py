"""Each family's checkpoint, saved by transformers, trained in a swarm, exported, and read by transformers alone."""

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.families.configs import CONFIGS
from benchmarks.families.exactness import exactness_of
from benchmarks.families.given import some_text, special_of, write_given
from benchmarks.families.trained import trained
from bootstrap.state.run_folder import prepare_run
from swarm.checkpoint.archive import CheckpointInfo, load_stage, read_checkpoint
from swarm.checkpoint.huggingface import export_huggingface
from swarm.checkpoint.state import StageState
from swarm.core.settings import ModelSettings
from swarm.manifest.checkpoint import fields_from
from swarm.manifest.file import Manifest, parse_manifest
from swarm.manifest.text import manifest_text
from swarm.model.families import FAMILIES, canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel

STEPS = 20
SMOKE = ("gemma3_text", "gpt2")
BF16 = ("qwen3", "gemma3_text")
"""Whose checkpoints are in bf16, and so are their exports."""
IN_ONE_STAGE = ("granite", "gpt2", "smollm3")
"""Tied, and trained with embedding and head at one peer; other tied ones are cut, and come back untied."""
MAX_LOSS_ERROR = 1e-4

ELSEWHERE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder, text in json.loads(sys.stdin.read()):
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    dtype = str(model.dtype).removeprefix("torch.")
    with torch.no_grad():
        loss = model.float().eval()(input_ids=ids, labels=ids).loss.item()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    said = {"loss": loss, "dtype": dtype, "tied": tied, "wrong": [str(v) for v in report.values() if v]}
    print(json.dumps(said | {"ids": ids[0].tolist(), "chat": tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False)}))
ours = [name for name in sys.modules if name.split(".")[0] in ("swarm", "peer", "bootstrap", "benchmarks")]
assert not ours, ours
"""
"""transformers alone, in a process of its own, of all exports one after another."""


@dataclass(frozen=True)
class Row:
    """What came of a family."""

    logits_equal: bool
    gradient_error: float
    export_equal: bool
    """Loss within `MAX_LOSS_ERROR` of the swarm's; type, ties, special tokens and chat template as they came."""
    resumed_equal: bool
    """The run goes on from its checkpoint with the bits that were there, and so does one from the export."""


@dataclass(frozen=True)
class Trained:
    """A family's export, not yet read elsewhere."""

    given: Path
    exported: Path
    info: CheckpointInfo
    resumed_equal: bool


def manifest_for(given: Path, text: Path, where: Path, *, stages: int, steps: int) -> Manifest:
    """What `swarm init --checkpoint` writes, small."""
    fields = fields_from(given, {"stages": stages})
    fields["model"].pop("preset")
    fields["data"] |= {"text": [str(text)], "sequence_length": 24, "held_out_share": 0.1}
    tables: dict[str, Any] = {
        **fields,
        "run": {"name": given.name},
        "batch": {"microbatch_size": 2, "target_tokens": 96},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 2, "total_steps": steps},
        "checkpoint": {"every_steps": steps, "snapshot_every": min(steps, 10)},
    }
    return parse_manifest(manifest_text(tables), where / "run.toml")


def train(family: str, root: Path, *, steps: int) -> Trained:
    """A random checkpoint of the family, trained and exported."""
    config = next(fields for fields in CONFIGS.values() if fields["model_type"] == family)
    given, text, run_dir = root / family, root / "text.txt", root / f"{family}.run"
    text.write_text(some_text())
    write_given(given, config, dtype="bfloat16" if family in BF16 else "float32")
    manifest = manifest_for(given, text, root, stages=1 if family in IN_ONE_STAGE else 2, steps=steps)
    run = prepare_run(manifest, run_dir, lambda what: None)
    report = asyncio.run(trained(run, root / f"{family}.peers"))
    info, exported = read_checkpoint(Path(report["checkpoint"])), root / f"{family}.exported"
    export_huggingface(info.path, exported)
    again = prepare_run(manifest, run_dir, lambda what: None)
    resumed = [_bits(state) for state in again.states] == [_bits(state) for state in states_of(info)]
    return Trained(given, exported, info, resumed and _begins_from(exported, info))


def states_of(info: CheckpointInfo) -> list[StageState]:
    """Of each stage, checked against the digests that the run signed."""
    model = info.meta.model
    return [load_stage(info, stage, stage_layout(model, stage)) for stage in range(model.num_stages)]


def _bits(state: StageState) -> tuple[int, bytes, dict[str, bytes]]:
    """All of a state but its name, which a host that goes on gives anew."""
    return state.version, state.weights.tobytes(), {name: held.tobytes() for name, held in state.moments.items()}


def exported_weights(info: CheckpointInfo) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Of each stage, as the export's type holds them."""
    model = info.meta.model
    dtype = getattr(torch, str(json.loads(model.config_json)["dtype"]))
    return [torch.from_numpy(state.weights).to(dtype).float().numpy() for state in states_of(info)]


def _begins_from(exported: Path, info: CheckpointInfo) -> bool:
    """Whether a run of the same stages that begins from the export has its weights to the bit."""
    config = json.loads((exported / "config.json").read_text())
    fields = json.loads(info.meta.model.config_json) | {"tie_word_embeddings": config["tie_word_embeddings"]}
    model = replace(info.meta.model, config_json=canonical_config_json(fields))
    read, expected = list(initial_weights(model, 0, exported)), exported_weights(info)
    return [flat.tobytes() for flat in read] == [flat.tobytes() for flat in expected]


def loss_of(info: CheckpointInfo, ids: Sequence[int]) -> float:
    """Mean loss in nats of the stages as they were exported."""
    model: ModelSettings = info.meta.model
    x = torch.tensor([ids])[:, :-1].contiguous()
    targets_BL = torch.tensor([ids])[:, 1:].contiguous()
    for stage, flat in enumerate(exported_weights(info)):
        computed = StageModel(model, stage)
        weights = computed.weights(flat)
        if computed.is_last:
            loss_sum, num_tokens, _ = computed.loss(weights, x, targets_BL, keep=False)
            return loss_sum / num_tokens
        x, _ = computed.forward(weights, x, keep=False)
    raise AssertionError("no stage is the last")


def read_elsewhere(folders: Sequence[Path], text: str) -> list[dict[str, Any]]:
    """What transformers alone says of each."""
    asked = json.dumps([[str(folder), text] for folder in folders])
    command = [sys.executable, "-I", "-c", ELSEWHERE]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def came_back(one: Trained, said: dict[str, Any], text: str) -> bool:
    """Whether the export is what the swarm had, in the form in which it came."""
    before, after = special_of(one.given), special_of(one.exported)
    cut = one.info.meta.model.num_stages > 1
    expected = before | {"tie_word_embeddings": bool(before["tie_word_embeddings"]) and not cut}
    return (
        math.isclose(said["loss"], loss_of(one.info, said["ids"]), rel_tol=0, abs_tol=MAX_LOSS_ERROR)
        and not said["wrong"]
        and after == expected
        and (said["dtype"], said["tied"]) == (before["dtype"], expected["tie_word_embeddings"])
        and said["chat"] == f"{text}</s>"
        and "SHA-256" in (one.exported / "README.md").read_text()
    )


def rows_of(families: Sequence[str], root: Path, *, steps: int) -> dict[str, Row]:
    """The families' rows."""
    text = some_text()[:400]
    done = {family: train(family, root, steps=steps) for family in families}
    rows = {}
    said = read_elsewhere([one.exported for one in done.values()], text)
    for (family, one), found in zip(done.items(), said, strict=True):
        exact = [exactness_of(_tiny(fields)) for fields in CONFIGS.values() if fields["model_type"] == family]
        rows[family] = Row(
            all(each.logits_equal for each in exact),
            max(each.gradient_error for each in exact),
            came_back(one, found, text),
            one.resumed_equal,
        )
    return rows


def _tiny(config: dict[str, Any]) -> ModelSettings:
    return ModelSettings(config_json=canonical_config_json(config), stage_layers=((0, 2), (2, 4)))


@click.command()
@click.option("--family", "families", multiple=True, type=click.Choice(sorted(FAMILIES)), help="These alone.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True)
@click.option("--smoke", is_flag=True, help="Two families, two steps.")
@click.option("--json", "as_json", is_flag=True)
def main(families: Sequence[str], steps: int, smoke: bool, as_json: bool) -> None:
    """Bring every family's checkpoint, train it, take it home."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(families or (SMOKE if smoke else sorted(FAMILIES)), Path(folder), steps=2 if smoke else steps)
    if as_json:
        click.echo(json.dumps({family: asdict(row) for family, row in rows.items()}))
        return
    for family, row in rows.items():
        click.echo(f"{family}: {', '.join(f'{name} {value}' for name, value in asdict(row).items())}")


if __name__ == "__main__":
    main()
