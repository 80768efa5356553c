"""The int4, int2 and top-k kernels write the bits of their plain references, and refuse what they never write."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.codecs import hadamard_tiles, int2_blocks, int4_blocks, int4_tokens, topk
from kernels.codecs.outliers import num_outliers
from tests.kernels import reference_low_bit as reference
from tests.kernels.codecs.test_int8 import SEED, edge_values
from tests.kernels.reference import from_bfloat16
from tests.kernels.test_golden import exact_floats, exact_scales

Floats = NDArray[np.float32]


def plain(size: int) -> Floats:
    return exact_floats("plain", size)


def zeros(size: int) -> Floats:
    return np.zeros(size, dtype=np.float32)


def ties(size: int) -> Floats:
    """Few magnitudes, each many times, of both signs."""
    return np.rint(exact_floats("ties", size) * np.float32(2)).astype(np.float32)


def mostly_zero(size: int) -> Floats:
    values = zeros(size)
    values[::397] = exact_floats("few", values[::397].size)
    return values


def one_magnitude(size: int) -> Floats:
    return np.where(np.arange(size) % 3 == 0, np.float32(-0.375), np.float32(0.375))


MAKERS = [edge_values, plain, zeros, ties, mostly_zero, one_magnitude]


def blocks(values: Floats, seed: NDArray[np.uint64] = SEED) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    scales = np.empty(-(-values.size // 64), dtype=np.uint16)
    packed = np.empty(-(-values.size // 2), dtype=np.uint8)
    assert int4_blocks.encode(values, seed, scales, packed)
    return scales, packed


def quarters(values: Floats, seed: NDArray[np.uint64] = SEED) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    scales = np.empty(-(-values.size // 64), dtype=np.uint16)
    packed = np.empty(-(-values.size // 4), dtype=np.uint8)
    assert int2_blocks.encode(values, seed, scales, packed)
    return scales, packed


def largest(values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    marks = np.empty(-(-values.size // 8), dtype=np.uint8)
    chosen = np.empty(topk.num_chosen(values.size), dtype=np.float32)
    assert topk.select(values, marks, chosen)
    return marks, chosen


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 127, 1000, 4096])
@pytest.mark.parametrize("make", MAKERS)
def test_blocks_equal_the_reference_when_encoded_and_decoded(size: int, make: Callable[[int], Floats]) -> None:
    values = make(size)
    scales, packed = blocks(values)
    expected_scales, expected_packed = reference.encode_int4_blocks(values, SEED)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(packed, expected_packed)
    decoded = np.empty(size, dtype=np.float32)
    assert int4_blocks.decode(scales, packed, decoded)
    assert decoded.tobytes() == reference.decode_int4_blocks(scales, packed, size).tobytes()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 64, 65, 127, 1000, 4096])
@pytest.mark.parametrize("make", MAKERS)
def test_int2_blocks_equal_the_reference_when_encoded_and_decoded(size: int, make: Callable[[int], Floats]) -> None:
    values = make(size)
    scales, packed = quarters(values)
    expected_scales, expected_packed = reference.encode_int2_blocks(values, SEED)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(packed, expected_packed)
    decoded = np.empty(size, dtype=np.float32)
    assert int2_blocks.decode(scales, packed, decoded)
    assert decoded.tobytes() == reference.decode_int2_blocks(scales, packed, size).tobytes()


@pytest.mark.parametrize("width", [1, 2, 5, 31, 32, 33, 64, 100, 256, 515])
@pytest.mark.parametrize("make", MAKERS)
def test_tokens_equal_the_reference_when_encoded_and_decoded(width: int, make: Callable[[int], Floats]) -> None:
    rows_TD = make(6 * width).reshape(6, width)
    num_of_them = num_outliers(width)
    scales = np.empty((6, -(-width // 32)), dtype=np.uint16)
    outliers = np.empty((6, num_of_them), dtype=np.uint16)
    indices = np.empty((6, num_of_them), dtype=np.uint16)
    packed = np.empty((6, -(-width // 2)), dtype=np.uint8)
    assert int4_tokens.encode(rows_TD, scales, outliers, indices, packed)
    decoded = np.empty_like(rows_TD)
    assert int4_tokens.decode(scales, outliers, indices, packed, decoded)
    for token in range(6):
        expected = reference.encode_int4_token(rows_TD[token], num_of_them)
        for array, wanted in zip((scales, outliers, indices, packed), expected, strict=True):
            np.testing.assert_array_equal(array[token], wanted)
        assert decoded[token].tobytes() == reference.decode_int4_token(*expected, width).tobytes()


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 515])
@pytest.mark.parametrize("make", MAKERS)
def test_tiles_equal_the_reference_when_turned(width: int, make: Callable[[int], Floats]) -> None:
    rows_TD = make(6 * width).reshape(6, width)
    turned, flags = np.empty_like(rows_TD), np.empty((6, -(-width // 32)), np.uint8)
    assert hadamard_tiles.turn(rows_TD, turned, flags)
    for token in range(6):
        expected, is_turned = reference.turned_tiles(rows_TD[token], num_outliers(width))
        np.testing.assert_array_equal(flags[token], is_turned)
        np.testing.assert_array_equal(turned[token], expected)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("make", MAKERS)
def test_topk_equals_the_reference_when_selected_and_scattered(size: int, make: Callable[[int], Floats]) -> None:
    values = make(size)
    marks, chosen = largest(values)
    expected_marks, expected_chosen = reference.select_topk(values)
    np.testing.assert_array_equal(marks, expected_marks)
    assert chosen.tobytes() == expected_chosen.tobytes()
    scattered = np.full(size, np.nan, dtype=np.float32)
    assert topk.scatter(marks, chosen, scattered)
    assert scattered.tobytes() == reference.scatter_topk(marks, chosen, size).tobytes()


def test_scatter_refuses_marks_that_are_not_three_eighths_of_each_chunk() -> None:
    values = plain(4096 + 100)
    marks, chosen = largest(values)
    out = np.empty_like(values)
    for place in (0, 4095, 4096, 4195):
        hostile = marks.copy()
        hostile[place // 8] ^= np.uint8(1 << place % 8)
        assert not topk.scatter(hostile, chosen, out), f"bit {place}"
    moved = marks.copy()  # as many marks in all, one fewer in the first chunk
    first, second = (int(np.flatnonzero(row)[0]) for row in ((marks[:512] & 1), (~marks[512:524] & 1)))
    moved[first] ^= np.uint8(1)
    moved[512 + second] ^= np.uint8(1)
    assert not topk.scatter(moved, chosen, out)
    past = marks.copy()
    past[-1] |= np.uint8(0x80)
    assert not topk.scatter(past, chosen, out)
    assert topk.scatter(marks, chosen, out)


def test_decoded_values_are_zero_or_normal_when_values_are_tiny() -> None:
    values = exact_floats("tiny", 8192) * exact_scales("tiny", 8192)
    decoded = np.empty_like(values)
    assert int4_blocks.decode(*blocks(values), decoded)
    assert np.all((decoded.view(np.uint32) == 0) | (np.abs(decoded) >= np.float32(2.0**-126)))
    assert np.any(decoded != 0)


def test_largest_scale_is_that_of_the_largest_value() -> None:
    limit = np.full(4096, np.nextafter(np.float32(2.0**126), np.float32(0)), dtype=np.float32)
    assert set(blocks(limit)[0].tolist()) == {int(int4_blocks.LARGEST_SCALE)}
    assert int4_blocks.LARGEST_SCALE == int4_tokens.LARGEST_SCALE
    assert set(quarters(limit)[0].tolist()) == {int(int2_blocks.LARGEST_SCALE)}


@pytest.mark.parametrize(
    ("encode", "decode", "spacing"), [(blocks, int4_blocks.decode, 1), (quarters, int2_blocks.decode, 2)]
)
def test_rounding_is_unbiased_when_averaged_over_seeds(
    encode: Callable[..., tuple[NDArray[np.uint16], NDArray[np.uint8]]], decode: Callable[..., bool], spacing: int
) -> None:
    values = exact_floats("unbiased", 64 * 64)
    total = np.zeros(values.size)
    rounds = 400
    decoded = np.empty_like(values)
    for index in range(rounds):
        seed = np.frombuffer(hashlib.sha256(index.to_bytes(4, "big")).digest(), dtype=np.uint64)
        scales, packed = encode(values, seed)
        assert decode(scales, packed, decoded)
        total += decoded
    steps = spacing * np.repeat(from_bfloat16(scales), 64).astype(np.float64)
    error = (total / rounds - values) / steps
    # A fair coin's mean errs by at most 0.5 / sqrt(rounds) standard deviations: 0.025 steps here, 0 on average.
    assert abs(error.mean()) < 5 * 0.025 / np.sqrt(error.size)
    assert np.abs(error).max() < 6 * 0.025


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 2.0**126, -(2.0**127)])
def test_kernels_refuse_values_that_cannot_be_sent(bad: float) -> None:
    values = plain(5000)
    values[4999] = bad
    assert not int4_blocks.encode(values, SEED, np.empty(79, np.uint16), np.empty(2500, np.uint8))
    assert not int2_blocks.encode(values, SEED, np.empty(79, np.uint16), np.empty(1250, np.uint8))
    assert not topk.select(values, np.empty(625, np.uint8), np.empty(1875, np.float32))
    rows, shapes = values[-100:].reshape(1, 100), ((1, 4), (1, 4), (1, 4))
    arrays = [np.empty(shape, np.uint16) for shape in shapes]
    assert not int4_tokens.encode(rows, *arrays, np.empty((1, 50), np.uint8))
