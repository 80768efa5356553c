"""What a researcher takes away: the export says what the swarm said, and a checkpoint that starts a run is itself."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from swarm.checkpoint.huggingface import export_huggingface
from tests.swarm_in_process import TINY_MODEL, manifest_of, swarm_in_process

EXACT = {"activations": "fp32", "activation_gradients": "fp32", "averaging": "fp32"}
EVALUATED = 512
SEQUENCE = 16

TRANSFORMERS_ALONE = """
import json, sys
import numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, tokens_path, num_samples, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokens = torch.from_numpy(numpy.fromfile(tokens_path, dtype=numpy.uint8).astype(numpy.int64))
samples = torch.stack([tokens[at * length : at * length + length + 1] for at in range(num_samples)])
with torch.no_grad():
    logits = model(samples[:, :-1]).logits
loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), samples[:, 1:].reshape(-1))
names = [name for name in sys.modules if name.split(".")[0] in ("swarm", "peer", "bootstrap", "verification")]
print(json.dumps({"loss": float(loss), "ours": names}))
"""


def loss_by_transformers(model_folder: Path, held_out: Path) -> float:
    """Held-out loss on the swarm's samples, in a process that imports nothing of ours."""
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS_ALONE, model_folder, held_out, str(EVALUATED // SEQUENCE), str(SEQUENCE)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=model_folder,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ours"] == []
    return float(said["loss"])


def test_the_export_gives_the_swarms_held_out_loss_in_transformers_alone(tmp_path: Path) -> None:
    async def train() -> float:
        manifest = manifest_of(codecs=EXACT, optimizer={"total_steps": 6}, averaging={"rule": "mean"})
        async with swarm_in_process(manifest, tmp_path, peers=(1, 2), evaluate_tokens=EVALUATED) as swarm:
            report = await swarm.finished()
        assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
        export_huggingface(Path(report["checkpoint"]), tmp_path / "model", tokenizer_dir=None)
        return float(report["held_out_loss"]["end"])

    said_by_the_swarm = asyncio.run(train())
    by_transformers = loss_by_transformers(tmp_path / "model", tmp_path / "host" / "data" / "held_out.tokens")
    assert abs(by_transformers - said_by_the_swarm) < 1e-4


def test_a_tied_checkpoint_starts_a_run_and_its_first_evaluation_is_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = {key: value for key, value in TINY_MODEL.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=True)).save_pretrained(tmp_path / "given")

    async def first_evaluation() -> float:
        manifest = manifest_of(codecs=EXACT, optimizer={"total_steps": 2, "warmup_steps": 0})
        manifest = manifest.replace("[model]\n", f"[model]\ncheckpoint = {json.dumps(str(tmp_path / 'given'))}\n")
        lines = [line for line in manifest.splitlines() if not line.startswith("config = ")]
        async with swarm_in_process(
            "\n".join(lines), tmp_path / "run", peers=(1, 1), evaluate_tokens=EVALUATED
        ) as swarm:
            report = await swarm.finished()
        return float(report["held_out_loss"]["start"])

    said_by_the_swarm = asyncio.run(first_evaluation())
    held_out = tmp_path / "run" / "host" / "data" / "held_out.tokens"
    assert abs(loss_by_transformers(tmp_path / "given", held_out) - said_by_the_swarm) < 1e-4
