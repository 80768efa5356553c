"""This is where contributions to a part become one vector: the exact weighted mean, or CenteredClip.

CenteredClip (Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", 2021) moves a center v
by the mean of the contributions' differences from it, each cut to a radius, so that no contributor moves the result
far. Elementwise fp32 multiplications and additions in the given order of contributors; distances are
norms of `kernels.norms`; everything else is fp64 on a few numbers.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kernels import formats, norms, robust

Floats = NDArray[np.float32]

MAX_ITERATIONS = 5


def aggregate(
    values: Sequence[Floats],
    weights: Sequence[int],
    *,
    rule: Literal["mean", "centered_clip"],
    norm_cap: float | None = None,
) -> Floats:
    """One vector from each contributor's (fp32, equal sizes, below 2^126) and its count of tokens (positive).

    `mean` is sum of fp32(count / all counts) * vector. `centered_clip` is, for fewer than three contributors, that
    mean with vectors longer than `norm_cap` (if given) scaled down to it. For three or more:

    - A count above all others together weighs as much as they do.
    - A contributor's distance is the norm of (vector - v), times sqrt(count / median count) if its count is
      below the median: the mean of fewer tokens is noisier by the inverse of that, not hostile. A larger count does
      not lengthen the distance, for then most of it is the noise of v.
    - v starts at the coordinate median; the radius is the median distance from it, and stays. If that is 0 (most
      contributors are zero where the others touched a row), it is the (lower) median of the distances that are not 0,
      and at most `norm_cap` (if given).
    - At most 5 times: v += sum of share * min(1, radius / distance) * (vector - v). Once nobody's difference is cut,
      the result is the weighted mean.
    """
    assert len(values) == len(weights) > 0, f"{len(values)} vectors, {len(weights)} weights"
    assert all(weight > 0 for weight in weights), f"weights {list(weights)}"
    if rule == "mean":
        return _weighted_mean(values, weights, [1.0] * len(values))
    if len(values) < 3:
        cap = math.inf if norm_cap is None else norm_cap
        return _weighted_mean(values, weights, [_within(cap, norms.tree_norm(vector)) for vector in values])
    return _centered_clip(np.stack(values), weights, norm_cap)


def _centered_clip(rows_NV: Floats, weights: Sequence[int], norm_cap: float | None) -> Floats:
    capped = [min(weight, sum(weights) - weight) for weight in weights]
    total = sum(capped)
    ordered = sorted(weights)
    twice_median = ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]
    calm = [math.sqrt(min(1.0, 2 * weight / twice_median)) for weight in weights]

    center = np.empty(rows_NV.shape[1], dtype=np.float32)
    robust.median(rows_NV, center)
    distances = _distances(rows_NV, center, calm)
    radius = _radius(distances, norm_cap)
    for _ in range(MAX_ITERATIONS):
        cuts = [_within(radius, distance) for distance in distances]
        if min(cuts) == 1.0:
            return _weighted_mean(rows_NV, capped, cuts)
        moved = center.copy()
        for row, weight, cut in zip(rows_NV, capped, cuts, strict=True):
            robust.add_scaled_difference(row, center, np.float32(weight / total * cut), moved)
        center = _flushed(moved)
        distances = _distances(rows_NV, center, calm)
    return center


def _distances(rows_NV: Floats, center: Floats, calm: Sequence[float]) -> list[float]:
    return [norms.tree_distance(row, center) * factor for row, factor in zip(rows_NV, calm, strict=True)]


def _radius(distances: Sequence[float], norm_cap: float | None) -> float:
    ordered = sorted(distances)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    if median > 0:
        return median
    touched = [distance for distance in ordered if distance > 0]
    lower_median = touched[(len(touched) - 1) // 2] if touched else 0.0
    return lower_median if norm_cap is None else min(lower_median, norm_cap)


def _within(limit: float, length: float) -> float:
    """Factor that brings a vector of this length down to `limit`."""
    return 1.0 if length <= limit else limit / length


def _weighted_mean(values: Sequence[Floats] | Floats, weights: Sequence[int], factors: Sequence[float]) -> Floats:
    total = sum(weights)
    mean = np.zeros_like(values[0])
    for vector, weight, factor in zip(values, weights, factors, strict=True):
        robust.add_scaled(vector, np.float32(weight / total * factor), mean)
    return _flushed(mean)


def _flushed(vector: Floats) -> Floats:
    """`vector` with magnitudes below 2^-126 written as zero, in place."""
    formats.flush(vector.view(np.int32), vector.view(np.int32))
    return vector
