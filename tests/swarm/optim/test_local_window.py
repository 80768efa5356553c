"""A window of inner steps against the same formulas in double precision; what it says, and what others begin with."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.norms import RUN_VALUES
from swarm.averaging.encoded import Encoded
from swarm.checkpoint.state import StageState
from swarm.core.errors import LocalError
from swarm.core.settings import (
    AveragingCodecName,
    AveragingSettings,
    CodecSettings,
    OptimizerSettings,
    RateTable,
    RunSettings,
)
from swarm.core.state.schedule import learning_rate
from swarm.model.layout import ParameterLayout
from swarm.model.link import link_to
from swarm.optim import adamw_there
from swarm.optim.carried_moments import CARRIED, Carried, CarriedMoments, places_of_moments
from swarm.optim.exact import ExactOptimizer, longest_first_moment
from swarm.optim.factored_moments import from_means, means_of
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import LocalWindow, Window, WindowThere, own_start
from tests.pretend_device import OTHERS
from tests.verification.exhibits import small_settings

STEPS = 4
LAYOUT = ParameterLayout.of({"matrix": (8, 16), "norm": (16,)})
SIZE = LAYOUT.num_values


def settings(codec: AveragingCodecName = "fp32") -> RunSettings:
    return replace(
        small_settings(1),
        averaging=AveragingSettings(local_steps=STEPS),
        codecs=CodecSettings(averaging=codec),
        optimizer=OptimizerSettings(learning_rate=0.01, warmup_steps=2, total_steps=10, max_norm=1e6),
    )


def gradients(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SIZE).astype(np.float32) for _ in range(STEPS)]


def taken(run: RunSettings, start: np.ndarray, version: int, carried: Carried, seed: int) -> LocalWindow:
    window = LocalWindow(run, LAYOUT)
    window.begin(start, version, carried)
    for gradient in gradients(seed):
        window.take_mean(gradient)
    window.end()
    return window


def said(carried: CarriedMoments, window: LocalWindow) -> list[Encoded | None]:
    """What a round of this member alone would say of moments."""
    parts = carried.parts
    return [parts.result_codec(part).encode(window.values(parts[part]), seed=bytes(32)) for part in parts.moments]


def test_inner_steps_are_adamws_from_moments_that_go_on() -> None:
    run, start, version = settings(), np.ones(SIZE, dtype=np.float32), 1
    carried = CarriedMoments(run, LAYOUT)
    before = taken(run, start, 0, carried.at_first(), 7)
    begun = carried.after(carried.at_first(), said(carried, before))
    window = LocalWindow(run, LAYOUT)
    window.begin(start, version, begun)

    first = before.values(slice(SIZE, 2 * SIZE)).astype(np.float64)
    second = np.empty(SIZE, dtype=np.float32)
    from_means(means_in_bf16(before.values(carried.parts[-1])), LAYOUT, second)
    optimizer, weights, second = run.optimizer, start.astype(np.float64), second.astype(np.float64)
    first = np.clip(first, -longest_first_moment(optimizer) * np.sqrt(second), None)
    first = np.minimum(first, longest_first_moment(optimizer) * np.sqrt(second))
    for number, gradient in enumerate(gradients(1)):
        rate = learning_rate(run.inner, version * STEPS + number)
        assert window.take_mean(gradient).learning_rate == rate
        first = optimizer.beta1 * first + (1 - optimizer.beta1) * gradient
        second = optimizer.beta2 * second + (1 - optimizer.beta2) * gradient.astype(np.float64) ** 2
        unbiased = np.sqrt(second / (1 - optimizer.beta2 ** (STEPS + number + 1)))
        decay = np.where(np.arange(SIZE) < 128, optimizer.weight_decay, 0.0)
        moved = rate * first / (1 - optimizer.beta1 ** (STEPS + number + 1)) / (unbiased + optimizer.epsilon)
        weights = weights * (1 - rate * decay) - moved
    assert window.is_full
    window.end()
    np.testing.assert_allclose(window.weights, weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(window.values(slice(5, 40)), start[5:40] - window.weights[5:40])
    np.testing.assert_allclose(window.values(slice(SIZE, 2 * SIZE)), first, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(window.values(carried.parts[-1]), means_of(second.astype(np.float32), LAYOUT), rtol=1e-5)


def means_in_bf16(means: np.ndarray) -> np.ndarray:
    """As a result has them: rounded to the nearest."""
    bits = means.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    found: np.ndarray = rounded.astype(np.uint32).view(np.float32)
    return found


def test_the_schedule_goes_by_inner_steps_and_is_as_long_as_the_run() -> None:
    run = settings()
    assert run.inner.total_steps == STEPS * run.optimizer.total_steps
    assert run.inner.warmup_steps == STEPS * run.optimizer.warmup_steps
    peak = STEPS * run.optimizer.warmup_steps - 1
    assert learning_rate(run.inner, peak) == run.optimizer.learning_rate


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "int2"])
def test_a_window_knows_nothing_but_what_is_carried(codec: AveragingCodecName) -> None:
    run, start = settings(codec), np.ones(SIZE, dtype=np.float32)
    carried = CarriedMoments(run, LAYOUT)
    first = taken(run, start, 0, carried.at_first(), 2)
    begun = carried.after(carried.at_first(), said(carried, first))
    assert begun.scalars == {"beta1_power": 0.9 * 0.9 * 0.9 * 0.9, "beta2_power": 0.95 * 0.95 * 0.95 * 0.95}
    used = LocalWindow(run, LAYOUT)
    used.begin(start * 2, 1, begun)
    for gradient in gradients(2):
        used.take_mean(gradient)
    fresh = taken(run, start, 5, begun, 3)
    used.begin(start, 5, begun)
    for gradient in gradients(3):
        used.take_mean(gradient)
    used.end()
    for part in carried.parts:
        np.testing.assert_array_equal(fresh.values(part), used.values(part))
    other = taken(run, start, 5, carried.at_first(), 3)
    assert not np.array_equal(other.weights, fresh.weights)


def test_parts_that_say_nothing_leave_their_moments_as_they_were() -> None:
    run = settings("int2")
    carried = CarriedMoments(run, LAYOUT)
    window = taken(run, np.ones(SIZE, dtype=np.float32), 0, carried.at_first(), 2)
    both = said(carried, window)
    one = carried.after(carried.at_first(), [both[0], None])
    first, second = places_of_moments(carried.parts)
    assert one.encoded[first].tobytes() == bytes(both[0] or b"")
    assert not one.encoded[second].any()


def test_no_step_is_long_whatever_is_said_of_moments() -> None:
    """Where second moments are said to be nearly nothing, or less, a step is no longer than AdamW's longest."""
    run, start = settings(), np.zeros(SIZE, dtype=np.float32)
    carried = CarriedMoments(run, LAYOUT)
    honest = taken(run, start, 0, carried.at_first(), 2)
    for share in (1e-12, 0.0, -1.0):
        first, second = (honest.values(carried.parts[part]).copy() for part in carried.parts.moments)
        lie = [carried.parts.result_codec(1).encode(first, seed=bytes(32))]
        lie.append(carried.parts.result_codec(2).encode(second * np.float32(share), seed=bytes(32)))
        window = LocalWindow(run, LAYOUT)
        window.begin(start, 1, carried.after(carried.at_first(), [*lie]))
        rate = window.take_mean(gradients(4)[0] * np.float32(1e-3)).learning_rate
        beta1, beta2 = run.optimizer.beta1, run.optimizer.beta2
        corrected = np.sqrt(1 - beta2 ** (STEPS + 1)) / (1 - beta1 ** (STEPS + 1))
        most = rate * longest_first_moment(run.optimizer) * corrected
        assert np.abs(window.weights).max() <= most * 1.0001


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    run, start = settings(), np.ones(SIZE, dtype=np.float32)
    window = LocalWindow(run, LAYOUT)
    window.begin(start, 0, CarriedMoments(run, LAYOUT).at_first())
    with pytest.raises(LocalError, match="nothing was changed"):
        window.take_mean(np.full(SIZE, np.nan, dtype=np.float32))
    window.end()
    assert window.steps_taken == 0
    assert not window.values(slice(0, SIZE)).any()


def test_the_outer_step_is_exactly_the_weights_less_the_mean() -> None:
    rated = replace(settings().optimizer, rates=(RateTable(tensors="matrix", times=0.3),))
    run, weights, mean = replace(settings(), optimizer=rated), *gradients(4)[:2]
    optimizer = ExactOptimizer.of(run.outer, LAYOUT)
    assert not optimizer.moments
    for version in (0, 9):
        out = np.empty_like(weights)
        optimizer.step(weights, mean, step=version, clip_norm=run.outer.max_norm, out=out)
        np.testing.assert_array_equal(out, weights - mean)


def state_of(weights: np.ndarray, version: int, carried: Carried) -> StageState:
    return StageState(version, LAYOUT, weights, {CARRIED: carried.encoded}, dict(carried.scalars))


def contribution(carried: CarriedMoments, window: Window, seed: int) -> list[memoryview]:
    parts = carried.parts
    return [
        parts.contribution_codec(part).encode(np.ascontiguousarray(window.values(where)), seed=bytes([seed]) * 32)
        for part, where in enumerate(parts)
    ]


@pytest.mark.parametrize("codec", ["fp32", "int2", "int8"])
def test_where_a_member_has_come_to_by_itself_is_what_it_has_said(codec: AveragingCodecName) -> None:
    run, start = settings(codec), np.ones(SIZE, dtype=np.float32)
    carried = CarriedMoments(run, LAYOUT)
    window = taken(run, start, 0, carried.at_first(), 2)
    made = contribution(carried, window, 5)
    weights, own = own_start(carried, state_of(start, 0, carried.at_first()), made)
    way = np.empty(SIZE, dtype=np.float32)
    for part, where in enumerate(carried.parts.gradient):
        carried.parts.contribution_codec(part).decode(made[part], way[where])
    np.testing.assert_array_equal(weights, start - way)
    if codec == "fp32":
        np.testing.assert_array_equal(weights, window.weights)
    assert own.scalars == carried.powers_after(carried.at_first().scalars)
    optimizer = ExactOptimizer.of(run.inner, LAYOUT)
    carried.load(own, optimizer)
    first = np.empty(SIZE, dtype=np.float32)
    carried.parts.contribution_codec(1).decode(made[1], first)
    shortened = np.abs(optimizer.moments["first"]) < np.abs(first)
    assert shortened.mean() < 0.8
    np.testing.assert_array_equal(optimizer.moments["first"][~shortened], first[~shortened])


@pytest.mark.parametrize("codec", ["fp32", "int2"])
@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_window_that_began_from_elsewhere_ends_with_the_moments_of_one_from_the_version(
    at: int, codec: AveragingCodecName
) -> None:
    """What its steps have moved since stays; moments are sums, so that those of the gradients are the same."""
    run, rng = settings(codec), np.random.default_rng(8)
    carried = CarriedMoments(run, LAYOUT)
    before = taken(run, np.ones(SIZE, dtype=np.float32), 0, carried.at_first(), 7)
    version = carried.after(carried.at_first(), said(carried, before))
    other = taken(run, np.ones(SIZE, dtype=np.float32), 0, carried.at_first(), 6)
    elsewhere = carried.after_own(carried.at_first(), contribution(carried, other, 1))
    start, own = (rng.standard_normal(SIZE, dtype=np.float32) for _ in range(2))
    straight, moved = LocalWindow(run, LAYOUT), LocalWindow(run, LAYOUT)
    straight.begin(start, 1, version)
    moved.begin(own.copy(), 1, elsewhere)
    for number, gradient in enumerate(gradients(3)):
        if number == at:
            way = moved.weights - own
            moved.begin_from(start, version)
            np.testing.assert_allclose(moved.weights, start + way, atol=1e-6)
        straight.take_mean(gradient)
        moved.take_mean(gradient)
    if at == STEPS:
        moved.begin_from(start, version)
    straight.end()
    moved.end()
    for part in carried.parts.moments:
        where = carried.parts[part]
        np.testing.assert_allclose(moved.values(where), straight.values(where), rtol=1e-4, atol=1e-6)
    difference = np.abs(moved.values(slice(0, SIZE)) - straight.values(slice(0, SIZE))).max()
    assert difference == 0.0 if at == 0 else 0.0 < difference < STEPS * 0.05


def test_what_comes_of_a_version_in_pieces_moves_a_window_there_and_the_whole_changes_no_more() -> None:
    run, rng = settings(), np.random.default_rng(9)
    carried = CarriedMoments(run, LAYOUT)
    start, own = (rng.standard_normal(SIZE, dtype=np.float32) for _ in range(2))
    window = LocalWindow(run, LAYOUT)
    window.begin(own.copy(), 1, carried.at_first())
    window.take_mean(gradients(3)[0])
    way = window.weights - own
    few = slice(7, 30)
    window.move([(few, start[few])])
    expected = own + way
    expected[few] = (start + way)[few]
    np.testing.assert_allclose(window.weights, expected, atol=1e-6)
    window.begin_from(start, carried.at_first())
    np.testing.assert_allclose(window.weights, start + way, atol=1e-6)
    window.end()
    np.testing.assert_allclose(window.values(slice(0, SIZE)), -way, atol=1e-6)


@pytest.mark.parametrize("device", OTHERS)
def test_on_a_device_every_bit_is_the_hosts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_there, "PIECE_VALUES", 2 * RUN_VALUES)
    layout = ParameterLayout.of({"a.norm": (3,), "matrix": (129, 257), "norm": (17,), "z": (2, 5)})
    rated = replace(settings().optimizer, rates=(RateTable(tensors="matrix", times=0.3),))
    run, rng, link = replace(settings(), optimizer=rated), np.random.default_rng(3), link_to(torch.device(device))
    start = rng.standard_normal(layout.num_values, dtype=np.float32)
    carried = CarriedMoments(run, layout)
    here, there = LocalWindow(run, layout), WindowThere(run, layout, link)
    for version in (0, 1):  # the second begins with moments of the first
        begun = carried.at_first() if version == 0 else carried.after(carried.at_first(), said(carried, here))
        for window in (here, there):
            window.begin(start.copy(), version, begun)
        for number in range(STEPS):
            for window in (here, there):
                if number == 1:
                    window.move([(slice(5, 4000), start[9:4004])])
                elif number == 3:
                    window.begin_from(start[::-1].copy(), begun)
            # Of every magnitude: moments and weights that are flushed, and some that are below 2^-126 on the way.
            values = np.ldexp(rng.standard_normal(layout.num_values), rng.integers(-140, 12, layout.num_values))
            values[::11] = 0.0
            sums = [GradientSum(layout.num_values), GradientSum(layout.num_values, link)]
            for gradient in sums:
                gradient.flat.copy_(torch.from_numpy(values.astype(np.float32)))
                gradient.add_tokens(7)
            assert here.take(sums[0]) == there.take(sums[1])
            weights = link.fetch(there.weights).numpy()
            assert weights.tobytes() == np.asarray(here.weights).tobytes()
        for window in (here, there):
            window.end()
        for part in carried.parts:
            assert there.values(part).tobytes() == here.values(part).tobytes()


@pytest.mark.parametrize("device", OTHERS)
def test_on_a_device_too_a_batch_that_is_not_finite_changes_nothing(device: str) -> None:
    run, link = settings(), link_to(torch.device(device))
    window, start = WindowThere(run, LAYOUT, link), np.ones(SIZE, dtype=np.float32)
    window.begin(start, 0, CarriedMoments(run, LAYOUT).at_first())
    gradient = GradientSum(SIZE, link)
    with pytest.raises(LocalError, match="no microbatch"):
        window.take(gradient)
    gradient.flat.fill_(torch.inf)
    gradient.add_tokens(3)
    with pytest.raises(LocalError, match="norm inf"):
        window.take(gradient)
    assert window.steps_taken == 0
    window.end()
    assert not window.values(slice(0, SIZE)).any()
    assert not window.values(slice(SIZE, 2 * SIZE)).any()
