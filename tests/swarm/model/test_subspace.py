"""Hops of few values are those of the ordinary model that the trained tensors multiply out to, there and back."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.core.errors import RemoteError, SettingsError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.model.families import canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel
from swarm.model.subspace import WithinSubspace, basis_of, check_subspace, fixed_rows, multiplied_out
from tests.swarm.model.tiny_models import CONFIGS, CUTS, tiny_model, token_batch

HELD = ("llama", "qwen2", "qwen3-window", "granite", "phi3", "smollm3", "gpt2", "gpt_neox")


def narrow_model(config: str, num_stages: int = 3, **settings: Any) -> ModelSettings:
    fields = CONFIGS[config] | {"tie_word_embeddings": False}
    given = {"subspace": 4, "subspace_seed": 7} | settings
    return ModelSettings(config_json=canonical_config_json(fields), stage_layers=CUTS[num_stages], **given)


def passed(
    model: ModelSettings, flats: list[NDArray[np.float32]], mode: ComputeMode | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Size]]:
    """Logits, gradients by name, and the shapes of what went over hops."""
    x_BL, targets_BL = token_batch(2, 24)
    stages = [StageModel(model, stage).computing(mode) for stage in range(model.num_stages)]
    versions = [stage.weights(flat) for stage, flat in zip(stages, flats, strict=True)]
    x: Any = x_BL
    kept, shapes, sums = [], [], [torch.zeros(stage.layout.num_values) for stage in stages]
    for stage, version in zip(stages[:-1], versions, strict=False):
        y, saved = stage.forward(version, x, keep=True)
        kept.append(saved)
        shapes.append(y.shape)
        x = WithinSubspace(y, x_BL) if model.subspace > 1 else y
    logits = stages[-1].logits(versions[-1], x)
    _, _, end = stages[-1].loss(versions[-1], x, targets_BL, keep=True)
    assert end is not None
    grad = stages[-1].loss_backward(end, sums[-1])
    for stage, saved, values in reversed(list(zip(stages, kept, sums, strict=False))):
        assert grad is not None
        assert saved is not None
        shapes.append(grad.shape)
        grad = stage.backward(saved, grad, values)
    gradients: dict[str, torch.Tensor] = {}
    for stage, values in zip(stages, sums, strict=True):
        gradients |= stage.layout.views(values)
    return logits, gradients, shapes


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("config", HELD)
def test_hops_of_few_values_equal_the_model_multiplied_out(config: str) -> None:
    model = narrow_model(config)
    whole = replace(model, subspace=1, subspace_seed=0)
    flats = list(initial_weights(model, 3, None))
    pairs = zip([stage_layout(model, stage) for stage in range(3)], flats, strict=True)
    ordinary = [
        multiplied_out(model, layout.views(flat), stage_layout(whole, stage))
        for stage, (layout, flat) in enumerate(pairs)
    ]
    logits, gradients, shapes = passed(model, flats)
    expected, whole_gradients, _ = passed(whole, ordinary)
    assert {shape[-1] for shape in shapes} == {16}
    assert off(logits, expected) < 1e-5
    lift_DK = torch.from_numpy(basis_of(64, 16, 7)) * 2
    narrower = 0
    for name, wide in whole_gradients.items():
        if wide.shape != gradients[name].shape:
            narrower += 1
            wide = wide @ lift_DK if wide.shape[0] == gradients[name].shape[0] else lift_DK.T @ wide
        assert off(gradients[name], wide) < 1e-4, name
    assert narrower >= 7  # the embedding, and two products of each layer but the last


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_recomputing_and_pieces_change_nothing_but_rounding(compute_dtype: str) -> None:
    model = narrow_model("llama", compute_dtype=compute_dtype)
    flats = list(initial_weights(model, 3, None))
    _, expected, _ = passed(model, flats)
    _, again, _ = passed(replace(model, recompute=True), flats)
    _, in_pieces, _ = passed(model, flats, ComputeMode(samples_at_once=1, recompute=True))
    for name, gradient in expected.items():
        assert torch.equal(gradient, again[name])
        assert off(in_pieces[name], gradient) < {"fp32": 1e-5, "bf16": 2e-2}[compute_dtype]


def test_what_is_fixed_has_the_same_bits_everywhere() -> None:
    made = hashlib.sha256()
    for width, size in ((64, 4), (96, 24), (768, 24)):
        basis = basis_of(width, size, 5)
        assert np.abs(basis.T.astype(np.float64) @ basis - np.eye(size)).max() < 1e-6
        made.update(basis.tobytes())
    rows = fixed_rows(torch.arange(1000), 66, 5)
    made.update(rows.numpy().tobytes())
    assert made.hexdigest()[:16] == "1035b0d7fe6929cf"
    assert rows.mean().abs() < 1
    assert rows.std() == pytest.approx(73.9, rel=0.01)
    near = torch.corrcoef(rows)
    assert (near - torch.eye(1000)).abs().max() < 0.7
    assert not torch.equal(fixed_rows(torch.arange(1000), 66, 6), rows)


def test_a_cut_changes_nothing_that_is_trained() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for num_stages in (1, 2, 3):
        model = narrow_model("llama", num_stages)
        found: dict[str, tuple[int, ...]] = {}
        for stage in range(num_stages):
            layout = stage_layout(model, stage)
            found |= dict(zip(layout.names, layout.shapes, strict=True))
        shapes = shapes or found
        assert found == shapes


def test_values_without_ids_or_with_other_ids_are_the_senders_fault() -> None:
    model = narrow_model("llama")
    stage = StageModel(model, 1)
    weights, values = stage.weights(list(initial_weights(model, 3, None))[1]), torch.ones(2, 8, 16)
    for x in (
        values,
        WithinSubspace(values, torch.zeros(2, 9, dtype=torch.int64)),
        WithinSubspace(values, torch.full((2, 8), 1 << 20)),
        WithinSubspace(torch.ones(2, 8, 64), torch.zeros(2, 8, dtype=torch.int64)),
    ):
        with pytest.raises(RemoteError, match=r"hidden values|token ids|ids "):
            stage.forward(weights, x, keep=False)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tiny_model("gemma2", 2, subspace=4), "gemma2 has norms between its products"),
        (tiny_model("mixtral", 2, subspace=4), "mixtral has experts"),
        (tiny_model("qwen3-tied", 2, subspace=4), "tie_word_embeddings"),
        (tiny_model("llama", 2, subspace=5), "does not divide"),
        (tiny_model("llama", 2, subspace=4, adapters=AdapterSettings(rank=2)), "adapters.rank = 0"),
    ],
)
def test_a_model_that_can_have_no_subspace_is_refused_by_name(model: ModelSettings, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        check_subspace(model)
