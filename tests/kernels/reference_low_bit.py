"""The low-bit kernels once more in plain numpy: the definition of their bits."""

import numpy as np
from numpy.typing import NDArray

from tests.kernels.reference import chances, from_bfloat16, to_bfloat16

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SMALLEST = np.float32(2.0**-126)


def scale_of_seven(values: Floats) -> tuple[np.uint16, np.float32]:
    """bf16 bits and value of largest magnitude / 7, rounded up; 0 if below 2^-126."""
    return _scale(values, 7)


def _scale(values: Floats, largest_code: int) -> tuple[np.uint16, np.float32]:
    exact = np.max(np.abs(values), initial=np.float32(0)) / np.float32(largest_code)
    if exact < _SMALLEST:
        return np.uint16(0), np.float32(0)
    bits = np.uint16((int(exact.view(np.uint32)) + 0xFFFF) >> 16)
    return bits, from_bfloat16(np.array([bits]))[0]


def packed(codes: NDArray[np.int8]) -> Bytes:
    """Two codes a byte, the first in the low half; an odd last one stands with a 0."""
    halves = np.pad(codes, (0, codes.size % 2)).astype(np.uint8) & np.uint8(15)
    return halves[0::2] | (halves[1::2] << np.uint8(4))


def unpacked(data: Bytes, size: int) -> NDArray[np.int8]:
    halves = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=1).reshape(-1)[:size]
    return ((halves ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.int8)


def _rounded_by_chance(values: Floats, scale: np.float32, chance: NDArray[np.int64]) -> NDArray[np.int8]:
    fixed = (values * (np.float32(1) / scale)) * np.float32(65536) + np.float32(8 * 65536)
    return np.clip(((fixed.astype(np.int64) + chance) >> 16) - 8, -7, 7).astype(np.int8)


def encode_int4_blocks(values: Floats, seed: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], Bytes]:
    """Scales and bytes of `kernels.codecs.int4_blocks.encode`; values are finite and below 2^126."""
    scales, codes = [], np.zeros(values.size, np.int8)
    for block, start in enumerate(range(0, values.size, 64)):
        part = values[start : start + 64]
        bits, scale = scale_of_seven(part)
        scales.append(bits)
        if bits:
            codes[start : start + 64] = _rounded_by_chance(part, scale, chances(seed, block, part.size))
    return np.array(scales, np.uint16), packed(codes)


def decode_int4_blocks(scales: NDArray[np.uint16], data: Bytes, size: int) -> Floats:
    """code * scale, a scale for each 64 codes."""
    return unpacked(data, size).astype(np.float32) * np.repeat(from_bfloat16(scales), 64)[:size] + np.float32(0)


def encode_int2_blocks(values: Floats, seed: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], Bytes]:
    """Scales and bytes of `kernels.codecs.int2_blocks.encode`; values are finite and below 2^126."""
    scales, codes = [], np.zeros(-(-values.size // 4) * 4, np.uint8)
    for block, start in enumerate(range(0, values.size, 64)):
        part = values[start : start + 64]
        bits, scale = _scale(part, 3)
        scales.append(bits)
        if bits:
            fixed = (part * (np.float32(1) / scale)) * np.float32(32768) + np.float32(3 * 32768)
            rounded = (fixed.astype(np.int64) + chances(seed, block, part.size)) >> 16
            codes[start : start + part.size] = np.clip(rounded, 0, 3)
    return np.array(scales, np.uint16), (codes.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)).sum(1).astype(
        np.uint8
    )


def decode_int2_blocks(scales: NDArray[np.uint16], data: Bytes, size: int) -> Floats:
    """(2 code - 3) * scale, a scale for each 64 codes."""
    codes = ((data[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)).reshape(-1)[:size]
    levels = 2 * codes.astype(np.float32) - np.float32(3)
    return levels * np.repeat(from_bfloat16(scales), 64)[:size] + np.float32(0)


def encode_int4_token(
    row: Floats, num_outliers: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint16], Bytes]:
    """Scales, outliers, indices and bytes of one token in `kernels.codecs.int4_tokens.encode`."""
    indices = np.argsort(-np.abs(row), kind="stable")[:num_outliers]
    rest = row.copy()
    rest[indices] = 0
    scales, codes = [], np.zeros(row.size, np.int8)
    for start in range(0, row.size, 32):
        bits, scale = scale_of_seven(rest[start : start + 32])
        scales.append(bits)
        if bits:
            codes[start : start + 32] = np.rint(rest[start : start + 32] * (np.float32(1) / scale))
    return np.array(scales, np.uint16), to_bfloat16(row[indices]), indices.astype(np.uint16), packed(codes)


def decode_int4_token(
    scales: NDArray[np.uint16], outliers: NDArray[np.uint16], indices: NDArray[np.uint16], data: Bytes, width: int
) -> Floats:
    """code * scale, a scale for each 32 codes, then the outliers in their places."""
    row = unpacked(data, width).astype(np.float32) * np.repeat(from_bfloat16(scales), 32)[:width] + np.float32(0)
    row[indices] = from_bfloat16(outliers)
    return row


def turned_tiles(row: Floats, num_outliers: int) -> tuple[Floats, NDArray[np.bool_]]:
    """A token's row and which of its tiles are turned, as `kernels.codecs.hadamard_tiles.turn` has them."""
    matrix = np.ones((1, 1), np.float32)
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    aside = np.argsort(-np.abs(row), kind="stable")[:num_outliers]
    made, is_turned = row.copy(), np.zeros(-(-row.size // 32), np.bool_)
    for tile in range(row.size // 32):
        part = row[tile * 32 : tile * 32 + 32]
        most = np.abs(part).max()
        if tile in aside // 32 or not 2.0**-60 <= most < 2.0**60:
            continue
        spread = np.where(np.abs(part) >= 2.0**-90, part, np.float32(0))
        for half in (1, 2, 4, 8, 16):
            pairs = spread.reshape(-1, 2, half) * np.float32(0.5)
            spread = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        np.testing.assert_allclose(spread, matrix @ part.astype(np.float64) / 32, atol=float(most) * 1e-6)
        if np.abs(spread).max() * np.float32(32**0.5) < most:
            made[tile * 32 : tile * 32 + 32], is_turned[tile] = spread, True
    return made, is_turned


def select_topk(values: Floats) -> tuple[Bytes, Floats]:
    """Marks and chosen values of `kernels.codecs.topk.select`; values are finite and below 2^126."""
    marked = np.zeros(values.size, np.bool_)
    for start in range(0, values.size, 4096):
        part = values[start : start + 4096]
        marked[start + np.argsort(-np.abs(part), kind="stable")[: -(-part.size * 3 // 8)]] = True
    return np.packbits(marked, bitorder="little"), values[marked]


def scatter_topk(marks: Bytes, chosen: Floats, size: int) -> Floats:
    """The chosen values in their places, 0 elsewhere."""
    values = np.zeros(size, np.float32)
    values[np.unpackbits(marks, count=size, bitorder="little").view(np.bool_)] = chosen
    return values
