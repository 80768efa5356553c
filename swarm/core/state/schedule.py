"""A step's learning rate: a linear warmup, then half a cosine, or level and then a fall; the same bits everywhere.

Only IEEE additions, multiplications, divisions and square roots: `math.cos` differs between C libraries.

References: Hu et al., "MiniCPM" (2024), for warm-up, stable, decay; Hägele et al., "Scaling Laws and Compute-Optimal
Training Beyond Fixed Training Durations" (2024), for the fall by 1 - sqrt.
"""

import math

from swarm.core.settings import OptimizerSettings

_HALF_PI = 1.5707963267948966


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Rate of the step that turns version `step` into `step + 1`.

    Step 0 has 1 / warmup_steps of the peak, step warmup_steps - 1 all of it; from there, or from decay_steps before the
    end, it falls to final_learning_rate_share of it at total_steps, where it stays.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    is_level = settings.schedule == "wsd"
    start = settings.total_steps - settings.decay_steps if is_level else settings.warmup_steps
    length = max(1, settings.total_steps - start)
    progress = min(max(0, step - start), length) / length
    height = 1.0 - math.sqrt(progress) if is_level else 0.5 * (1.0 + cos_of_half_turns(progress))
    share = settings.final_learning_rate_share
    return settings.learning_rate * (share + (1.0 - share) * height)


def cos_of_half_turns(progress: float) -> float:
    """cos(pi * progress) for progress from 0 to 1, within 1e-15: -sin(pi/2 * y) of y = 2 * progress - 1, by Taylor.

    The series ends at degree 21, whose successor is below 4e-18 for these arguments.
    """
    angle = _HALF_PI * (2.0 * progress - 1.0)
    square = angle * angle
    series = 1.0
    for degree in range(21, 1, -2):
        series = 1.0 - series * square / (degree * (degree - 1))
    return -angle * series
