"""Grading a claim against its replay: every bound from both sides, and what is no tensor at all."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.core.errors import LocalError
from swarm.core.settings import AuditSettings
from tests.verification.exhibits import small_settings
from verification.audit.amplified import moved_bounds_for, moved_bounds_in_force
from verification.audit.tolerance import (
    CAUTION,
    CHUNK_VALUES,
    LOCAL,
    TABLE,
    Bounds,
    Grade,
    Kind,
    bounds_for,
    bounds_in_force,
    compare,
    relative_error,
)

BOUNDS = Bounds(floor=1e-3, fraud=1e-2)
KINDS: tuple[Kind, ...] = ("activation", "gradient", "contribution")
Floats = NDArray[np.floating[Any]]


def _replay(num_chunks: int = 4, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((num_chunks, CHUNK_VALUES))


def _away(replay: Floats, error: float) -> Floats:
    """A claim of that relative error, spread evenly over the tensor."""
    return replay * (1.0 + error)


@pytest.mark.parametrize(
    ("error", "own_error", "grade"),
    [
        (0.0, None, Grade.HONEST),
        (0.99e-3, None, Grade.HONEST),
        (1.01e-3, None, Grade.SUSPICIOUS),  # the floor
        (1.01e-3, 1e-5, Grade.SUSPICIOUS),
        (1.9e-3, 2e-3, Grade.HONEST),
        (2.1e-3, 2e-3, Grade.SUSPICIOUS),  # the own error
        (0.99e-2, 1e-3, Grade.SUSPICIOUS),
        (1.01e-2, 1e-3, Grade.FRAUD),  # 2.5 own errors are less than what is worth a case
        (1.01e-2, None, Grade.FRAUD),
        (1.01e-2, 1.02e-2, Grade.HONEST),
        (2.4e-2, 1e-2, Grade.SUSPICIOUS),
        (2.6e-2, 1e-2, Grade.FRAUD),
        (1.22, 0.49, Grade.SUSPICIOUS),
        (1.23, 0.49, Grade.FRAUD),
        (2.0, 0.51, Grade.SUSPICIOUS),  # nearly nothing but rounding decides what comes out
        (26.0, 0.51, Grade.FRAUD),
        (2.0, None, Grade.FRAUD),
    ],
)
def test_a_claim_is_graded_by_its_error_and_the_auditors_own(
    error: float, own_error: float | None, grade: Grade
) -> None:
    replay = _replay()
    found = compare(_away(replay, error), replay, BOUNDS, own_error=own_error)
    assert found.grade is grade, found.reason
    assert found.error == pytest.approx(error, rel=1e-6)
    assert found.measured == pytest.approx(error, rel=1e-6)
    own = own_error or 0.0
    assert found.fraud == max(1e-2, 2.5 * own if own <= 0.5 else 50 * own)
    assert found.accept == max(1e-3, own_error or 0.0)


@pytest.mark.parametrize(
    ("error", "own_error", "wants"),
    [(0.9e-3, None, False), (2e-3, None, True), (2e-2, None, True), (math.inf, None, False), (5e-3, 1e-5, False)],
)
def test_the_own_error_is_asked_for_only_where_it_could_clear_the_claim(
    error: float, own_error: float | None, wants: bool
) -> None:
    replay = _replay()
    assert compare(_away(replay, error), replay, BOUNDS, own_error=own_error).wants_own_error is wants


def test_an_accuser_wants_more_than_a_judge() -> None:
    replay = _replay()
    claim = _away(replay, 0.027)
    assert compare(claim, replay, BOUNDS, own_error=1e-2).grade is Grade.FRAUD
    assert compare(claim, replay, BOUNDS, own_error=1e-2, caution=CAUTION).grade is Grade.SUSPICIOUS
    assert compare(_away(replay, 0.011), replay, BOUNDS, own_error=1e-3, caution=CAUTION).grade is Grade.FRAUD


def test_only_what_lies_beyond_its_codecs_cell_is_an_error() -> None:
    replay = _replay()
    cells = np.full(replay.size, 0.1)
    assert compare(replay + 0.099, replay, BOUNDS, cells=cells).measured == 0.0
    found = compare(replay + 0.15, replay, BOUNDS, cells=cells)
    assert found.grade is Grade.FRAUD
    assert found.error == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(("error", "grade"), [(0.039, Grade.SUSPICIOUS), (0.041, Grade.FRAUD)])
@pytest.mark.parametrize("chunk", [0, 7, 63])
def test_a_lie_in_one_chunk_is_seen_at_four_times_the_bound(chunk: int, error: float, grade: Grade) -> None:
    replay = _replay(64)
    claimed = replay.copy()
    claimed[chunk] *= 1.0 + error
    found = compare(claimed, replay, BOUNDS)
    assert found.grade is grade, found.reason
    assert found.error == pytest.approx(error / 8, rel=0.1)  # below the fraud bound of the whole
    assert found.worst_chunk_error == pytest.approx(error, rel=1e-6)


def test_a_quiet_chunk_is_held_to_a_thousandth_of_the_others_norm() -> None:
    replay = _replay(64)
    replay[5] *= 1e-9
    claimed = replay.copy()
    claimed[5] *= -1  # all of it wrong, and it is nothing
    found = compare(claimed, replay, BOUNDS)
    assert found.grade is Grade.HONEST
    assert found.worst_chunk_error == pytest.approx(2e-6, rel=0.1)
    claimed[5] = 1e-3 * _replay(1, seed=1)[0]
    assert compare(claimed, replay, BOUNDS).grade is Grade.FRAUD


@pytest.mark.parametrize("size", [1, 2, 3, 4095, 4096, 4097, 8191, 8192, 8193, 12_289])
def test_no_value_of_any_size_of_tensor_is_left_out(size: int) -> None:
    replay = np.ones(size, dtype=np.float32)
    for place in {0, size // 2, size - 1}:
        claimed = replay.copy()
        claimed[place] += 100.0
        found = compare(claimed, replay, BOUNDS)
        assert found.grade is Grade.FRAUD
        assert found.error == pytest.approx(100 / math.sqrt(size))


def test_a_short_rest_makes_no_chunk_of_its_own() -> None:
    """One int8 code that is off by one among 4096 and more is 4e-4; among ten it would be fraud."""
    replay = _replay(3).reshape(-1)[: 2 * CHUNK_VALUES + 10]
    claimed = replay.copy()
    claimed[-1] += 3.0 / 127
    assert compare(claimed, replay, bounds_for("fp32", "int8", "activation")).grade is Grade.HONEST


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_claim_that_is_not_finite_is_fraud(broken: float) -> None:
    replay = _replay().astype(np.float32)
    claimed = replay.copy()
    claimed[2, 3] = broken
    found = compare(claimed, replay, BOUNDS)
    assert found.grade is Grade.FRAUD
    assert found.error == found.worst_chunk_error == math.inf
    assert "1 of 16384 values are not finite" in found.reason


@pytest.mark.parametrize("shape", [(CHUNK_VALUES, 4), (4 * CHUNK_VALUES,), (1, 4, CHUNK_VALUES), (4, 0), (3, 5)])
def test_a_claim_of_another_shape_is_fraud(shape: tuple[int, ...]) -> None:
    found = compare(np.zeros(shape), np.zeros((4, CHUNK_VALUES)), BOUNDS)
    assert found.grade is Grade.FRAUD
    assert f"shape {shape}" in found.reason


def test_a_replay_that_is_not_finite_judges_nobody() -> None:
    for broken in (math.nan, math.inf, 1e200):
        replay = _replay()
        replay[1, 1] = broken
        with pytest.raises(LocalError):
            compare(replay.copy(), replay, BOUNDS)


def test_nothing_is_honestly_nothing() -> None:
    for shape in ((0,), (4, 0, 8)):
        found = compare(np.zeros(shape), np.zeros(shape), BOUNDS)
        assert (found.grade, found.error, found.worst_chunk_error) == (Grade.HONEST, 0.0, 0.0)


def test_zeros_are_compared_with_zeros() -> None:
    zeros = np.zeros((3, CHUNK_VALUES), dtype=np.float32)
    assert compare(zeros.copy(), zeros, BOUNDS).error == 0.0
    assert compare(zeros + np.float32(2.0**-126), zeros, BOUNDS).grade is Grade.HONEST  # flushed there, not here
    for claimed in (
        zeros + np.float32(1e-20),
        zeros + np.float32(2.0**125),
        np.where(np.arange(4096) == 7, 1.0, zeros),
    ):
        assert compare(claimed, zeros, BOUNDS).grade is Grade.FRAUD
        assert compare(zeros, claimed, BOUNDS).grade is Grade.FRAUD


def test_values_at_the_ends_of_the_range_are_compared() -> None:
    for scale in (2.0**125, 2.0**-90):
        replay = (_replay() / 8 * scale).astype(np.float32)
        assert compare(replay.copy(), replay, BOUNDS).grade is Grade.HONEST
        assert compare(-replay, replay, BOUNDS).error == pytest.approx(2.0)
        assert compare(replay * np.float32(1.005), replay, BOUNDS).grade is Grade.SUSPICIOUS
    assert compare(np.full(8, 1e300), np.ones(8), BOUNDS).grade is Grade.FRAUD


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("compute_dtype", "codec"), [("fp32", "topk"), ("bf16", "topk"), ("fp32, routed", "int8"), ("", "x")]
)
def test_what_is_not_calibrated_is_reported_only(compute_dtype: str, codec: str, kind: Kind) -> None:
    bounds, replay = bounds_for(compute_dtype, codec, kind), _replay()
    assert bounds.report_only
    broken = np.full_like(replay, math.nan)
    for claimed in (-replay, broken, replay[:2]):
        found = compare(claimed, replay, bounds)
        assert found.grade is Grade.SUSPICIOUS
        assert found.reason.startswith("report only")
    assert compare(_away(replay, 0.99 * bounds.floor), replay, bounds).grade is Grade.HONEST


def test_every_row_of_the_table_is_in_order() -> None:
    for bounds in TABLE.values():
        assert 0 < bounds.floor < bounds.fraud
        assert not bounds.report_only


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_no_wire_between_stages_is_report_only(compute_dtype: str, codec: str) -> None:
    for kind in KINDS[:2]:
        assert not bounds_for(compute_dtype, codec, kind).report_only


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_honest_rounding_passes_and_every_cheat_is_fraud(codec: str) -> None:
    """Spreads and cheats as measured: two machines are 5e-7 apart; int8 weights are 5.5e-3, a sign flip is 2."""
    replay = _replay(16).astype(np.float32)
    noise = _replay(16, seed=1)
    bounds = bounds_for("fp32", codec, "contribution")
    assert compare((replay + 5e-7 * noise).astype(np.float32), replay, bounds).grade is Grade.HONEST
    for claimed in (-replay, 1000 * replay, 0 * replay, noise, replay[::-1], replay + 0.17 * noise):
        assert compare(claimed, replay, bounds).grade is Grade.FRAUD
    dropped = replay.copy()
    dropped[3] = 0.0
    assert compare(dropped, replay, bounds).grade is Grade.FRAUD


def test_the_error_has_the_same_bits_whatever_the_memory_layout() -> None:
    replay = _replay(5).astype(np.float32)
    claimed = (replay + 1e-4 * _replay(5, seed=1)).astype(np.float32)
    found = compare(claimed, replay, BOUNDS)
    assert compare(np.asfortranarray(claimed), np.asfortranarray(replay), BOUNDS) == found
    assert compare(claimed.astype(np.float64), replay.astype(np.float64), BOUNDS) == found
    wide = np.zeros((5, 2 * CHUNK_VALUES), dtype=np.float32)
    wide[:, ::2] = claimed
    assert compare(wide[:, ::2], replay, BOUNDS) == found


def test_the_error_never_changes() -> None:
    rng = np.random.default_rng(3)
    replay, noise = rng.integers(-(1 << 20), 1 << 20, (2, 3 * CHUNK_VALUES + 5))
    claimed = replay + noise // 5000
    found = compare(claimed.astype(np.float32), replay.astype(np.float32), BOUNDS)
    away, norm = (math.sqrt(sum(int(x) ** 2 for x in values)) for values in (claimed - replay, replay))
    assert found.error == pytest.approx(away / norm, rel=1e-14)
    assert (found.error.hex(), found.worst_chunk_error.hex()) == ("0x1.a2671a9539706p-13", "0x1.a286937bdf0e8p-13")


def test_the_own_error_is_measured_like_the_claims() -> None:
    replay = _replay(64)
    claimed = replay.copy()
    claimed[9] *= 1.01
    found = compare(claimed, replay, BOUNDS)
    assert relative_error(claimed, replay) == found.measured == pytest.approx(0.01 / 4)
    assert compare(claimed, replay, Bounds(1e-5, 2e-4), own_error=1.01 * found.measured).grade is Grade.HONEST


def _extent(claimed: Floats, replayed: Floats) -> float:
    return compare(claimed, replayed, BOUNDS).extent


def test_what_a_flipped_bit_changes_is_local_however_much_it_does() -> None:
    replay = _replay()
    for wrong in (1e30, math.nan, math.inf, -replay[2, 7], 3.0):
        claim = replay.copy()
        claim[2, 7] = wrong
        assert 0 < _extent(claim, replay) < 2 / claim.size * max(1.0, replay[2, 7] ** 2)
    block = replay.copy()
    block[1, :64] = 0.0
    assert _extent(block, replay) < 0.005
    dense = _away(replay, 0.2)
    assert _extent(dense, replay) == 0.0, "everything is a little wrong, and nothing is off"


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.7, 1.3, -1000.0, math.inf])
def test_what_changes_a_tensor_all_over_is_not_local(factor: float) -> None:
    assert _extent(_replay() * factor, _replay()) > 0.7
    assert _extent(_replay()[:, :7], _replay()) == 1.0


def test_a_lie_about_the_few_values_that_matter_and_about_the_many_that_do_not_are_as_large() -> None:
    replay = _replay() * 1e-3
    replay[:, ::64] = 1.0
    few, many = replay.copy(), replay.copy()
    few[:, ::64] = -1.0
    assert _extent(few, replay) > LOCAL
    many[:, 1::2] += 1.0
    assert _extent(many, replay) > LOCAL
    untouched = np.concatenate([_replay(), np.zeros((4, CHUNK_VALUES))])
    poison = untouched.copy()
    poison[4:] = 0.01
    assert _extent(poison, untouched) == 0.5


def test_only_of_fraud_there_is_an_extent() -> None:
    assert _extent(_away(_replay(), 5e-3), _replay()) == 0.0


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_run_keys_factor_is_of_floor_bound_and_own_errors_alike_and_of_its_kind_alone(
    factor: float, kind: Kind
) -> None:
    audits = AuditSettings(**{f"{kind}_bounds": factor})
    settings = small_settings(2, audits=audits)
    replay = _replay()
    for other in KINDS:
        usual = bounds_for("fp32", "int8", other)
        by, bounds = factor if other == kind else 1.0, bounds_in_force(settings, "int8", other)
        assert (bounds.floor, bounds.fraud) == (by * usual.floor, by * usual.fraud)
        for own in (None, 0.1):
            claim = _away(replay, 0.01)
            plain, found = (compare(claim, replay, held_to, own_error=own) for held_to in (usual, bounds))
            assert (found.accept, found.fraud) == (by * plain.accept, by * plain.fraud)
        # However wide, two tensors that have nothing in common are fraud while rounding does not decide.
        assert compare(-replay, replay, bounds, own_error=0.5).grade is Grade.FRAUD


def test_what_a_contribution_moves_goes_by_the_factor_of_contributions() -> None:
    settings = small_settings(2, audits=AuditSettings(contribution_bounds=2.0))
    usual = moved_bounds_for("fp32", settings.codecs.averaging)
    bounds = moved_bounds_in_force(settings)
    assert (bounds.fraud, bounds.spread, bounds.bias) == (2 * usual.fraud, 2 * usual.spread, 2 * usual.bias)
    assert bounds.factor == 2.0
