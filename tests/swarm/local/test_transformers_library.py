"""The transformers library is loaded without what no stage uses, and what is asked for later is there."""

import json
import subprocess
import sys

import pytest

from tests import ROOT

TRAINS = """
import sys, torch
from swarm.local.transformers_library import transformers
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                  vocab_size=32, attn_implementation="sdpa")
model = transformers.LlamaForCausalLM(config)
x = torch.zeros(1, 8, dtype=torch.long)
model(x, labels=x).loss.backward()
"""
LOADED = """
spared = "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy.optimize"
print([name for name in spared if name in sys.modules])
"""
ASKED = """
import torch._dynamo, torch.distributed, torch.distributed.tensor
print([torch.distributed.is_available(), torch._dynamo.__file__ is not None,
       torch.compile(lambda y: y + 1, backend="eager")(torch.ones(1)).item()])
"""
MASKED = """
import torch
from swarm.local.transformers_library import masking_utils
assert "torch._dynamo" not in sys.modules
with masking_utils.TransformGetItemToIndex():
    at = torch.vmap(lambda place: torch.arange(4)[place])(torch.arange(4))
print(at.tolist())
"""


def printed(program: str) -> object:
    argv = [sys.executable, "-c", f"import sys\n{program}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].lower().replace("'", '"'))


@pytest.mark.parametrize(
    ("program", "said"),
    [(TRAINS + LOADED, []), (TRAINS + ASKED, [True, True, 2.0]), (MASKED, [0, 1, 2, 3])],
    ids=["it trains without", "the compiler is there when it is asked for", "masks by vmap"],
)
def test_a_model_is_loaded_without_the_compiler(program: str, said: object) -> None:
    assert printed(program) == said
