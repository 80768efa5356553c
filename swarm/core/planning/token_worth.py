"""What a token is worth in windows of local steps, beside one that a machine trains on alone.

A step of a pipeline, or of whole models that average after each step, is the step of one process with the same batch: a
token is worth what it is worth there. Members of a window are apart from one another while it lasts, and what they
learn is partly the same; how much was measured by `python -m benchmarks.local_steps_loss` (docs/outer_steps.md), on a
model of 0.13 M parameters with 4 and 8 members. What is said here of larger models is taken from there.

What is computed beside the round of the window before (`averaging.delay = 1`) is computed from where a member has come
to alone, and is worth less.
"""

import math
from collections.abc import Mapping, Sequence

MEASURED_MEMBERS = 4
GAINS: Mapping[int, float] = {5: 2.49, 10: 2.50, 30: 1.89}
"""How many times as soon as one alone so many members come to a loss, by the inner steps of a window, were computing
the only cost: docs/outer_steps.md, "4 members, 1200 inner steps each". 10 steps as built, three seeds; 5 and 30 of the
grid before, seed 1 alone, where moments were shared in the same forms and 10 steps came to 2.48."""
SYNCHRONOUS_GAIN = 3.74
"""The same of one inner step, with fp32 averages."""
GAIN_OF_8, GAIN_OF_4 = 2.50, 2.03
"""Of 8 and of 4 members, H 10, 600 inner steps each, both of the grid (the same page)."""
BESIDE_ROUNDS: Mapping[float, float] = {0.0: 1.0, 0.6: 2.21 / 2.50, 1.0: 2.25 / 2.72}
"""How much of that gain is left where such a share of a window's inner steps is computed beside the round of the one
before: 4 members, H 10, 1200 inner steps, three seeds and one (docs/outer_steps.md, "Windows beside rounds")."""
BESIDE_STEPS = 10
"""Of the windows that these were measured with."""
MEASURED_TO = 8
"""Members: beyond, each doubling is taken to bring what that from 4 to 8 did."""


def gain(num_members: int, local_steps: int, *, beside: float = 0.0) -> float:
    """How many times as soon as one alone so many come to a loss, were computing the only cost.

    `beside`: the share of inner steps that are computed while the round of the window before goes on; between what was
    measured it is linear in that. Between measured windows it is linear in the logarithm of their steps, and goes on
    like that beyond; it is a power of the number of members.
    """
    of_4 = max(1.0, _of_4(local_steps) * _between(sorted(BESIDE_ROUNDS.items()), beside))
    if num_members <= MEASURED_MEMBERS:
        return float(num_members ** math.log(of_4, MEASURED_MEMBERS))
    return float(of_4 * (num_members / MEASURED_MEMBERS) ** math.log2(GAIN_OF_8 / GAIN_OF_4))


def worth_of_token(num_members: int, local_steps: int, *, beside: float = 0.0) -> float:
    """Beside one that one machine trains on alone; 1 where members average after each step. `beside` as in `gain`."""
    return 1.0 if local_steps == 1 else min(1.0, gain(num_members, local_steps, beside=beside) / num_members)


def is_measured(num_members: int, local_steps: int, *, beside: float = 0.0) -> bool:
    """Whether it lies between what was measured."""
    if local_steps == 1:
        return True
    steps = [BESIDE_STEPS] if beside else [*GAINS]
    return num_members <= MEASURED_TO and min(steps) <= local_steps <= max(steps)


def _of_4(local_steps: int) -> float:
    points = sorted({1: SYNCHRONOUS_GAIN, **GAINS}.items())
    return _between([(math.log(steps), found) for steps, found in points], math.log(local_steps))


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """On the lines through these, of which the first and the last go on."""
    after = next((number for number, (where, _) in enumerate(points) if where >= at), len(points) - 1)
    (low, first), (high, last) = points[max(0, after - 1)], points[max(1, after)]
    return first + (last - first) * (at - low) / (high - low)
