"""Second moments as numbers: exact of the present version, from above of an older one."""

from typing import Literal

import numpy as np
import pytest

from swarm.core.settings import OptimizerSettings
from swarm.optim.exact import ExactOptimizer
from swarm.optim.second_moments import second_moments

SIZE = 1024


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_moments_of_later_versions_bound_those_of_an_older_one(moments: Literal["fp32", "int8"]) -> None:
    settings = OptimizerSettings(total_steps=50, moments=moments)
    optimizer = ExactOptimizer(settings, num_values=SIZE, decay_ranges=())
    rng, weights = np.random.default_rng(0), np.zeros(SIZE, dtype=np.float32)
    scale = np.exp(rng.uniform(-6, 0, SIZE)).astype(np.float32)
    held = []
    for step in range(12):
        found = second_moments(settings, optimizer.moments)
        assert found is not None
        held.append(found.copy())
        gradient = (scale * rng.standard_normal(SIZE)).astype(np.float32)
        gradient *= rng.random(SIZE) < 0.3  # in most steps a value is not touched
        out = np.empty_like(weights)
        optimizer.step(weights, gradient, step=step, clip_norm=1e9, out=out)
        weights = out
        for old in range(max(0, step - 6), step + 1):
            above = second_moments(settings, optimizer.moments, steps_since=step + 1 - old)
            assert above is not None
            assert (above >= held[old] * np.float32(1 - 1e-5)).mean() > (0.999 if moments == "int8" else 0.99999)
    assert (held[-1] > 0).mean() > 0.5


def test_where_there_are_none_or_nothing_can_be_said_there_is_none() -> None:
    sgd = OptimizerSettings(name="sgd", total_steps=50)
    assert second_moments(sgd, ExactOptimizer(sgd, num_values=8, decay_ranges=()).moments) is None
    muon = OptimizerSettings(name="muon")
    assert second_moments(muon, ExactOptimizer(muon, num_values=8, decay_ranges=()).moments) is None
    forgetful = OptimizerSettings(beta2=0.0, total_steps=50)
    held = ExactOptimizer(forgetful, num_values=8, decay_ranges=()).moments
    assert second_moments(forgetful, held, steps_since=1) is None
    assert second_moments(forgetful, held) is not None
