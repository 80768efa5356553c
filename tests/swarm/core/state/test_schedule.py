"""The learning rate: warmup, half a cosine or level and a fall, the same bits everywhere."""

import math
from dataclasses import replace

import pytest

from swarm.core.settings import OptimizerSettings
from swarm.core.state.schedule import cos_of_half_turns, learning_rate

SETTINGS = OptimizerSettings(learning_rate=2e-3, warmup_steps=10, total_steps=110, final_learning_rate_share=0.1)


def test_rate_rises_in_equal_steps_when_warming_up() -> None:
    assert [learning_rate(SETTINGS, step) for step in (0, 4, 9)] == [2e-3 * 1 / 10, 2e-3 * 5 / 10, 2e-3]


def test_rate_follows_half_a_cosine_when_warm() -> None:
    for step in range(10, 110):
        expected = 2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 100)))
        assert learning_rate(SETTINGS, step) == pytest.approx(expected, rel=1e-14)


def test_rate_is_level_until_it_falls_by_a_root() -> None:
    level = replace(SETTINGS, schedule="wsd", decay_steps=25)
    assert {learning_rate(level, step) for step in range(9, 86)} == {2e-3}
    for step in range(85, 112):
        expected = 2e-3 * (0.1 + 0.9 * (1 - math.sqrt(min(1, (step - 85) / 25))))
        assert learning_rate(level, step) == pytest.approx(expected, rel=1e-14)
    assert {learning_rate(replace(level, decay_steps=0), step) for step in range(9, 110)} == {2e-3}


def test_rate_stays_at_its_final_share_when_the_schedule_is_over() -> None:
    assert learning_rate(SETTINGS, 110) == learning_rate(SETTINGS, 10_000) == pytest.approx(2e-4, rel=1e-14)


def test_rate_is_defined_when_there_is_no_warmup_or_nothing_else() -> None:
    assert learning_rate(OptimizerSettings(warmup_steps=0), 0) == pytest.approx(1e-3, rel=1e-14)
    assert learning_rate(OptimizerSettings(warmup_steps=50, total_steps=50), 49) == pytest.approx(1e-3, rel=1e-14)
    assert learning_rate(OptimizerSettings(warmup_steps=50, total_steps=50), 51) == pytest.approx(1e-4, rel=1e-14)


def test_cosine_agrees_with_the_library_when_swept() -> None:
    assert max(abs(cos_of_half_turns(i / 5000) - math.cos(math.pi * i / 5000)) for i in range(5001)) < 1e-15


def test_rates_have_these_bits_when_computed_anywhere() -> None:
    bits = {step: learning_rate(SETTINGS, step).hex() for step in (3, 10, 37, 60, 99, 110)}
    assert bits == {
        3: "0x1.a36e2eb1c432dp-11",
        10: "0x1.0624dd2f1a9fcp-9",
        37: "0x1.bc61a64e0c86ap-10",
        60: "0x1.205bc01a36e2fp-10",
        99: "0x1.0981d1b51b763p-12",
        110: "0x1.a36e2eb1c4331p-13",
    }
    level = replace(SETTINGS, schedule="wsd", decay_steps=25)
    assert {step: learning_rate(level, step).hex() for step in (84, 86, 101, 110)} == {
        84: "0x1.0624dd2f1a9fcp-9",
        86: "0x1.adea897635e75p-10",
        101: "0x1.2599ed7c6fbd2p-11",
        110: "0x1.a36e2eb1c432dp-13",
    }
