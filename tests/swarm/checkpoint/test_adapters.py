"""LoRA from end to end: a base of a checkpoint, adapters trained by a swarm, and what is taken home."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from swarm.checkpoint.archive import latest_checkpoint
from swarm.checkpoint.huggingface import export_huggingface
from tests.swarm_in_process import TINY_MODEL, manifest_of, swarm_in_process


def checkpoint_in(folder: Path, **config: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY_MODEL, **config})).save_pretrained(folder)
    return folder


async def trained(tmp_path: Path) -> None:
    checkpoint_in(tmp_path / "checkpoint")
    manifest = manifest_of(
        model={"config": None, "checkpoint": "checkpoint"}, adapters={"rank": 4}, optimizer={"learning_rate": 0.02}
    )
    async with swarm_in_process(manifest, tmp_path, peers=(1, 2)) as swarm:
        run = swarm.run
        assert run.base is not None
        before = run.folder.base.read_bytes()
        report = await swarm.finished()
    assert run.folder.base.read_bytes() == before
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"] - 0.1
    found = latest_checkpoint(run.folder.checkpoints)
    assert found is not None
    export_huggingface(found.path, tmp_path / "adapters")
    for base in (tmp_path / "checkpoint", run.folder.base):
        out = tmp_path / f"merged with {base.name}"
        export_huggingface(found.path, out, base=base)
        check_loss_is_pefts(tmp_path / "checkpoint", tmp_path / "adapters", out)


def check_loss_is_pefts(base: Path, adapters: Path, merged: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters).eval()
    alone = AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(1, 65).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = alone(ids).logits, adapted(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-5
    with adapted.disable_adapter(), torch.no_grad():
        assert float((adapted(ids).logits - theirs).abs().max()) > 1e-3


def test_adapters_are_trained_and_the_base_is_not(tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path))
