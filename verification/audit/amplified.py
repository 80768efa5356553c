"""A contribution's error as AdamW takes it: in learning rates a step, not in shares of the gradient.

AdamW divides a gradient by the root of its running mean square. Where that is small, an error that is nothing beside
the whole gradient moves a weight by a whole learning rate, step after step. So the error d = claim - replay of each
value is held against what the optimizer, and claim a and replay b themselves, have there:

    u = d / (sqrt(v + a^2 + b^2) + epsilon)        |u| <= sqrt(2)

v is the second moment of the version that the work is added to. A bias held up for ever, were it everybody's, would
move the weight by about u learning rates a step. A *sketch* is u in few numbers, under signs that a seed draws; sums of
sketches of one seed are sketches of sums (Charikar, Chen, Farach-Colton, "Finding Frequent Items in Data Streams",
2002; with buckets in turn instead of drawn ones).
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.core.canonical import digest
from swarm.core.settings import RunSettings
from verification.audit.tolerance import CHUNK_FACTOR, CHUNK_VALUES, OFF, Tensor, halved_sum

REGIONS = 64
"""A sketch has so many regions of the stage's values at most, whole chunks each: a bias may lie in a few rows."""
BUCKETS = 16
"""Numbers in a sketch for each region."""

Sketch = NDArray[np.float64]
"""(regions, BUCKETS). The norm of a row is about the root mean square of u in that region."""


@dataclass(frozen=True)
class MovedBounds:
    """What u means for one way to compute and one codec on the wire, in learning rates a step."""

    fraud: float
    """Past it no honest rounding leads, in one audit."""
    spread: float
    """Root mean square over the stage that an honest error has at most."""
    bias: float
    """Of that, what may be the same in every audit: two machines of two kinds."""
    report_only: bool = False
    """Not calibrated: nothing is graded as fraud."""
    factor: float = 1.0
    """It is fraud past so many times as many own errors: the run key's."""


TABLE: dict[tuple[str, str], MovedBounds] = {
    ("fp32", "fp32"): MovedBounds(fraud=1e-2, spread=5e-4, bias=1e-4),
    ("fp32", "bf16"): MovedBounds(fraud=2e-2, spread=2e-3, bias=5e-4),
    ("fp32", "int8"): MovedBounds(fraud=2e-2, spread=2e-3, bias=5e-4),
    **{("bf16", codec): MovedBounds(fraud=4e-1, spread=2e-1, bias=4e-2) for codec in ("fp32", "bf16", "int8")},
}
"""By arithmetic (`ModelSettings.arithmetic`) and codec of contributions. Spreads are twice the largest honest one that
was measured, and more; a fraud bound leaves room for five values of a chunk that come out a whole code apart
(docs/calibration.md)."""
_UNKNOWN = MovedBounds(fraud=2.0, spread=2.0, bias=1.0, report_only=True)
"""More than anything comes to."""


def moved_bounds_for(arithmetic: str, codec: str) -> MovedBounds:
    """The bounds of contributions computed so and sent so."""
    return TABLE.get((arithmetic, codec), _UNKNOWN)


def moved_bounds_in_force(settings: RunSettings) -> MovedBounds:
    """Those of a run, as its key has them (`audits.contribution_bounds`)."""
    bounds = moved_bounds_for(settings.model.arithmetic, settings.codecs.averaging)
    factor = settings.audits.contribution_bounds
    widened = {name: factor * getattr(bounds, name) for name in ("fraud", "spread", "bias")}
    return replace(bounds, **widened, factor=factor)


@dataclass(frozen=True)
class Amplified:
    """How far a contribution leads astray, in learning rates a step."""

    whole: float
    """Root mean square over all values."""
    worst_chunk: float
    off: float
    """Share of the values that it moves by more than `OFF` of a learning rate."""
    sketch: Sketch | None = None

    @property
    def measured(self) -> float:
        """Held against the bound: of few values a quarter counts, as in the plain comparison."""
        return max(self.whole, self.worst_chunk / CHUNK_FACTOR)


def amplified(
    claimed: Tensor, replayed: Tensor, second: Tensor | None, *, epsilon: float, seed: bytes | None = None
) -> Amplified:
    """Of two flat finite vectors of one size, beside the second moments (None: the optimizer has none).

    With a `seed`, which whoever made the claim must not know, there is a sketch. Figures but the sketch's have the same
    bits on every machine.
    """
    size = replayed.size
    if size == 0:
        return Amplified(0.0, 0.0, 0.0)
    bounds = _regions(size)
    rows: list[NDArray[np.float64]] | None = [] if seed is not None else None
    squares, num_chunks, worst, num_off = np.zeros(len(bounds) - 1), max(1, size // CHUNK_VALUES), 0.0, 0
    for region, (first, last) in enumerate(pairwise(bounds)):
        chunk_squares = []
        stop = size if last == num_chunks else last * CHUNK_VALUES
        u = _moved(claimed, replayed, second, slice(first * CHUNK_VALUES, stop), epsilon)
        for chunk in range(first, last):
            within = u[
                (chunk - first) * CHUNK_VALUES : None if chunk == last - 1 else (chunk - first + 1) * CHUNK_VALUES
            ]
            chunk_squares.append(halved_sum(within * within))
            worst = max(worst, math.sqrt(chunk_squares[-1] / within.size))
        squares[region] = halved_sum(np.array(chunk_squares))
        num_off += int((np.abs(u) > OFF).sum())
        if rows is not None:
            assert seed is not None
            rows.append(_sketched(u, digest("bias-signs", [seed, region])))
    whole = math.sqrt(halved_sum(squares) / size)
    return Amplified(whole, worst, num_off / size, np.stack(rows) if rows is not None else None)


def region_sizes(num_values: int) -> NDArray[np.int64]:
    """Values in each region of a sketch."""
    chunks = np.array(_regions(num_values))
    ends = chunks * CHUNK_VALUES
    ends[-1] = num_values
    return np.diff(ends)


def _regions(size: int) -> list[int]:
    """The first chunk of each region, and the end."""
    num_chunks = max(1, size // CHUNK_VALUES)
    count = min(REGIONS, num_chunks)
    return [num_chunks * region // count for region in range(count + 1)]


def _moved(
    claimed: Tensor, replayed: Tensor, second: Tensor | None, where: slice, epsilon: float
) -> NDArray[np.float64]:
    a, b = claimed[where].astype(np.float64), replayed[where].astype(np.float64)
    d = a - b
    below = a * a + b * b
    if second is not None:
        below += second[where]
    u: NDArray[np.float64] = d / (np.sqrt(below) + epsilon)
    return u


def _sketched(u: NDArray[np.float64], seed: bytes) -> NDArray[np.float64]:
    """Value i goes to bucket i modulo `BUCKETS`, under a sign of its own."""
    chance: Any = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))
    num_rows = -(-u.size // BUCKETS)
    signs = np.unpackbits(np.frombuffer(chance.bytes(num_rows * BUCKETS // 8), dtype=np.uint8))
    signed = np.zeros(num_rows * BUCKETS)
    signed[: u.size] = np.where(signs[: u.size] == 1, u, -u)
    total: NDArray[np.float64] = signed.reshape(num_rows, BUCKETS).sum(axis=0)
    return total / math.sqrt(u.size)
