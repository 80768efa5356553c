"""A window of inner steps against the same formulas in double precision; it starts anew from each version."""

from dataclasses import replace

import numpy as np
import pytest

from swarm.core.errors import LocalError
from swarm.core.settings import AveragingSettings, OptimizerSettings, RunSettings, Trust
from swarm.core.state.schedule import learning_rate
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer
from swarm.optim.local_window import LocalWindow
from tests.verification.exhibits import small_settings

STEPS = 4
LAYOUT = ParameterLayout.of({"matrix": (8, 16), "norm": (16,)})


def settings(trust: Trust = "public") -> RunSettings:
    return replace(
        small_settings(1),
        trust=trust,
        averaging=AveragingSettings(local_steps=STEPS),
        optimizer=OptimizerSettings(learning_rate=0.01, warmup_steps=2, total_steps=10, max_norm=1e6),
    )


def gradients(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(LAYOUT.num_values).astype(np.float32) for _ in range(STEPS)]


def test_inner_steps_are_adamws_whose_first_moment_begins_at_zero_and_is_not_corrected() -> None:
    run, start = settings(), np.random.default_rng(0).standard_normal(LAYOUT.num_values).astype(np.float32)
    window, version = LocalWindow(run, LAYOUT), 3
    window.begin(start, version)
    weights, first, second = start.astype(np.float64), np.zeros(LAYOUT.num_values), np.zeros(LAYOUT.num_values)
    optimizer = run.optimizer
    for number, gradient in enumerate(gradients(1)):
        assert window.take(gradient).learning_rate == learning_rate(run.inner, version * STEPS + number)
        rate = learning_rate(run.inner, version * STEPS + number)
        first = optimizer.beta1 * first + (1 - optimizer.beta1) * gradient
        second = optimizer.beta2 * second + (1 - optimizer.beta2) * gradient.astype(np.float64) ** 2
        unbiased = np.sqrt(second / (1 - optimizer.beta2 ** (number + 1)))
        decay = np.where(np.arange(LAYOUT.num_values) < 128, optimizer.weight_decay, 0.0)
        weights = weights * (1 - rate * decay) - rate * first / (unbiased + optimizer.epsilon)
    assert window.is_full
    np.testing.assert_allclose(window.weights, weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(window.way_back(slice(5, 40)), start[5:40] - window.weights[5:40])


def test_the_schedule_goes_by_inner_steps_and_is_as_long_as_the_run() -> None:
    run = settings()
    assert run.inner.total_steps == STEPS * run.optimizer.total_steps
    assert run.inner.warmup_steps == STEPS * run.optimizer.warmup_steps
    peak = STEPS * run.optimizer.warmup_steps - 1
    assert learning_rate(run.inner, peak) == run.optimizer.learning_rate


def test_among_friends_windows_are_one_run_of_adamw_from_a_new_start_each() -> None:
    run, start = settings("friends"), np.ones(LAYOUT.num_values, dtype=np.float32)
    window = LocalWindow(run, LAYOUT)
    whole = ExactOptimizer(run.inner, num_values=LAYOUT.num_values, decay_ranges=LAYOUT.decay_ranges)
    weights, version = start, 0
    for version in range(2):
        window.begin(weights, version)
        for number, gradient in enumerate(gradients(version)):
            out = np.empty_like(weights)
            whole.step(weights, gradient, step=version * STEPS + number, clip_norm=1e6, out=out)
            weights = out
            window.take(gradient)
        np.testing.assert_array_equal(window.weights, weights)
        weights = window.weights.copy()
    window.forget()
    window.begin(start, 0)
    fresh = LocalWindow(run, LAYOUT)
    fresh.begin(start, 0)
    assert window.take(gradients(5)[0]) == fresh.take(gradients(5)[0])
    np.testing.assert_array_equal(window.weights, fresh.weights)


def test_where_windows_are_replayed_one_knows_nothing_of_the_one_before() -> None:
    start = np.ones(LAYOUT.num_values, dtype=np.float32)
    fresh, used = LocalWindow(settings(), LAYOUT), LocalWindow(settings(), LAYOUT)
    used.begin(start * 2, 1)
    for gradient in gradients(2):
        used.take(gradient)
    for window in (fresh, used):
        window.begin(start, 5)
        for gradient in gradients(3)[:3]:
            window.take(gradient)
    np.testing.assert_array_equal(fresh.weights, used.weights)
    assert fresh.steps_taken == used.steps_taken == 3


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    window, start = LocalWindow(settings(), LAYOUT), np.ones(LAYOUT.num_values, dtype=np.float32)
    window.begin(start, 0)
    with pytest.raises(LocalError, match="nothing was changed"):
        window.take(np.full(LAYOUT.num_values, np.nan, dtype=np.float32))
    assert window.steps_taken == 0
    assert not window.way_back(slice(None)).any()


def test_the_outer_step_is_exactly_the_weights_less_the_mean() -> None:
    run, weights, mean = settings(), *gradients(4)[:2]
    optimizer = ExactOptimizer(run.outer, num_values=LAYOUT.num_values, decay_ranges=LAYOUT.decay_ranges)
    assert not optimizer.moments
    for version in (0, 9):
        out = np.empty_like(weights)
        optimizer.step(weights, mean, step=version, clip_norm=run.outer.max_norm, out=out)
        np.testing.assert_array_equal(out, weights - mean)
