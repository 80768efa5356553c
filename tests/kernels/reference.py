"""Each kernel once more in plain numpy: slow, easy to check, and the definition of its bits."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_SMALLEST = np.float32(2.0**-126)


def flushed(values: Floats) -> Floats:
    """Values with magnitudes below 2^-126 replaced by +0."""
    return np.where(np.abs(values) < _SMALLEST, np.float32(0), values)


def halving_sum(values: NDArray[np.float64]) -> float:
    """Sum of values padded with zeros to a power of two, the upper half added to the lower until one is left."""
    width = 1
    while width < values.size:
        width *= 2
    padded = np.zeros(width)
    padded[: values.size] = values
    while width > 1:
        width //= 2
        padded = padded[:width] + padded[width:]
    return float(padded[0])


def tree_norm(values: Floats) -> float:
    """See `kernels.norms.tree_norm`."""
    squares = values.astype(np.float64) ** 2
    runs = [np.pad(run, (0, 4096 - run.size)) for run in np.split(squares, range(4096, values.size, 4096))]
    return float(np.sqrt(halving_sum(np.array([halving_sum(run) for run in runs]))))


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Nearest bf16, ties to even, as its 16 bits."""
    bits = flushed(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(halves: NDArray[np.uint16]) -> Floats:
    """fp32 values of bf16 bits."""
    return flushed((halves.astype(np.uint32) << np.uint32(16)).view(np.float32))


def scale_of(block: Floats, smallest: np.float32 = _SMALLEST) -> tuple[np.uint16, np.float32]:
    """bf16 bits and value of largest magnitude / 127, rounded up; 0 if below `smallest`."""
    exact = np.max(np.abs(block), initial=np.float32(0)) / np.float32(127)
    if exact < smallest:
        return np.uint16(0), np.float32(0)
    bits = np.uint16((int(exact.view(np.uint32)) + 0xFFFF) >> 16)
    return bits, from_bfloat16(np.array([bits]))[0]


def mix64(state: int) -> int:
    """Finalizer of splitmix64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def chances(seed: NDArray[np.uint64], block: int, count: int) -> NDArray[np.int64]:
    """16 random bits for each value of a block, as whole numbers."""
    key = block * 0x9E3779B97F4A7C15 % 2**64
    for word in seed:
        key = mix64(key ^ int(word))
    state = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key % 2**32)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x7FEB352D)
    state = state ^ np.uint32(key >> 32)
    state = (state ^ (state >> np.uint32(15))) * np.uint32(0x846CA68B)
    return (state >> np.uint32(16)).astype(np.int64)


def draws_of_block(seed: NDArray[np.uint64], block: int, count: int) -> NDArray[np.uint32]:
    """32 random bits for each of a block's values: two rounds of lowbias32, the block's key entering before each."""
    key = 0
    for word in seed:
        key = mix64(key ^ int(word))
    key = mix64((key + block * 0x9E3779B97F4A7C15) % 2**64)
    state = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key % 2**32)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x7FEB352D)
    state = state ^ np.uint32(key >> 32)
    state = (state ^ (state >> np.uint32(15))) * np.uint32(0x846CA68B)
    return state ^ (state >> np.uint32(16))


def half_draws(seed: NDArray[np.uint64], block: int) -> NDArray[np.int64]:
    """15 random bits for each value of a block of 128; a draw serves two values."""
    draws = draws_of_block(seed, block, 64)
    halves: NDArray[np.int64] = np.concatenate([draws >> np.uint32(17), draws & np.uint32(0x7FFF)]).astype(np.int64)
    return halves


def encode_int8_blocks(values: Floats, seed: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Scales and codes of `kernels.codecs.int8_blocks.encode`; values are finite and below 2^126."""
    scales, codes = [], np.zeros(values.size, np.int8)
    for block, part in enumerate(np.split(values, range(128, values.size, 128)) if values.size else []):
        bits, scale = scale_of(part, np.float32(2.0**-110))
        scales.append(bits)
        if bits:
            fixed = np.rint(part * (np.float32(2.0**15) / scale)).astype(np.int64)
            codes[block * 128 : block * 128 + part.size] = (fixed + half_draws(seed, block)[: part.size]) >> 15
    return np.array(scales, np.uint16), codes


def decode_int8_blocks(scales: NDArray[np.uint16], codes: NDArray[np.int8]) -> Floats:
    """code * scale, a scale for each 128 codes."""
    return codes.astype(np.float32) * np.repeat(from_bfloat16(scales), 128)[: codes.size] + np.float32(0)


def encode_int8_token(
    row: Floats, num_outliers: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint16], NDArray[np.int8]]:
    """Scales, outliers, indices and codes of one token in `kernels.codecs.int8_tokens.encode`."""
    indices = np.argsort(-np.abs(row), kind="stable")[:num_outliers]
    outliers = to_bfloat16(row[indices])
    rest = row.copy()
    rest[indices] = 0
    scales, codes = [], np.zeros(row.size, np.int8)
    for start in range(0, row.size, 64):
        bits, scale = scale_of(rest[start : start + 64])
        scales.append(bits)
        if bits:
            codes[start : start + 64] = np.rint(rest[start : start + 64] * (np.float32(1) / scale))
    return np.array(scales, np.uint16), outliers, indices.astype(np.uint16), codes


def decode_int8_token(
    scales: NDArray[np.uint16], outliers: NDArray[np.uint16], indices: NDArray[np.uint16], codes: NDArray[np.int8]
) -> Floats:
    """code * scale, a scale for each 64 codes, then the outliers in their places."""
    row = codes.astype(np.float32) * np.repeat(from_bfloat16(scales), 64)[: codes.size] + np.float32(0)
    row[indices] = from_bfloat16(outliers)
    return row


def adamw(
    weights: Floats, gradient: Floats, first: Floats, second: Floats, keep: Floats, times: Floats, scalars: Floats
) -> tuple[Floats, Floats, Floats]:
    """New weights, first and second moments; `keep` and `times` for each value, the rest as in `kernels.optimizers`."""
    clip, beta1, rest1, beta2, rest2, unbias, epsilon, moment_share, gradient_share = scalars
    slope = gradient * clip
    mean = flushed(first * beta1 + slope * rest1)
    square = flushed(second * beta2 + (slope * slope) * rest2)
    update = (mean * moment_share + slope * gradient_share) / (np.sqrt(square) * unbias + epsilon)
    return flushed(weights * keep - update * times), mean, square


def adamw_int8(
    weights: Floats,
    gradient: Floats,
    first: NDArray[np.int8],
    second: NDArray[np.uint8],
    scales: Floats,
    keep: Floats,
    times: Floats,
    scalars: Floats,
    seed: NDArray[np.uint64],
) -> tuple[Floats, NDArray[np.int8], NDArray[np.uint8], Floats]:
    """New weights, codes and scales; `keep` and `times` for each value, the rest as in `kernels.int8_moments.adamw`."""
    clip, beta1, rest1, beta2, rest2, unbias, epsilon, moment_share, gradient_share, limit = scalars
    one, two, step = np.float32(1), np.float32(2), limit / np.float32(127**2)
    old_mean, old_square = decode_int8_moments(first, second, scales, limit)
    slope = gradient * clip
    mean = flushed(old_mean * beta1 + slope * rest1)
    roots = np.sqrt(flushed(old_square * beta2 + slope * slope * rest2))
    update = (mean * moment_share + slope * gradient_share) / (roots * unbias + epsilon)
    out = flushed(weights * keep - update * times)

    starts = range(0, weights.size, 128)
    largest = np.array([roots[start : start + 128].max() for start in starts], np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(255**2) / largest, np.float32(0))
        scales = largest / np.float32(255**2)
        draws = np.concatenate([draws_of_block(seed, block, 128) for block in range(len(starts))])[: weights.size]
        square = roots * np.repeat(inverse, 128)[: weights.size]
        code = np.floor(np.sqrt(square))
        width = (two * code + one) * ((two * code + two) * code + one)
        chance = (draws >> np.uint32(16)).astype(np.float32) * np.float32(2.0**-16)
        above = chance * width < (square - code * code) * (square + code * code)
        code = np.minimum(code + above, np.float32(255))
        unit = code * code * np.repeat(scales, 128)[: weights.size] * step
        ratio = np.minimum(np.abs(mean) / np.where(code > 0, unit, one), np.float32(127**2))
        size = np.floor(np.sqrt(ratio))
        chance = (draws & np.uint32(0xFFFF)).astype(np.float32) * np.float32(2.0**-16)
        size = size + (chance * (two * size + one) < ratio - size * size)
    signed = np.where(code > 0, np.where(mean > 0, size, -size), 0)
    return out, signed.astype(np.int8), code.astype(np.uint8), scales


def decode_int8_moments(
    first: NDArray[np.int8], second: NDArray[np.uint8], scales: Floats, limit: np.float32
) -> tuple[Floats, Floats]:
    """The first and second moments that codes of `kernels.int8_moments` stand for."""
    codes, ratios = second.astype(np.float32), first.astype(np.float32)
    roots = codes * codes * np.repeat(scales, 128)[: codes.size]
    return ratios * np.abs(ratios) * (limit / np.float32(127**2)) * roots, roots * roots


def sgd(
    weights: Floats, gradient: Floats, velocity: Floats, keep: Floats, times: Floats, scalars: Floats
) -> tuple[Floats, Floats]:
    """New weights and velocity."""
    clip, momentum, rate = scalars
    speed = flushed(velocity * momentum + gradient * clip)
    return flushed(weights * keep - speed * rate * times), speed


def trimmed_mean(rows_NV: Floats, num_trimmed: int) -> Floats:
    """Sum of 1 / kept times each value of a column but the `num_trimmed` lowest and highest, in rising order."""
    ordered = np.sort(rows_NV, axis=0)[num_trimmed : len(rows_NV) - num_trimmed]
    total = np.zeros(rows_NV.shape[1], np.float32)
    for row in ordered:
        total = total + row * np.float32(1 / len(ordered))
    return flushed(total)


def median(rows_NV: Floats) -> Floats:
    """Median of each column; half of each of the two middle values for an even number of rows."""
    return trimmed_mean(rows_NV, (len(rows_NV) - 1) // 2)


def moved(rows_NV: Floats, center: Floats, factors_N: Floats) -> Floats:
    """A move of CenteredClip: center + sum of (row - center) * factor."""
    total = center
    for row, factor in zip(rows_NV, factors_N, strict=True):
        total = total + (row - center) * factor
    return flushed(total)
