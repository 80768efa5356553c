"""One vector of all contributions to a part: the exact weighted mean, or one that resists liars.

CenteredClip (Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", 2021) moves a center v
by the mean of the contributions' differences from it, each cut to a radius, so that no contributor moves the result
far. Elementwise fp32 multiplications and additions in the given order of contributors; distances are
norms of `kernels.norms`; everything else is fp64 on a few numbers.

Trimmed mean and median (Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", 2018) look at each
coordinate by itself and at no weights: a liar's vote counts like any other, and so does a small contribution's noise.
Both lose what only one contributor touched.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels import clipping, norms, robust
from kernels.codecs import formats
from kernels.threads import ONE_THREAD, Threads

Floats = NDArray[np.float32]
Rule: TypeAlias = Literal["mean", "centered_clip", "trimmed_mean", "median", "centered_clip_of_windows"]

MAX_ITERATIONS = 5


def aggregate(
    values: Sequence[Floats] | Floats,
    weights: Sequence[int],
    *,
    rule: Rule,
    norm_cap: float | None = None,
    threads: Threads = ONE_THREAD,
) -> Floats:
    """One vector from each contributor's (fp32, equal sizes, below 2^126) and its count of tokens (positive).

    The vectors may be the rows of one array, which then need not be copied together.

    `mean` is sum of fp32(count / all counts) * vector. The other rules are, for fewer than three contributors, that
    mean with vectors longer than `norm_cap` (if given) scaled down to it. For three or more, `median` is each
    coordinate's; `trimmed_mean` is each coordinate's unweighted mean without the lowest and highest quarter (rounded
    down, at least one); and `centered_clip` is:

    - A count above all others together weighs as much as they do.
    - A contributor's distance is the norm of (vector - v), times sqrt(count / median count) if its count is
      below the median: the mean of fewer tokens is noisier by the inverse of that, not hostile. A larger count does
      not lengthen the distance, for then most of it is the noise of v.
      Under `centered_clip_of_windows` no distance is scaled: what a window of steps has gone is no mean with noise.
    - v starts at the coordinate median; the radius is the median distance from it, and stays. If that is 0 (most
      contributors are zero where the others touched a row), it is the (lower) median of the distances that are not 0,
      and at most `norm_cap` (if given).
    - At most 5 times: v += sum of share * min(1, radius / distance) * (vector - v). Once nobody's difference is cut,
      the result is the weighted mean.
    """
    assert len(values) == len(weights) > 0, f"{len(values)} vectors, {len(weights)} weights"
    assert all(weight > 0 for weight in weights), f"weights {list(weights)}"
    if rule == "mean":
        return _weighted_mean(values, weights, [1.0] * len(values), threads)
    if len(values) < 3:
        cap = math.inf if norm_cap is None else norm_cap
        cuts = [_within(cap, norms.tree_norm(vector, threads=threads)) for vector in values]
        return _weighted_mean(values, weights, cuts, threads)
    rows_NV = np.ascontiguousarray(values) if isinstance(values, np.ndarray) else np.stack(values)
    if rule in ("centered_clip", "centered_clip_of_windows"):
        return _centered_clip(rows_NV, weights, norm_cap, threads, is_noisy=rule == "centered_clip")
    result = np.empty(rows_NV.shape[1], dtype=np.float32)
    if rule == "median":
        robust.median(rows_NV, result, threads=threads)
    else:
        robust.trimmed_mean(rows_NV, max(1, len(rows_NV) // 4), result, threads=threads)
    return result


def _centered_clip(
    rows_NV: Floats, weights: Sequence[int], norm_cap: float | None, threads: Threads, *, is_noisy: bool
) -> Floats:
    capped = [min(weight, sum(weights) - weight) for weight in weights]
    total = sum(capped)
    ordered = sorted(weights)
    twice_median = ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]
    calm = [math.sqrt(min(1.0, 2 * weight / twice_median)) if is_noisy else 1.0 for weight in weights]

    center = np.empty(rows_NV.shape[1], dtype=np.float32)
    robust.median(rows_NV, center, threads=threads)
    distances = _scaled(clipping.distances(rows_NV, center, threads=threads), calm)
    radius = _radius(distances, norm_cap)
    for _ in range(MAX_ITERATIONS):
        cuts = [_within(radius, distance) for distance in distances]
        if min(cuts) == 1.0:
            return _weighted_mean(rows_NV, capped, cuts, threads)
        shares = [weight / total * cut for weight, cut in zip(capped, cuts, strict=True)]
        center, lengths = clipping.moved(rows_NV, center, np.array(shares, dtype=np.float32), threads=threads)
        distances = _scaled(lengths, calm)
    return center


def _scaled(lengths: Sequence[float], factors: Sequence[float]) -> list[float]:
    return [length * factor for length, factor in zip(lengths, factors, strict=True)]


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


def _weighted_mean(
    values: Sequence[Floats] | Floats, weights: Sequence[int], factors: Sequence[float], threads: Threads
) -> Floats:
    total = sum(weights)
    mean = np.zeros_like(values[0])
    for vector, weight, factor in zip(values, weights, factors, strict=True):
        robust.add_scaled(vector, np.float32(weight / total * factor), mean, threads=threads)
    formats.flush_in_place(mean.view(np.int32), threads=threads)  # magnitudes below 2^-126 are written as zero
    return mean
