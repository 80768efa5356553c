"""Moments in codes: the bits of the reference, means that stay under rounding, and no update longer than Adam's."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import int8_moments
from kernels.threads import SMALLEST_RANGE_VALUES, Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats, exact_scales

Floats = NDArray[np.float32]
SCALARS = np.array([0.3, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, 2e-3, 3e-4, 1.165], dtype=np.float32)


class Moments:
    """Codes of `size` values, steps on them, and the same steps by the reference."""

    def __init__(self, size: int) -> None:
        self.first, self.second = np.zeros(size, np.int8), np.zeros(size, np.uint8)
        self.scales = np.zeros(int8_moments.num_blocks(size), np.float32)
        cuts = [0, min(17, size), min(2_000, size), size]
        self.bounds, self.keep = np.array(cuts), np.array([1.0, 0.99, 0.5], dtype=np.float32)
        self.times = np.array([1.0, 0.3, 7.0], dtype=np.float32)

    def step(self, weights: Floats, gradient: Floats, step: int, scalars: Floats = SCALARS, count: int = 1) -> Floats:
        out = np.empty_like(weights)
        int8_moments.adamw(
            *(weights, gradient, self.first, self.second, self.scales, out),
            *(self.bounds, self.keep, self.times, scalars),
            np.array([step, 1, 2, 3], dtype=np.uint64),
            threads=Threads(count),
        )
        return out

    def expected(self, weights: Floats, gradient: Floats, step: int) -> tuple[NDArray[np.generic], ...]:
        each = [np.repeat(factors, np.diff(self.bounds)) for factors in (self.keep, self.times)]
        seed = np.array([step, 1, 2, 3], dtype=np.uint64)
        return reference.adamw_int8(weights, gradient, self.first, self.second, self.scales, *each, SCALARS, seed)

    def decoded(self) -> tuple[Floats, Floats]:
        return reference.decode_int8_moments(self.first, self.second, self.scales, SCALARS[9])


@pytest.mark.parametrize("size", [1, 127, 128, 129, 5_003])
def test_steps_equal_the_reference_when_gradients_are_of_every_magnitude(size: int) -> None:
    moments, weights = Moments(size), exact_floats("weights", size)
    for step in range(6):
        gradient = np.roll(exact_floats("gradient", size) * exact_scales("gradient", size), step) * np.float32(2.0**-12)
        gradient[::7] = 0.0
        gradient[: size // 3 if step < 3 else 0] = 0.0  # whole blocks are zero at first
        wanted = moments.expected(weights, gradient, step)
        weights = moments.step(weights, gradient, step)
        for got, expected in zip((weights, moments.first, moments.second, moments.scales), wanted, strict=True):
            assert got.tobytes() == expected.tobytes()
    assert len(np.unique(moments.second)) > min(size, 20) // 2, "most codes would not be tried"


@pytest.mark.parametrize("count", [2, 4])
def test_bits_stay_when_threads_share_the_values(count: int) -> None:
    size = 2 * SMALLEST_RANGE_VALUES + 4_321
    one, many, weights = Moments(size), Moments(size), exact_floats("weights", size)
    for step in range(2):
        gradient = np.roll(exact_floats("gradient", size), step)
        alone, together = one.step(weights, gradient, step), many.step(weights, gradient, step, count=count)
        assert alone.tobytes() == together.tobytes()
    assert one.first.tobytes() == many.first.tobytes()
    assert one.second.tobytes() == many.second.tobytes()


def test_moments_keep_their_means_when_rounded_many_times() -> None:
    """Steps without gradient and without decay do nothing but round: a drift would add up."""
    size, rounds = 4_096, 300
    moments = Moments(size)
    gradient = exact_floats("gradient", size) * np.float32(0.01)
    weights = exact_floats("weights", size)
    moments.step(weights, gradient, 0)
    mean, square = moments.decoded()
    still = SCALARS.copy()
    still[1:5] = 1.0, 0.0, 1.0, 0.0
    for step in range(1, rounds):
        moments.step(weights, np.zeros_like(gradient), step, still)
    later_mean, later_square = moments.decoded()
    signs = np.sign(gradient)
    assert np.sum(later_square) == pytest.approx(np.sum(square), rel=0.03)
    assert np.sum(later_mean * signs) == pytest.approx(np.sum(mean * signs), rel=0.03)


def test_moments_follow_those_in_fp32_when_gradients_are_noisy() -> None:
    size = 2_560
    moments, weights = Moments(size), np.zeros(size, np.float32)
    first, second = np.zeros(size, np.float32), np.zeros(size, np.float32)
    scale = np.resize(np.array([1.0, 0.5, 0.1, 0.05], np.float32), size)
    keep, times = (np.repeat(factors, np.diff(moments.bounds)) for factors in (moments.keep, moments.times))
    for step in range(60):
        gradient = (exact_floats(f"step {step}", size) + np.float32(0.5)) * scale
        moments.step(weights, gradient, step)
        _, first, second = reference.adamw(weights, gradient, first, second, keep, times, SCALARS[:9])
    mean, square = moments.decoded()
    assert np.linalg.norm((mean - first) / scale) < 0.03 * np.linalg.norm(first / scale)
    assert np.linalg.norm((square - second) / scale**2) < 0.1 * np.linalg.norm(second / scale**2)


def test_no_update_explodes_when_one_value_dwarfs_its_block() -> None:
    """A second moment rounded to zero under a first moment that is not would divide by epsilon."""
    size = 256
    gradient = np.full(size, 1e-6, np.float32)
    gradient[3] = 1e3
    moments, weights = Moments(size), np.zeros(size, np.float32)
    scalars = SCALARS.copy()
    scalars[0], scalars[5:9] = 1.0, [1.0, 1e-12, 1e-3, 0.0]
    for step in range(200):
        # From the 100th step on the small values have no gradient at all: what rounding left of them is used.
        weights = moments.step(np.zeros(size, np.float32), gradient * (step < 100), step, scalars)
        assert np.abs(weights).max() <= 1.2 * scalars[7], f"step {step} moved a weight by {np.abs(weights).max()}"
        mean, square = moments.decoded()
        assert not mean[square == 0].any()
        assert (np.abs(mean) <= 1.17 * np.sqrt(square)).all()
