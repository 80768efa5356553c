"""Every kind of model computes on a device what it computes on the CPU, up to rounding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.model.families import family_of
from swarm.model.initial import initial_weights
from swarm.model.rounding import rounded_otherwise
from swarm.model.stage import StageModel
from swarm.model.subspace import StageInput, WithinSubspace
from tests.pretend_device import OTHERS, PRETEND
from tests.swarm.model.adapters.test_exactness import base_of
from tests.swarm.model.tiny_models import CONFIGS, tiny_model, token_batch
from verification.replay.own_error import FEWEST_DRAWS

ROUNDING = {"fp32": 1e-4, "bf16": 6e-2}
"""Of gradients, in L2."""
LENGTH = 20
DOCUMENTS = (7, 13, LENGTH + 4)
"""Where they begin inside two samples."""
KINDS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    **{config: (config, {}, ()) for config in sorted(CONFIGS)},
    **{f"{config}, packed": (config, {}, DOCUMENTS) for config in ("llama", "gemma2", "qwen3-window")},
    "llama, LoRA": ("llama", {"adapters": AdapterSettings(rank=4)}, ()),
    "qwen3, QLoRA": ("qwen3", {"adapters": AdapterSettings(rank=4, base="nf4")}, ()),
    "llama, subspace": ("llama", {"subspace": 4}, ()),
}
AT_ONCE = ("llama", "gpt2", "qwen3, QLoRA", "llama, subspace")
"""In every `make test`."""
ROUNDED_AT_ONCE = ("llama", "qwen3-window, packed")


@pytest.mark.parametrize("device", OTHERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in AT_ONCE else pytest.mark.soak) for kind in KINDS]
)
def test_a_device_computes_every_kind_of_model(kind: str, dtype: str, device: str, tmp_path: Path) -> None:
    config, changed, bounds = KINDS[kind]
    if bounds and device == PRETEND:
        pytest.skip("masks of documents are made by torch.vmap, which knows no device that is pretended")
    model = tiny_model(config, 2, compute_dtype=dtype, **changed)
    if dtype == "bf16" and family_of(model.config_json).routed:
        pytest.skip("rounding has other experts chosen")
    here, there = (passed(model, place, bounds, tmp_path) for place in ("cpu", device))
    for one, other in zip(here, there, strict=True):
        assert float((one - other).norm()) <= ROUNDING[dtype] * float(one.norm())


@pytest.mark.parametrize("device", ["cpu", *OTHERS])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ROUNDED_AT_ONCE else pytest.mark.soak) for kind in KINDS]
)
def test_every_kind_of_model_is_rounded_otherwise_the_same_way_twice(
    kind: str, dtype: str, device: str, tmp_path: Path
) -> None:
    """By each of the kernels that draws take in turn, whatever masks a kind has."""
    config, changed, bounds = KINDS[kind]
    if bounds and device == PRETEND:
        pytest.skip("masks of documents are made by torch.vmap, which knows no device that is pretended")
    model = tiny_model(config, 2, compute_dtype=dtype, **changed)
    if dtype == "bf16" and family_of(model.config_json).routed:
        pytest.skip("rounding has other experts chosen")
    plain = passed(model, device, bounds, tmp_path)
    for draw in range(FEWEST_DRAWS):
        with rounded_otherwise(draw):
            moved = passed(model, device, bounds, tmp_path)
        for one, other in zip(moved, plain, strict=True):
            assert 0 < float((one - other).norm()) <= 2 * ROUNDING[dtype] * float(other.norm())
        with rounded_otherwise(draw):
            assert all(map(torch.equal, moved, passed(model, device, bounds, tmp_path)))


def passed(model: ModelSettings, device: str, bounds: Sequence[int], folder: Path) -> list[torch.Tensor]:
    """y and its gradient between two stages, and those of their parameters."""
    stages = [StageModel(model, stage, device=device) for stage in (0, 1)]
    if model.has_base:
        stages = [stage.on(base_of(model, folder)) for stage in stages]
        rng = np.random.default_rng(0)
        flats = [rng.normal(0, 0.1, stage.layout.num_values).astype(np.float32) for stage in stages]
    else:
        flats = list(initial_weights(model, 0, None))
    first, last = (stage.weights(flat) for stage, flat in zip(stages, flats, strict=True))
    sums = [torch.zeros(stage.layout.num_values, device=device) for stage in stages]
    ids, targets = token_batch(2, LENGTH)
    y, saved = stages[0].forward(first, ids, keep=True, bounds=bounds)
    x: StageInput = WithinSubspace(y, ids) if model.sends_ids else y
    _, _, loss = stages[1].loss(last, x, targets, keep=True, bounds=bounds)
    assert saved is not None
    assert loss is not None
    grad = stages[1].loss_backward(loss, sums[1])
    assert grad is not None
    stages[0].backward(saved, grad, sums[0])
    return [stages[0].link.fetch(tensor) for tensor in (y, grad, *sums)]
