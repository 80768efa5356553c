"""Second moments from their rows' and columns' means: what is kept, and what a mean over members is."""

import numpy as np
from numpy.typing import NDArray

from swarm.averaging.aggregate import aggregate
from swarm.model.layout import ParameterLayout
from swarm.optim import factored_moments
from swarm.optim.factored_moments import means_of, num_means

LAYOUT = ParameterLayout.of({"a.weight": (24, 8), "b.norm": (17,), "c.weight": (5, 64)})
Floats = NDArray[np.float32]


def drawn(seed: int) -> Floats:
    return np.square(np.random.default_rng(seed).standard_normal(LAYOUT.num_values, dtype=np.float32))


def from_means(means: Floats) -> Floats:
    out = np.empty(LAYOUT.num_values, dtype=np.float32)
    factored_moments.from_means(means, LAYOUT, out)
    return out


def test_they_are_a_row_and_a_column_of_each_matrix() -> None:
    assert num_means(LAYOUT) == means_of(drawn(1), LAYOUT).size == 24 + 8 + 17 + 5 + 64


def test_values_come_back_when_each_matrix_is_a_product() -> None:
    second = drawn(1)
    for view in LAYOUT.views(second).values():
        if view.ndim == 2:
            view[:] = np.outer(view[:, 0], view[0])
    np.testing.assert_allclose(from_means(means_of(second, LAYOUT)), second, rtol=1e-6)


def test_means_of_means_are_the_means_of_the_mean() -> None:
    members = [drawn(seed) for seed in range(4)]
    together = aggregate([means_of(one, LAYOUT) for one in members], [1] * 4, rule="mean")
    of_mean = means_of(aggregate(members, [1] * 4, rule="mean"), LAYOUT)
    np.testing.assert_allclose(together, of_mean, rtol=1e-6)


def test_a_row_that_nobody_touched_stays_zero_and_the_rest_is_positive() -> None:
    second = drawn(1)
    LAYOUT.views(second)["a.weight"][7] = 0
    found = LAYOUT.views(from_means(means_of(second, LAYOUT)))["a.weight"]
    assert not found[7].any()
    assert (np.delete(found, 7, axis=0) > 0).all()
