"""The exact optimizer against torch's, its checks and its state; and the gradient sum that feeds it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.norms import norm_of_parts, tree_norm
from kernels.threads import Threads
from swarm.core.errors import LocalError
from swarm.core.settings import PART_VALUES, OptimizerSettings, RateTable
from swarm.core.state.schedule import learning_rate
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer, extrapolated, rated_ranges
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.matrices import Matrices, Matrix

SIZE = 3_000
DECAY_RANGES = ((100, 1_000), (1_000, 1_500), (2_900, 3_000))
RATED_RANGES = ((50, 200, 0.0), (1_400, 2_000, 0.25), (2_950, 3_000, 4.0))
ADAMW = OptimizerSettings(learning_rate=0.02, warmup_steps=5, total_steps=60)
NADAMW = OptimizerSettings(correction="nadamw", learning_rate=0.02, warmup_steps=5, total_steps=60)
SGD = OptimizerSettings(name="sgd", learning_rate=0.2, warmup_steps=5, total_steps=60)
Floats = NDArray[np.float32]
MUON = OptimizerSettings(name="muon", learning_rate=0.02, warmup_steps=5, total_steps=60)
MATRICES = (Matrix(150, 30, 20), Matrix(800, 7, 40), Matrix(1_100, 40, 7))
RUNS = [*Matrices(MATRICES, SIZE).runs(slice(0, SIZE))]
FORMATS = [ADAMW, NADAMW, SGD, MUON, replace(ADAMW, moments="int8"), replace(NADAMW, moments="int8")]


def ours(
    settings: OptimizerSettings, weights: Floats, gradients: list[Floats], clip_norm: float, *, rated: bool = False
) -> Floats:
    optimizer = ExactOptimizer(
        settings,
        num_values=weights.size,
        decay_ranges=DECAY_RANGES,
        rated_ranges=RATED_RANGES if rated else (),
        matrices=MATRICES,
    )
    for step, gradient in enumerate(gradients):
        new = np.empty_like(weights)
        optimizer.step(weights, gradient, step=step, clip_norm=clip_norm, out=new)
        weights = new
    return weights


def theirs(
    settings: OptimizerSettings, weights: Floats, gradients: list[Floats], clip_norm: float, *, rated: bool = False
) -> Floats:
    """torch's optimizer in fp64, a group for each weight decay and rate; SGD's decoupled decay by hand."""
    decays, times = np.zeros(weights.size), np.ones(weights.size)
    for start, stop in DECAY_RANGES:
        decays[start:stop] = settings.weight_decay
    for start, stop, rate in RATED_RANGES if rated else ():
        times[start:stop] = rate
    kinds = sorted({*zip(decays.tolist(), times.tolist(), strict=True)})
    masks = [torch.from_numpy((decays == decay) & (times == rate)) for decay, rate in kinds]
    parameters = [torch.nn.Parameter(torch.from_numpy(weights).double()[mask]) for mask in masks]
    plain = settings.name == "sgd"
    groups: list[dict[str, Any]] = [
        {"params": [one], "weight_decay": 0.0 if plain else decay}
        for one, (decay, _) in zip(parameters, kinds, strict=True)
    ]
    betas = (settings.beta1, settings.beta2)
    if settings.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum)
    elif settings.correction == "nadamw":
        optimizer = torch.optim.NAdam(groups, betas=betas, eps=settings.epsilon, decoupled_weight_decay=True)
    else:
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=settings.epsilon)
    for step, gradient in enumerate(gradients):
        scaled = torch.from_numpy(gradient).double()
        scaled = scaled * min(1.0, clip_norm / float(scaled.norm()))
        for group, (decay, rate) in zip(optimizer.param_groups, kinds, strict=True):
            group["lr"] = rate * learning_rate(settings, step)
            if plain:
                with torch.no_grad():
                    group["params"][0].mul_(1 - group["lr"] * decay)
        for parameter, mask in zip(parameters, masks, strict=True):
            parameter.grad = scaled[mask]
        optimizer.step()
    result = torch.empty(weights.size, dtype=torch.float64)
    for parameter, mask in zip(parameters, masks, strict=True):
        result[mask] = parameter.detach()
    return result.numpy().astype(np.float32)


@pytest.mark.parametrize("settings", [ADAMW, NADAMW, SGD], ids=["adamw", "nadamw", "sgd"])
@pytest.mark.parametrize(("clip_norm", "rated"), [(1.0, False), (1e9, False), (1.0, True)])
def test_weights_agree_with_torch_when_50_steps_are_taken(
    settings: OptimizerSettings, clip_norm: float, rated: bool
) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE, dtype=np.float32)
    slope = rng.standard_normal(SIZE, dtype=np.float32)
    gradients = [slope + rng.standard_normal(SIZE, dtype=np.float32) for _ in range(50)]
    got, wanted = (run(settings, weights, gradients, clip_norm, rated=rated) for run in (ours, theirs))
    assert tree_norm(got - wanted) <= 1e-5 * tree_norm(wanted - weights), "relative to how far training has moved"
    assert not rated or (got[50:200] == weights[50:200]).all(), "no times the rate, and no decay"


def test_a_tensors_rate_is_that_of_the_first_word_in_its_name() -> None:
    layout = ParameterLayout.of(
        {"a.layers.1.down": (2, 3), "a.layers.10.down": (2,), "a.lora_B.down": (4, 1), "z": (5,)}
    )
    rates = [("layers.1", 0.0), ("down", 3.0), ("lora", 9.0)]
    settings = replace(ADAMW, rates=tuple(RateTable(tensors=word, times=times) for word, times in rates))
    assert rated_ranges(settings, layout) == ((0, 6, 0.0), (6, 8, 3.0), (8, 12, 3.0))
    weights, gradient = np.ones(17, np.float32), np.ones(17, np.float32)
    out = np.empty_like(weights)
    report = ExactOptimizer.of(settings, layout).step(weights, gradient, step=0, clip_norm=1e9, out=out)
    moved = (weights - out) / report.learning_rate
    decay = settings.weight_decay
    assert moved == pytest.approx([0.0] * 6 + [3.0] * 2 + [3.0 * (1 + decay)] * 4 + [1.0] * 5, rel=1e-4)


def of_torch(settings: OptimizerSettings, weights: Floats, gradients: list[Floats]) -> Floats:
    """torch's Muon for the matrices, its AdamW for the rest."""
    flat = torch.from_numpy(weights.copy())
    matrices = [torch.nn.Parameter(flat[one.where].view(one.rows, one.columns)) for one in MATRICES]
    rest = [torch.nn.Parameter(flat[run.where]) for run in RUNS if not run.is_turned]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, momentum=settings.muon_momentum, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay),
    ]
    for step, gradient in enumerate(gradients):
        slope = torch.from_numpy(gradient)
        for run, parameter in zip(RUNS, in_order(matrices, rest), strict=True):
            parameter.grad = slope[run.where].view(parameter.shape)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            optimizer.step()
    return flat.numpy()


def in_order(matrices: list[torch.nn.Parameter], rest: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    turned, others = iter(matrices), iter(rest)
    return [next(turned) if run.is_turned else next(others) for run in RUNS]


def test_muon_moves_matrices_as_torch_does_and_the_rest_as_adamw() -> None:
    """torch turns matrices in bf16, which is some percent off."""
    rng = np.random.default_rng(0)
    weights, slope = rng.standard_normal((2, SIZE), dtype=np.float32)
    gradients = [slope + rng.standard_normal(SIZE, dtype=np.float32) for _ in range(20)]
    everywhere = ExactOptimizer(MUON, num_values=SIZE, decay_ranges=((0, SIZE),), matrices=MATRICES)
    got = weights
    for step, gradient in enumerate(gradients):
        new = np.empty_like(got)
        everywhere.step(got, gradient, step=step, clip_norm=1e9, out=new)
        got = new
    wanted = of_torch(MUON, weights, gradients)
    for run in RUNS:
        moved = wanted[run.where] - weights[run.where]
        assert tree_norm(got[run.where] - wanted[run.where]) < (0.05 if run.is_turned else 1e-5) * tree_norm(moved)


def test_muon_keeps_one_moment_of_what_it_turns() -> None:
    turned = sum(one.rows * one.columns for one in MATRICES)
    optimizer = ExactOptimizer(MUON, num_values=SIZE, decay_ranges=DECAY_RANGES, matrices=MATRICES)
    assert {name: array.size for name, array in optimizer.moments.items()} == {
        "momentum": SIZE,
        "second": SIZE - turned,
    }


def test_report_says_what_was_done_when_a_gradient_is_long_or_short() -> None:
    weights = np.ones(SIZE, dtype=np.float32)
    gradient = np.full(SIZE, 2.0, dtype=np.float32)
    norm = tree_norm(gradient)
    optimizer = ExactOptimizer(ADAMW, num_values=SIZE, decay_ranges=())
    report = optimizer.step(weights, gradient, step=2, clip_norm=1.0, out=np.empty_like(weights))
    assert (report.gradient_norm, report.clipped, report.learning_rate) == (norm, True, learning_rate(ADAMW, 2))
    assert not optimizer.step(weights, gradient, step=2, clip_norm=norm, out=np.empty_like(weights)).clipped


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("settings", [ADAMW, NADAMW, SGD], ids=["adamw", "nadamw", "sgd"])
def test_nothing_changes_when_the_gradient_is_not_finite(settings: OptimizerSettings, bad: float) -> None:
    optimizer = ExactOptimizer(settings, num_values=10, decay_ranges=((0, 10),))
    weights, gradient, out = np.ones(10, np.float32), np.ones(10, np.float32), np.zeros(10, np.float32)
    optimizer.step(weights, gradient, step=0, clip_norm=1.0, out=out)
    moments = {name: array.tobytes() for name, array in optimizer.moments.items()}
    scalars, before = dict(optimizer.scalars), out.tobytes()
    gradient[3] = bad
    with pytest.raises(LocalError, match="step 7 has norm"):
        optimizer.step(weights, gradient, step=7, clip_norm=1.0, out=out)
    assert {name: array.tobytes() for name, array in optimizer.moments.items()} == moments
    assert (optimizer.scalars, out.tobytes()) == (scalars, before)


def test_decay_shrinks_only_its_ranges_when_the_gradient_is_zero() -> None:
    weights, out = np.ones(SIZE, dtype=np.float32), np.empty(SIZE, dtype=np.float32)
    for settings in (ADAMW, NADAMW, SGD, MUON):
        optimizer = ExactOptimizer(settings, num_values=SIZE, decay_ranges=DECAY_RANGES, matrices=MATRICES)
        optimizer.step(weights, np.zeros(SIZE, np.float32), step=9, clip_norm=1.0, out=out)
        shrunk = np.flatnonzero(out != 1.0)
        np.testing.assert_array_equal(shrunk, np.concatenate([np.arange(*bounds) for bounds in DECAY_RANGES]))
        assert np.unique(out[shrunk]) == np.float32(1.0 - learning_rate(settings, 9) * 0.1)


@pytest.mark.parametrize("settings", FORMATS)
def test_training_goes_on_with_the_same_bits_when_state_is_saved_and_loaded(settings: OptimizerSettings) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE, dtype=np.float32)
    gradients = rng.standard_normal((6, SIZE), dtype=np.float32)
    optimizer = ExactOptimizer(settings, num_values=SIZE, decay_ranges=DECAY_RANGES, matrices=MATRICES)
    out = np.empty_like(weights)
    for step in range(3):
        optimizer.step(weights, gradients[step], step=step, clip_norm=1.0, out=out)
        weights, out = out, weights
    restored = ExactOptimizer(settings, num_values=SIZE, decay_ranges=DECAY_RANGES, matrices=MATRICES)
    restored.load_state({name: array.copy() for name, array in optimizer.state_arrays().items()}, optimizer.scalars)
    results = []
    for each in (optimizer, restored):
        current = weights
        for step in range(3, 6):
            new = np.empty_like(current)
            each.step(current, gradients[step], step=step, clip_norm=1.0, out=new)
            current = new
        results.append(current.tobytes() + b"".join(array.tobytes() for array in each.state_arrays().values()))
    assert results[0] == results[1]


def test_load_state_raises_and_changes_nothing_when_it_does_not_fit() -> None:
    optimizer = ExactOptimizer(ADAMW, num_values=10, decay_ranges=())
    good = np.ones(10, dtype=np.float32)
    scalars = {"beta1_power": 0.5, "beta2_power": 0.5}
    for arrays, products in (
        ({"first": good}, scalars),
        ({"first": good, "momentum": good}, scalars),
        ({"first": good, "second": good}, {"beta1_power": 0.5}),
        ({"first": good, "second": good[:9]}, scalars),
        ({"first": good, "second": good.astype(np.float64)}, scalars),
        ({"first": good, "second": good.reshape(2, 5)}, scalars),
    ):
        with pytest.raises(LocalError):
            optimizer.load_state(arrays, products)  # type: ignore[arg-type]
        assert not any(array.any() for array in optimizer.moments.values())
        assert optimizer.scalars == {"beta1_power": 1.0, "beta2_power": 1.0}


@pytest.mark.parametrize("settings", FORMATS)
def test_a_stage_without_values_steps_when_it_must(settings: OptimizerSettings) -> None:
    nothing = np.empty(0, dtype=np.float32)
    optimizer = ExactOptimizer(settings, num_values=0, decay_ranges=())
    report = optimizer.step(nothing, nothing, step=0, clip_norm=1.0, out=np.empty(0, dtype=np.float32))
    assert report.gradient_norm == 0.0


@pytest.mark.parametrize("settings", [ADAMW, NADAMW], ids=["adamw", "nadamw"])
def test_weights_stay_close_to_those_of_fp32_moments_when_moments_are_int8(settings: OptimizerSettings) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE, dtype=np.float32)
    slope = rng.standard_normal(SIZE, dtype=np.float32)
    gradients = [slope + rng.standard_normal(SIZE, dtype=np.float32) for _ in range(50)]
    moved = ours(settings, weights, gradients, 1.0) - weights
    error = ours(replace(settings, moments="int8"), weights, gradients, 1.0) - weights - moved
    assert tree_norm(error) < 0.01 * tree_norm(moved)


def test_int8_moments_take_two_bytes_a_value_and_a_scale_for_128() -> None:
    optimizer = ExactOptimizer(replace(ADAMW, moments="int8"), num_values=1_281, decay_ranges=())
    arrays = optimizer.state_arrays()
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "first": "int8",
        "second": "uint8",
        "second_scale": "float32",
    }
    assert sum(array.nbytes for array in arrays.values()) == 2 * 1_281 + 4 * 11
    with pytest.raises(LocalError, match="moment first is float32"):
        optimizer.load_state({name: array.astype(np.float32) for name, array in arrays.items()}, optimizer.scalars)
    with pytest.raises(ValueError, match="sgd"):
        ExactOptimizer(replace(SGD, moments="int8"), num_values=10, decay_ranges=())


@pytest.mark.parametrize("settings", FORMATS)
def test_bits_stay_when_threads_share_a_step_or_the_norm_is_known(settings: OptimizerSettings) -> None:
    size = 2 * PART_VALUES + 12_345
    rng = np.random.default_rng(0)
    weights, gradient = rng.standard_normal((2, size), dtype=np.float32)
    norm = norm_of_parts(gradient, part_values=PART_VALUES)
    results = []
    for count, known in ((1, None), (1, norm), (2, None), (4, norm)):
        ranges = ((0, PART_VALUES + 5), (PART_VALUES + 77, size - 1))
        matrices = (Matrix(1_000, 200, 300), Matrix(100_000, 900, 250))
        optimizer = ExactOptimizer(
            settings, num_values=size, decay_ranges=ranges, matrices=matrices, threads=Threads(count)
        )
        out = np.empty_like(weights)
        report = optimizer.step(weights, gradient, step=3, clip_norm=1.0, out=out, gradient_norm=known)
        assert report.gradient_norm == norm
        results.append(out.tobytes() + b"".join(array.tobytes() for array in optimizer.state_arrays().values()))
    assert len(set(results)) == 1


def test_extrapolation_repeats_the_last_update_when_numbers_are_exact() -> None:
    old, new = np.array([1.0, 2.0, -4.0], np.float32), np.array([1.5, 2.0, -8.0], np.float32)
    out = np.empty_like(old)
    extrapolated(new, old, out)
    assert out.tolist() == [2.0, 2.0, -12.0]


def test_mean_gradient_is_the_exact_quotient_when_microbatches_are_added() -> None:
    total = GradientSum(4)
    total.flat += torch.tensor([3.0, -0.0, 1e-38, 7.0])
    total.add_tokens(2)
    total.add_tokens(5)
    quotients = np.array([3, 0, 0, 7], dtype=np.float32) / np.float32(7)
    assert total.take_mean().tobytes() == quotients.tobytes()
    assert total.flat[0] == 3.0, "the sum stays until it is zeroed"
    total.zero()
    assert (total.num_tokens, total.flat.any().item()) == (0, False)
    with pytest.raises(LocalError, match="no microbatch"):
        total.take_mean()
