"""A stage held to its promise: the whole model's numbers, from a pure function."""

import json
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from swarm.core.errors import RemoteError, SettingsError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.settings import ModelSettings
from swarm.model import stage as stage_module
from swarm.model.stage import StageModel, Weights, _cross_entropy_gradient
from tests.swarm.model.tiny_models import VOCAB_SIZE, stages_of, tiny_model, token_batch, whole_model

SEQUENCE_LENGTH = 40


def run_pipeline(
    stages: list[StageModel], versions: list[Weights], x: torch.Tensor, targets_BL: torch.Tensor
) -> tuple[float, int, list[torch.Tensor]]:
    """Loss sum, counted tokens and each stage's gradient vector of one microbatch."""
    sums = [torch.zeros(stage.layout.num_values) for stage in stages]
    in_flight: list[Any] = []
    for stage, version in zip(stages[:-1], versions[:-1], strict=True):
        x, saved = stage.forward(version, x, keep=True)
        in_flight.append(saved)
    loss_sum, num_tokens, saved_loss = stages[-1].loss(versions[-1], x, targets_BL, keep=True)
    assert saved_loss is not None
    grad = stages[-1].loss_backward(saved_loss, sums[-1])
    for index in reversed(range(len(in_flight))):
        assert grad is not None
        grad = stages[index].backward(in_flight[index], grad, sums[index])
    assert grad is None
    return loss_sum, num_tokens, sums


def one_stage(config: str = "llama", **settings: Any) -> tuple[StageModel, np.ndarray]:
    model = tiny_model(config, 1, **settings)
    return stages_of(model, whole_model(model))[0]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("config", ["llama", "qwen3-tied", "qwen3-window", "gemma2"])
def test_stages_equal_the_whole_model(config: str, num_stages: int) -> None:
    model = tiny_model(config, num_stages)
    whole = whole_model(model)
    built = stages_of(model, whole)
    stages = [stage for stage, _ in built]
    versions = [stage.weights(flat) for stage, flat in built]
    x_BL, targets_BL = token_batch(3, SEQUENCE_LENGTH)

    hidden = x_BL
    for stage, version in zip(stages[:-1], versions[:-1], strict=True):
        hidden, _ = stage.forward(version, hidden, keep=False)
    whole_logits_BLV = whole(input_ids=x_BL, use_cache=False).logits
    assert torch.equal(stages[-1].logits(versions[-1], hidden), whole_logits_BLV)

    expected = functional.cross_entropy(whole_logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum")
    expected.backward()
    loss_sum, num_tokens, sums = run_pipeline(stages, versions, x_BL, targets_BL)
    assert loss_sum == expected.item()
    assert num_tokens == int((targets_BL != -100).sum())
    gradients: dict[str, torch.Tensor] = {}
    for stage, values in zip(stages, sums, strict=True):
        gradients |= stage.layout.views(values)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if json.loads(model.config_json).get("tie_word_embeddings") and num_stages > 1:
        # The whole model adds both gradients of the tied tensor; here each copy has its own.
        gradients[embedding] = gradients[embedding] + gradients.pop(head)
    assert set(gradients) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-6, f"{name}: {error}"


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_recompute_gives_the_same_bits(compute_dtype: str) -> None:
    x_BL, targets_BL = token_batch(2, SEQUENCE_LENGTH)
    results = []
    for recompute in (False, True):
        model = tiny_model("qwen3", 3, recompute=recompute, compute_dtype=compute_dtype)
        built = stages_of(model, whole_model(model))
        stages = [stage for stage, _ in built]
        results.append(run_pipeline(stages, [stage.weights(flat) for stage, flat in built], x_BL, targets_BL))
    assert results[0][:2] == results[1][:2]
    for kept, recomputed in zip(results[0][2], results[1][2], strict=True):
        assert torch.equal(kept, recomputed)
        assert kept.abs().sum() > 0


def test_recompute_keeps_only_the_input() -> None:
    model = tiny_model("llama", 2, recompute=True)
    stage, flat = stages_of(model, whole_model(model))[0]
    _, saved = stage.forward(stage.weights(flat), token_batch(2, 8)[0], keep=True)
    assert saved is not None
    assert saved.y_BLD is None


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_a_microbatch_computed_in_pieces_differs_by_rounding_alone(compute_dtype: str) -> None:
    x_BL, targets_BL = token_batch(5, SEQUENCE_LENGTH)
    built = stages_of(model := tiny_model("qwen3", 3, compute_dtype=compute_dtype), whole_model(model))
    versions = [stage.weights(flat) for stage, flat in built]
    whole, in_pieces = (
        run_pipeline([stage.computing(mode) for stage, _ in built], versions, x_BL, targets_BL)
        for mode in (None, ComputeMode(2, recompute=True))
    )
    rounding = 1e-6 if compute_dtype == "fp32" else 1e-2
    assert in_pieces[0] == pytest.approx(whole[0], rel=rounding)
    assert in_pieces[1] == whole[1]
    for once, summed in zip(whole[2], in_pieces[2], strict=True):
        assert (summed - once).norm() <= rounding * once.norm()


def test_no_more_samples_than_asked_for_are_computed_at_once() -> None:
    model = tiny_model("llama", 2)
    built = stages_of(model, whole_model(model))
    stages = [stage.computing(ComputeMode(2, recompute=True)) for stage, _ in built]
    versions = [stage.weights(flat) for stage, flat in built]
    seen: list[int] = []
    for version in versions:
        first: Any = version.stack.layers
        first[0].register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    run_pipeline(stages, versions, *token_batch(5, 8))
    assert sorted(set(seen)) == [1, 2]
    assert sum(seen) == 2 * 2 * 5, "forward, and forward again, of five samples at two stages"


def test_bf16_differs_from_fp32_by_its_rounding_only() -> None:
    x_BL, targets_BL = token_batch(2, SEQUENCE_LENGTH)
    sums = {}
    for compute_dtype in ("fp32", "bf16"):
        stage, flat = one_stage(compute_dtype=compute_dtype)
        sums[compute_dtype] = run_pipeline([stage], [stage.weights(flat)], x_BL, targets_BL)[2][0]
    error = (sums["bf16"] - sums["fp32"]).norm() / sums["fp32"].norm()
    assert 1e-4 < error < 5e-2


def test_work_in_flight_keeps_its_version_when_weights_move_on() -> None:
    model = tiny_model("llama", 2)
    (stage, old_flat), _ = stages_of(model, whole_model(model))
    x_BL, _ = token_batch(2, 16)
    grad_y = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    old = stage.weights(old_flat)
    expected = torch.zeros(stage.layout.num_values)
    y_alone, saved = stage.forward(old, x_BL, keep=True)
    assert saved is not None
    stage.backward(saved, grad_y, expected)

    y_old, saved_old = stage.forward(old, x_BL, keep=True)
    new = stage.weights(old_flat + np.float32(0.01))
    y_new, saved_new = stage.forward(new, x_BL, keep=True)
    assert saved_old is not None
    assert saved_new is not None
    into_new, into_old = torch.zeros_like(expected), torch.zeros_like(expected)
    stage.backward(saved_new, grad_y, into_new)
    del old
    stage.backward(saved_old, grad_y, into_old)
    assert torch.equal(y_old, y_alone)
    assert not torch.equal(y_new, y_old)
    assert torch.equal(into_old, expected)
    assert not torch.equal(into_new, expected)


def test_gradients_add_to_what_is_there() -> None:
    stage, flat = one_stage()
    version = stage.weights(flat)
    first, second = token_batch(2, 16, seed=1), token_batch(2, 16, seed=2)
    alone = [run_pipeline([stage], [version], *batch)[2][0] for batch in (first, second)]
    into = torch.zeros(stage.layout.num_values)
    for x_BL, targets_BL in (first, second):
        _, _, saved = stage.loss(version, x_BL, targets_BL, keep=True)
        assert saved is not None
        stage.loss_backward(saved, into)
    assert torch.allclose(into, alone[0] + alone[1], rtol=1e-5, atol=1e-6)


def test_weights_share_memory_and_are_never_written() -> None:
    stage, flat = one_stage()
    before = flat.copy()
    flat.flags.writeable = False
    version = stage.weights(flat)
    assert all(np.shares_memory(parameter.detach().numpy(), flat) for parameter in version.parameters.values())
    run_pipeline([stage], [version], *token_batch(2, 16))
    assert flat.tobytes() == before.tobytes()
    assert all(parameter.grad is None for parameter in version.parameters.values())


def test_loss_in_chunks_equals_loss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x_BL, targets_BL = token_batch(3, SEQUENCE_LENGTH)
    whole, flat = one_stage()
    monkeypatch.setattr(stage_module, "MAX_CHUNK_TOKENS", 7)
    chunked, _ = one_stage()
    at_once = run_pipeline([whole], [whole.weights(flat)], x_BL, targets_BL)
    in_chunks = run_pipeline([chunked], [chunked.weights(flat)], x_BL, targets_BL)
    assert in_chunks[0] == pytest.approx(at_once[0], rel=1e-6)
    assert in_chunks[1] == at_once[1]
    assert (in_chunks[2][0] - at_once[2][0]).norm() / at_once[2][0].norm() < 1e-6
    evaluated, _, nothing = chunked.loss(chunked.weights(flat), x_BL, targets_BL, keep=False)
    assert nothing is None
    assert evaluated == in_chunks[0]


def test_loss_is_zero_when_no_target_counts() -> None:
    stage, flat = one_stage()
    x_BL, _ = token_batch(2, 8)
    loss_sum, num_tokens, sums = run_pipeline([stage], [stage.weights(flat)], x_BL, torch.full_like(x_BL, -100))
    assert (loss_sum, num_tokens) == (0.0, 0)
    assert not sums[0].any()


def test_backward_from_two_threads_on_one_version_mixes_nothing() -> None:
    model = tiny_model("llama", 2)
    (stage, flat), _ = stages_of(model, whole_model(model))
    version = stage.weights(flat)
    grad_y = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    inputs = [token_batch(2, 16, seed=seed)[0] for seed in range(2)]

    def gradients(x_BL: torch.Tensor, into: torch.Tensor) -> None:
        _, saved = stage.forward(version, x_BL, keep=True)
        assert saved is not None
        stage.backward(saved, grad_y, into)

    alone = [torch.zeros(stage.layout.num_values) for _ in inputs]
    together = [torch.zeros(stage.layout.num_values) for _ in inputs]
    for x_BL, into in zip(inputs, alone, strict=True):
        gradients(x_BL, into)
    threads = [threading.Thread(target=gradients, args=pair) for pair in zip(inputs, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert (one - other).norm() / one.norm() < 1e-6


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 8),
        torch.zeros(16, dtype=torch.int64),
        torch.full((2, 8), VOCAB_SIZE),
        torch.full((2, 8), -1),
        torch.zeros(0, 8, dtype=torch.int64),
    ],
)
def test_token_ids_of_another_shape_or_range_are_the_senders_fault(x: torch.Tensor) -> None:
    model = tiny_model("llama", 2)
    stage, flat = stages_of(model, whole_model(model))[0]
    with pytest.raises(RemoteError) as caught:
        stage.forward(stage.weights(flat), x, keep=False)
    assert caught.value.kind == "malformed"


def test_hidden_values_gradients_and_targets_of_another_shape_are_the_senders_fault() -> None:
    model = tiny_model("llama", 2)
    (first, first_flat), (last, last_flat) = stages_of(model, whole_model(model))
    x_BL, targets_BL = token_batch(2, 8)
    y_BLD, saved = first.forward(first.weights(first_flat), x_BL, keep=True)
    assert saved is not None
    into = torch.zeros(first.layout.num_values)
    version = last.weights(last_flat)
    for wrong in (y_BLD[:, :4], y_BLD.double()):
        with pytest.raises(RemoteError):
            first.backward(saved, wrong, into)
    for wrong in (y_BLD[..., :32], y_BLD.to(torch.bfloat16), y_BLD[0]):
        with pytest.raises(RemoteError):
            last.forward(version, wrong, keep=False)
    for wrong in (targets_BL[:, :4], targets_BL.int(), targets_BL.clone().fill_(VOCAB_SIZE), -targets_BL.clamp_min(1)):
        with pytest.raises(RemoteError):
            last.loss(version, y_BLD, wrong, keep=False)
    assert not into.any()


def test_stage_is_refused_when_layers_do_not_fit_the_model() -> None:
    config_json = tiny_model("llama", 1).config_json
    for stage_layers in (((0, 2),), ((0, 2), (3, 4)), ((0, 2), (2, 2), (2, 4)), ((0, 5),), ()):
        model = ModelSettings(config_json=config_json, stage_layers=stage_layers)
        with pytest.raises(SettingsError, match="stage_layers"):
            StageModel(model, 0)
    with pytest.raises(SettingsError, match="stage = 3"):
        StageModel(tiny_model("llama", 3), 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_gpu_is_asked_for_where_there_is_none() -> None:
    with pytest.raises(SettingsError, match="device = cuda"):
        StageModel(tiny_model("llama", 1), 0, device="cuda")


def test_a_memorised_batch_has_an_exact_gradient() -> None:
    """Its softmax is 1 but for rounding: honest machines would differ by what is left of a difference from 1."""
    generator = torch.Generator().manual_seed(0)
    logits_CV = torch.randn(64, 97, generator=generator)
    targets_C = torch.randint(0, 97, (64,), generator=generator)
    logits_CV[torch.arange(64), targets_C] += torch.linspace(5.0, 25.0, 64)
    targets_C[::7] = -100
    wanted = logits_CV.double().requires_grad_()
    functional.cross_entropy(wanted, targets_C, reduction="sum").backward()
    assert wanted.grad is not None
    found = _cross_entropy_gradient(logits_CV, targets_C)
    assert bool((found[targets_C == -100] == 0).all())
    away = (found - wanted.grad).norm(dim=-1) / wanted.grad.norm(dim=-1).clamp(min=1e-30)
    assert float(away.max()) < 1e-5


def test_a_loss_that_is_not_finite_has_the_gradient_zero() -> None:
    model, flat = stages_of(tiny_model("llama", 2), whole_model(tiny_model("llama", 2)))[1]
    x, targets = torch.randn(2, 4, 64), token_batch(2, 4)[1]
    into = torch.full((model.layout.num_values,), 0.25)
    loss_sum, num_targets, saved = model.loss(model.weights(np.full_like(flat, np.nan)), x, targets, keep=True)
    assert saved is not None
    assert math.isnan(loss_sum)
    assert num_targets == int((targets >= 0).sum())
    grad_x = model.loss_backward(saved, into)
    assert grad_x is not None
    assert grad_x.shape == x.shape
    assert not grad_x.any()
    assert torch.equal(into, torch.full_like(into, 0.25))
