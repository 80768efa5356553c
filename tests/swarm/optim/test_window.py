"""A window's pseudo-gradient and the outer step: what they undo, and where a delayed window starts."""

import numpy as np
from numpy.typing import NDArray

from swarm.optim.window import outer_step, pseudo_gradient

SIZE = 4_099
Floats = NDArray[np.float32]


def drawn(seed: int, size: int = SIZE) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def test_an_outer_step_of_rate_1_leads_to_the_end_when_one_member_is_alone() -> None:
    start = drawn(1)
    end = start + drawn(2) * np.float32(2.0**-6)
    reached = outer_step(start, pseudo_gradient(start, end), rate=1.0)
    np.testing.assert_allclose(reached, end, rtol=0, atol=2.0**-22 * np.abs(start).max())


def test_inputs_stay_what_they_were_when_a_step_is_taken() -> None:
    start, end = drawn(1), drawn(2)
    before = start.tobytes(), end.tobytes()
    outer_step(start, pseudo_gradient(start, end), rate=0.7)
    assert (start.tobytes(), end.tobytes()) == before
