"""Combination of contributions: exact means, and a bounded pull for whoever stands apart."""

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.norms import tree_norm
from kernels.threads import Threads
from swarm.averaging.aggregate import Rule, aggregate

Floats = NDArray[np.float32]
RULES: tuple[Rule, ...] = ("mean", "centered_clip", "trimmed_mean", "median")


def honest(num_members: int, *, size: int = 20_000, noise: float = 0.5, seed: int = 0) -> tuple[Floats, list[Floats]]:
    """The true gradient and members' noisy measurements of it."""
    rng = np.random.default_rng(seed)
    true = rng.standard_normal(size, dtype=np.float32)
    return true, [true + np.float32(noise) * rng.standard_normal(size, dtype=np.float32) for _ in range(num_members)]


def distance(one: Floats, other: Floats) -> float:
    return tree_norm(one - other) / tree_norm(other)


def test_mean_is_the_weighted_mean_when_counts_differ() -> None:
    _, members = honest(3)
    result = aggregate(members, [5, 1, 300], rule="mean")
    expected = [
        sum(Fraction(float(v[i])) * w for v, w in zip(members, (5, 1, 300), strict=True)) / 306 for i in range(50)
    ]
    np.testing.assert_allclose(result[:50], [float(value) for value in expected], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_result_is_the_contribution_itself_when_there_is_one(rule: Rule) -> None:
    _, (member,) = honest(1)
    assert aggregate([member], [1234], rule=rule).tobytes() == member.tobytes()


def test_arguments_stay_as_they_were_when_aggregated() -> None:
    _, members = honest(3)
    before = [member.copy() for member in members]
    for rule in RULES:
        aggregate(members, [1, 2, 3], rule=rule)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(members, before, strict=True))


@pytest.mark.parametrize("rule", RULES[1:])
def test_each_norm_is_capped_when_two_contribute(rule: Rule) -> None:
    _, (first, second) = honest(2)
    cap = tree_norm(first)
    result = aggregate([first, second * np.float32(1e6)], [1, 1], rule=rule, norm_cap=cap)
    assert tree_norm(result) <= 1.001 * cap
    np.testing.assert_allclose(
        result, first / 2 + second * np.float32(cap / tree_norm(second)) / 2, rtol=1e-4, atol=1e-5
    )
    uncapped = aggregate([first, second], [1, 1], rule=rule, norm_cap=2 * tree_norm(second))
    assert uncapped.tobytes() == aggregate([first, second], [1, 1], rule="mean").tobytes()


@pytest.mark.parametrize("counts", [[100, 100, 100], [90, 100, 120], [200, 100, 100, 150, 50]])
def test_centered_clip_is_close_to_the_mean_when_all_are_honest(counts: list[int]) -> None:
    rng = np.random.default_rng(0)
    true = rng.standard_normal(20_000, dtype=np.float32)
    members = [
        true + np.float32(5 / np.sqrt(count)) * rng.standard_normal(20_000, dtype=np.float32) for count in counts
    ]
    clipped = aggregate(members, counts, rule="centered_clip")
    assert distance(clipped, aggregate(members, counts, rule="mean")) < 0.02


def test_noise_of_small_counts_is_not_taken_for_hostility_when_counts_differ_widely() -> None:
    rng = np.random.default_rng(0)
    true = rng.standard_normal(20_000, dtype=np.float32)
    counts = [1600, 100, 1600, 1600]
    members = [true + np.float32(10 / np.sqrt(n)) * rng.standard_normal(20_000, dtype=np.float32) for n in counts]
    clipped = aggregate(members, counts, rule="centered_clip")
    mean = aggregate(members, counts, rule="mean")
    assert distance(clipped, mean) < 0.02
    # The same vector under a large count stands apart: it is cut.
    as_if_large = aggregate(members, [1600] * 4, rule="centered_clip")
    assert distance(as_if_large, aggregate(members, [1600] * 4, rule="mean")) > 0.05


def test_no_count_outweighs_all_others_when_one_is_huge() -> None:
    _, members = honest(4)
    huge = aggregate(members, [10**9, 1, 2, 3], rule="centered_clip")
    assert huge.tobytes() == aggregate(members, [6, 1, 2, 3], rule="centered_clip").tobytes()


@pytest.mark.parametrize("num_members", [3, 5, 8])
@pytest.mark.parametrize("attack", [1e3, -1e3, -1e30, 8e37 / 5])
def test_result_stays_near_the_honest_mean_when_one_attacks(num_members: int, attack: float) -> None:
    true, members = honest(num_members - 1)
    mean = aggregate(members, [1] * len(members), rule="mean")
    result = aggregate([true * np.float32(attack), *members], [1] * num_members, rule="centered_clip")
    # The attacker's pull is its share of a radius which the honest members' noise sets.
    noise = float(np.mean([tree_norm(member - mean) for member in members])) / tree_norm(mean)
    assert distance(result, mean) < 2.0 / (num_members - 1) * noise + 0.1
    # Five times further out changes next to nothing.
    further = aggregate([true * np.float32(5 * attack), *members], [1] * num_members, rule="centered_clip")
    assert distance(further, result) < 1e-3


def embedding_gradient(
    seed: int, *, tokens: int = 2_000, rows: int = 4_096, width: int = 16
) -> tuple[Floats, NDArray[np.bool_]]:
    """A part of an embedding's mean gradient, (rows, width), under Zipf's law, and the rows it touched."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, rows + 1)
    ids = rng.choice(rows, size=tokens, p=shares / shares.sum())
    gradient = np.zeros((rows, width), dtype=np.float32)
    np.add.at(gradient, ids, rng.standard_normal((tokens, width), dtype=np.float32))
    return gradient / np.float32(tokens), np.bincount(ids, minlength=rows) > 0


@pytest.mark.parametrize("num_members", [3, 5])
def test_rows_only_one_touched_keep_their_norm_when_tokens_are_sparse(num_members: int) -> None:
    gradients, touched = zip(*(embedding_gradient(seed) for seed in range(num_members)), strict=True)
    members = [gradient.reshape(-1) for gradient in gradients]
    only_one = np.sum(touched, axis=0) == 1
    assert only_one.sum() > 100
    counts = [1] * num_members
    clipped = aggregate(members, counts, rule="centered_clip").reshape(4_096, 16)[only_one]
    mean = aggregate(members, counts, rule="mean").reshape(4_096, 16)[only_one]
    assert tree_norm(clipped.reshape(-1)) >= 0.75 * tree_norm(mean.reshape(-1))


@pytest.mark.parametrize("others_touch", [0, 1])
def test_row_only_one_touched_keeps_its_norm_when_others_have_little_or_nothing(others_touch: int) -> None:
    rng = np.random.default_rng(0)
    members = [np.zeros((512, 64), dtype=np.float32) for _ in range(3)]
    members[0][10] = rng.standard_normal(64)
    for other in range(others_touch):
        members[1 + other][20 + other] = rng.standard_normal(64)
    flat = [member.reshape(-1) for member in members]
    clipped = aggregate(flat, [1, 1, 1], rule="centered_clip").reshape(512, 64)
    mean = aggregate(flat, [1, 1, 1], rule="mean").reshape(512, 64)
    assert tree_norm(clipped[10]) >= 0.75 * tree_norm(mean[10])


def test_lone_attacker_is_capped_when_all_others_are_zero() -> None:
    members = [np.zeros(1_000, dtype=np.float32) for _ in range(3)]
    members[1][:] = 1e20
    result = aggregate(members, [1, 1, 1], rule="centered_clip", norm_cap=3.0)
    assert 0 < tree_norm(result) <= 3.0


def test_result_is_zero_when_all_are_zero() -> None:
    zero = np.zeros(100, dtype=np.float32)
    assert aggregate([zero] * 3, [1, 2, 3], rule="centered_clip").tobytes() == zero.tobytes()


@pytest.mark.parametrize("num_members", [3, 4, 7, 8, 12])
@pytest.mark.parametrize("attack", [np.float32(2.0**125), np.float32(-1e30), np.float32(3)])
@pytest.mark.parametrize("rule", ["trimmed_mean", "median"])
def test_each_coordinate_stays_among_the_honest_when_less_than_a_quarter_attacks(
    num_members: int, attack: np.float32, rule: Rule
) -> None:
    num_attackers = max(1, num_members // 4)
    _, members = honest(num_members - num_attackers)
    result = aggregate([np.full_like(members[0], attack)] * num_attackers + members, [1] * num_members, rule=rule)
    # fp32(1 / kept) summed up is 1 but for rounding.
    assert (result >= np.min(members, axis=0) - 1e-5).all()
    assert (result <= np.max(members, axis=0) + 1e-5).all()


def test_trimmed_mean_drops_a_quarter_at_each_end_when_members_are_many() -> None:
    members = [np.full(3, value, np.float32) for value in (8.0, -1e9, 1.0, 1e9, 2.0, 3.0, -7.0, 2.0)]
    assert aggregate(members, [1] * 8, rule="trimmed_mean").tolist() == [2.0] * 3  # of 1, 2, 2, 3
    assert aggregate(members[:3], [1, 99, 1], rule="trimmed_mean").tolist() == [1.0] * 3


def test_rows_of_one_array_give_the_same_bits_as_vectors() -> None:
    _, members = honest(5)
    for rule in RULES:
        together = aggregate(np.stack(members), [5, 4, 3, 2, 1], rule=rule, threads=Threads(2))
        assert together.tobytes() == aggregate(members, [5, 4, 3, 2, 1], rule=rule).tobytes()
