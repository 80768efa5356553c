"""The bigram baseline: probabilities that add up, and the entropy of sources whose entropy is known."""

import math

import numpy as np
import pytest

from swarm.data.bigram import bigram_loss


def _chain(transition: np.ndarray, length: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    steps = transition.cumsum(axis=1)
    tokens = np.zeros(length, dtype=np.int64)
    draws = chance.random(length)
    for at in range(1, length):
        tokens[at] = min(int(np.searchsorted(steps[tokens[at - 1]], draws[at])), len(transition) - 1)
    return tokens


def test_probabilities_of_the_next_token_add_up_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 5, 40)
    for context in range(7):  # 5 and 6 never occur
        losses = [bigram_loss(train, np.array([context, token]), vocab_size=7) for token in range(7)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1.0)


def test_loss_approaches_the_entropy_of_a_markov_chain() -> None:
    transition = np.array([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5], [0.3, 0.3, 0.4]])
    train, held_out = _chain(transition, 40_000, 1), _chain(transition, 40_000, 2)
    stationary = np.linalg.matrix_power(transition, 200)[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(stationary[:, None] * np.nan_to_num(transition * np.log(transition))).sum()
    assert bigram_loss(train, held_out, vocab_size=3) == pytest.approx(entropy, rel=0.02)


def test_loss_of_unseen_text_is_finite() -> None:
    loss = bigram_loss(np.zeros(100, dtype=np.uint8), np.arange(256, dtype=np.uint8), vocab_size=256)
    assert math.isfinite(loss)
    assert loss > math.log(256)


def test_loss_does_not_overflow_narrow_or_large_ids() -> None:
    train = np.tile(np.array([200, 100, 200, 50]), 100)
    expected = bigram_loss(train, train, vocab_size=256)
    assert bigram_loss(train.astype(np.uint8), train.astype(np.uint8), vocab_size=256) == expected
    large = train.astype(np.uint32) * 1000
    # The same text in a larger vocabulary: only the smoothing for unseen tokens differs.
    assert bigram_loss(large, large, vocab_size=300_000) == pytest.approx(expected, abs=0.1)


def test_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two tokens"):
        bigram_loss(np.array([1]), np.array([1, 2]), vocab_size=3)
