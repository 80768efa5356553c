"""How far a device's results lie from the CPU's, by depth: of a last stage, fresh and on a batch it has learnt.

    python -m benchmarks.verification.device_spread --device cuda:0 --json

Relative L2 of y, of the gradient of x and of the parameters', before anything is encoded. Width 512, 4 x 256 tokens.
A batch is learnt in plain steps on the CPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.core.settings import ModelSettings
from swarm.model.families import canonical_config_json
from swarm.model.stage import StageModel, Weights

VOCAB, SAMPLES, TOKENS = 4096, 4, 256
RATE = 0.02
"""Of steps along the sign of the gradient: quick, and good enough to know one batch by heart."""


def stage_settings(depth: int, width: int, compute_dtype: str) -> ModelSettings:
    """A stage of one layer, and the last, of `depth`."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": depth + 1,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "max_position_embeddings": TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    cuts = ((0, 1), (1, depth + 1))
    json_text = canonical_config_json(config)
    return ModelSettings(config_json=json_text, stage_layers=cuts, compute_dtype=compute_dtype)  # type: ignore[arg-type]


def results(model: StageModel, flat: NDArray[np.float32], x: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """y, the gradient of x, and that of the parameters, on the host."""
    weights: Weights = model.weights(flat)
    into = torch.zeros(model.layout.num_values, device=model.device)
    y, _ = model.forward(weights, x, keep=False)
    _, _, saved = model.loss(weights, x, targets, keep=True)
    assert saved is not None
    grad_x = model.loss_backward(saved, into)
    assert grad_x is not None
    return [model.link.fetch(tensor) for tensor in (y, grad_x, into)]


def learnt(model: StageModel, flat: NDArray[np.float32], x: torch.Tensor, targets: torch.Tensor, steps: int) -> None:
    """`flat` after so many steps on one batch."""
    for step in range(steps):
        _, _, into = results(model, flat, x, targets)
        flat -= np.float32(RATE * (1 - step / steps)) * np.float32(0.02) * np.sign(into.numpy())


def spread(depth: int, compute_dtype: str, device: str, *, width: int, steps: int) -> list[dict[str, object]]:
    """One row for fresh weights, one for learnt ones."""
    here = StageModel(stage_settings(depth, width, compute_dtype), 1)
    there = StageModel(stage_settings(depth, width, compute_dtype), 1, device=device)
    rng = np.random.default_rng(depth)
    flat = rng.standard_normal(here.layout.num_values, dtype=np.float32) * np.float32(0.02)
    for name, view in here.layout.views(flat).items():
        if "norm" in name:
            view[:] = 1.0
    x = torch.from_numpy(rng.standard_normal((SAMPLES, TOKENS, width), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, VOCAB, (SAMPLES, TOKENS)))
    rows: list[dict[str, object]] = []
    for scene, num_steps in (("fresh", 0), ("learnt", steps)):
        learnt(here, flat, x, targets, num_steps)
        found = zip(results(there, flat, x, targets), results(here, flat, x, targets), strict=True)
        names = ("y", "gradient of x", "gradient of parameters")
        errors = {
            name: float((one - other).norm() / other.norm()) for name, (one, other) in zip(names, found, strict=True)
        }
        rows.append({"depth": depth, "compute": compute_dtype, "weights": scene, **errors})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 12, 24])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30, help="of learning the batch by heart")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    rows = []
    for compute_dtype in ("fp32", "bf16"):
        for depth in chosen.depths:
            made = spread(depth, compute_dtype, chosen.device, width=chosen.width, steps=chosen.steps)
            rows += made
            if not chosen.json:
                for row in made:
                    sys.stdout.write(json.dumps(row) + "\n")
    if chosen.json:
        said = {"device": chosen.device, "torch": torch.__version__, "rows": rows}
        sys.stdout.write(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
