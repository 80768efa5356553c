"""A bias that is held up is found when the law says so; honest scatter never is."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.core.ids import PeerId, Step
from verification.audit.amplified import BUCKETS, TABLE, MovedBounds
from verification.audit.running_bias import (
    LONGEST,
    MOST_PEERS,
    RunningBias,
    RunningBiases,
    audits_needed,
    bias_seed,
    law_factor,
)

BOUNDS = MovedBounds(fraud=2e-2, spread=2e-3, bias=5e-4)
REGIONS = 4
SIZES = np.full(REGIONS, 4096)
NUM_VALUES = 4096 * REGIONS
PEER = PeerId("peer")


def _sketch(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    found = rng.standard_normal((REGIONS, BUCKETS))
    return found * length / np.sqrt((found**2).sum(axis=1).mean())


def _added(*sketches: NDArray[np.float64]) -> RunningBias:
    held = RunningBias(BOUNDS)
    for sketch in sketches:
        held = held.after(sketch, SIZES)
    return held


def test_ten_thousand_honest_peers_are_never_led() -> None:
    """As far off in each audit as honest machines may be, and with all the bias that two kinds of machine may have."""
    rng, largest = np.random.default_rng(0), 0.0
    lasting = _sketch(BOUNDS.bias, rng)
    for _ in range(10_000 // 64):  # 64 peers' audits, one after another: the sum is the same for all that come so
        held = RunningBias(BOUNDS)
        for _ in range(64):
            held = held.after(lasting + _sketch(BOUNDS.spread - BOUNDS.bias, rng), SIZES)
            largest = max(largest, held.share)
    assert 0.1 < largest < 1.0


@pytest.mark.parametrize("bias", [1e-3, 2e-3, 4e-3, 1.5e-2])
def test_a_bias_is_found_after_as_many_audits_as_the_law_says(bias: float) -> None:
    needed = audits_needed(bias, BOUNDS, tests=REGIONS + 1)
    held, sketch = RunningBias(BOUNDS), np.zeros((REGIONS, BUCKETS))
    sketch[:, 3] = bias
    if needed is None:
        assert bias < 2 * BOUNDS.spread
        needed = LONGEST + 1
    for num in range(1, min(needed, LONGEST) + 1):
        held = held.after(sketch, SIZES)
        assert held.is_led == (num >= needed), (num, needed, held.share)
    assert (bias > BOUNDS.spread) <= (needed <= 40)


def test_the_law_is_hoeffdings_for_vectors() -> None:
    tests, num = 65, 10
    alarm = 2 * tests * num * (num + 1) * math.exp(-(law_factor(num, tests) ** 2) / 2)
    assert alarm == pytest.approx(1e-6)


def test_one_broken_audit_or_four_are_not_enough_however_far_they_are_off() -> None:
    sketch = np.full((REGIONS, BUCKETS), 1.0)
    assert [_added(*[sketch] * num).is_led for num in (1, 4)] == [False, False]
    assert _added(*[sketch] * 8).is_led
    assert 5 <= (audits_needed(1.0, BOUNDS, tests=REGIONS + 1) or 0) <= 8
    quiet = np.zeros((REGIONS, BUCKETS))
    assert not _added(sketch, *[quiet] * 100, sketch, *[quiet] * 100).is_led


def test_a_bias_in_one_region_alone_is_found() -> None:
    sketch = np.zeros((REGIONS, BUCKETS))
    sketch[2, 0] = 4 * 4e-3
    assert not _added(sketch).is_led
    assert _added(*[sketch] * 40).is_led


def test_a_bias_that_begins_late_is_found_in_the_sum_that_begins_anew() -> None:
    held, sketch = RunningBias(BOUNDS), np.zeros((REGIONS, BUCKETS))
    for _ in range(LONGEST - 1):
        held = held.after(sketch, SIZES)
    sketch[:, 0] = 4e-3
    late = 0
    while not held.is_led and late < 60:
        held, late = held.after(sketch, SIZES), late + 1
    assert late <= 1 + (audits_needed(4e-3, BOUNDS, tests=REGIONS + 1) or 0)


def test_where_nothing_was_calibrated_nobody_is_led() -> None:
    held = RunningBias(MovedBounds(fraud=2.0, spread=2.0, bias=1e-9, report_only=True))
    for _ in range(200):
        held = held.after(np.ones((REGIONS, BUCKETS)), SIZES)
    assert held.share > 1
    assert not held.is_led


def test_a_step_counts_once_and_only_so_many_peers_are_kept() -> None:
    biases, sketch = RunningBiases(bytes(32), BOUNDS), np.full((REGIONS, BUCKETS), 1e-3)
    for step in (1, 1, 2, 1):
        held = biases.after(PEER, Step(step), sketch, num_values=NUM_VALUES)
    assert held.num_audits == 2
    for number in range(MOST_PEERS):
        biases.after(PeerId(f"{number}"), Step(1), sketch, num_values=NUM_VALUES)
    assert biases.after(PEER, Step(3), sketch, num_values=NUM_VALUES).num_audits == 1
    biases.forget(PEER)
    assert biases.after(PEER, Step(3), sketch, num_values=NUM_VALUES).num_audits == 1


def test_each_auditor_has_signs_of_its_own_for_each_peer() -> None:
    seeds = {bias_seed(bytes([secret]) * 32, PeerId(peer)) for secret in range(3) for peer in "ab"}
    assert len(seeds) == 6
    assert RunningBiases(bytes(32), BOUNDS).seed_for(PEER) == bias_seed(bytes(32), PEER)


def test_the_audits_that_the_pages_name_are_the_laws() -> None:
    fp32, int8 = TABLE["fp32", "fp32"], TABLE["fp32", "int8"]
    biases = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    assert [audits_needed(bias, fp32, tests=65) for bias in biases] == [128, 23, 5, 5, 5]
    assert [audits_needed(bias, int8, tests=65) for bias in biases] == [None, None, 161, 26, 5]
