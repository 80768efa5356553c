"""The transformers library is loaded without what no stage uses, and what is asked for later is there."""

import json
import subprocess
import sys

from tests import ROOT

PROGRAM = """
import json, sys, torch
from swarm.local.transformers_library import transformers, without_data
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                  vocab_size=32, attn_implementation="sdpa")
x = torch.zeros(1, 8, dtype=torch.long)
transformers.LlamaForCausalLM(config)(x, labels=x).loss.backward()
with without_data():
    assert {one.device.type for one in transformers.LlamaModel(config).parameters()} == {"meta"}
spared = "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy.optimize"
loaded = [name for name in spared if name in sys.modules]
with transformers.masking_utils.TransformGetItemToIndex():
    masked = torch.vmap(lambda place: torch.arange(4)[place])(torch.arange(4))
import torch.distributed.tensor
compiled = torch.compile(lambda y: y + 1, backend="eager")(torch.ones(1))
print(json.dumps({"loaded after a step": loaded, "masked": masked.tolist(), "compiled": compiled.item(),
                  "distributed": torch.distributed.is_available(), "compiler": torch._dynamo.__file__ is not None}))
"""


def test_a_model_trains_without_the_compiler_and_the_compiler_is_there_when_it_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "loaded after a step": [],
        "masked": [0, 1, 2, 3],
        "compiled": 2.0,
        "distributed": True,
        "compiler": True,
    }
