"""A swarm from a script: train a small model with two stages on this machine, look on, and take it away.

    python examples/train_locally.py out

Cut at the lines of dashes it is a notebook.
"""

import subprocess
import sys
from pathlib import Path

from swarm import Manifest, Run

# ---- a run: Python's own source code, bytes as tokens, a few steps ------------------------------------------------

out = Path(sys.argv[1] if len(sys.argv) > 1 else "out").absolute()
out.mkdir(parents=True, exist_ok=True)
manifest = Manifest.write(
    out / "run.toml",
    run={"name": "from-a-script"},
    model={
        "config": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        "stages": 2,
    },
    data={"max_text_mb": 1, "sequence_length": 32},
    batch={"microbatch_size": 4, "target_tokens": 512},
    optimizer={"learning_rate": 3e-3, "warmup_steps": 2, "total_steps": 96},
    checkpoint={"every_steps": 8, "snapshot_every": 8},
)

# ---- train, and watch ---------------------------------------------------------------------------------------------

model = out / "model"
with Run(manifest, peers=(1, 1), evaluate_tokens=4096) as run:
    print(f"look at {run.web}")
    for event in run.events(timeout_s=300):
        if event["event"] == "step" and event["num_targets"]:  # as the stage that reads the text tells of it
            print(f"step {event['step']}: loss {event['loss_sum'] / event['num_targets']:.3f}")
        if event["event"] == "checkpoint" and event["version"] == 8:  # as a stranger would, while the run goes on
            subprocess.run([sys.executable, "-m", "swarm", "pull", run.invite, str(model)], check=True)
    report = run.wait(timeout_s=60)

# ---- what came of it ----------------------------------------------------------------------------------------------

losses = [loss for _, loss in report["held_out_by_tokens"]]
print(f"held-out loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte after {report['tokens']} tokens")
print(f"the model as it was then, for AutoModelForCausalLM.from_pretrained: {model}")
