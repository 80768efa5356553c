"""The int8 kernels write the bits of their plain references, whatever the values and sizes."""

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import norms
from kernels.codecs import formats, int8_blocks, int8_tokens
from kernels.codecs.outliers import num_outliers
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats, exact_scales

SEED = np.frombuffer(hashlib.sha256(b"seed").digest(), dtype=np.uint64)


def edge_values(size: int) -> NDArray[np.float32]:
    """Values of every magnitude, with zeros of both signs, ties, equal magnitudes and the largest allowed one."""
    values = exact_floats("edge", size) * exact_scales("edge", size)
    special = [
        0.0,
        -0.0,
        1e-45,
        -1e-39,
        2.0**-126,
        1.0,
        -1.0,
        1.0,
        127.0,
        0.5,
        1.5,
        np.nextafter(2.0**126, 0, dtype="f4"),
    ]
    places = np.arange(0, size, 7)
    values[places] = np.resize(np.array(special, dtype=np.float32), places.size)
    return values


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize(
    "make", [edge_values, lambda size: exact_floats("plain", size), lambda size: np.zeros(size, "f4")]
)
def test_blocks_equal_the_reference_when_encoded_and_decoded(size: int, make: object) -> None:
    values = make(size)  # type: ignore[operator]
    scales = np.empty(-(-size // 128), dtype=np.uint16)
    codes = np.empty(size, dtype=np.int8)
    assert int8_blocks.encode(values, SEED, scales, codes)
    expected_scales, expected_codes = reference.encode_int8_blocks(values, SEED)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    decoded = np.empty(size, dtype=np.float32)
    assert int8_blocks.decode(scales, codes, decoded)
    assert decoded.tobytes() == reference.decode_int8_blocks(scales, codes).tobytes()


@pytest.mark.parametrize("width", [1, 2, 5, 63, 64, 65, 100, 256, 515])
@pytest.mark.parametrize(
    "make", [edge_values, lambda size: exact_floats("plain", size), lambda size: np.zeros(size, "f4")]
)
def test_tokens_equal_the_reference_when_encoded_and_decoded(width: int, make: object) -> None:
    rows_TD = make(6 * width).reshape(6, width)  # type: ignore[operator]
    num_of_them = num_outliers(width)
    scales = np.empty((6, -(-width // 64)), dtype=np.uint16)
    outliers = np.empty((6, num_of_them), dtype=np.uint16)
    indices = np.empty((6, num_of_them), dtype=np.uint16)
    codes = np.empty((6, width), dtype=np.int8)
    assert int8_tokens.encode(rows_TD, scales, outliers, indices, codes)
    decoded = np.empty_like(rows_TD)
    assert int8_tokens.decode(scales, outliers, indices, codes, decoded)
    for token in range(6):
        expected = reference.encode_int8_token(rows_TD[token], num_of_them)
        for array, wanted in zip((scales, outliers, indices, codes), expected, strict=True):
            np.testing.assert_array_equal(array[token], wanted)
        assert decoded[token].tobytes() == reference.decode_int8_token(*expected).tobytes()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 4095, 4096, 4097, 10_001])
def test_fused_decoders_equal_the_separate_steps_when_blocks_and_runs_are_cut(size: int) -> None:
    values = exact_floats("fused", size) * exact_scales("fused", size)
    scales, codes = np.empty(-(-size // 128), dtype=np.uint16), np.empty(size, dtype=np.int8)
    assert int8_blocks.encode(values, SEED, scales, codes)
    assert int8_blocks.is_valid(scales, codes)
    decoded, total = np.empty(size, dtype=np.float32), exact_floats("total", size)
    total[::5] = -0.0
    sums = total.copy()
    assert int8_blocks.decode(scales, codes, decoded)
    assert int8_blocks.sum_of_squares(scales, codes) == norms.sum_of_squares(decoded)
    assert decoded.tobytes() == reference.decode_int8_blocks(scales, codes).tobytes()
    int8_blocks.add_decoded(scales, codes, np.float32(0.3), sums)
    assert sums.tobytes() == (total + decoded * np.float32(0.3)).tobytes()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1_023, 1_024, 1_025, 10_001])
@pytest.mark.parametrize("num_terms", [1, 2, 5])
def test_fused_encoders_equal_the_separate_steps_when_blocks_and_tiles_are_cut(size: int, num_terms: int) -> None:
    def encoded(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
        made = np.empty(-(-size // 128), dtype=np.uint16), np.empty(size, dtype=np.int8)
        assert int8_blocks.encode(values, SEED, *made)
        return made

    rng = np.random.default_rng(size + num_terms)
    factors = rng.random(num_terms).astype(np.float32)
    terms, total = [], np.zeros(size, dtype=np.float32)
    for number in range(num_terms):
        scales = exact_scales(f"term {number}", size) * np.float32(2.0 ** rng.integers(-120, 60))
        terms.append(encoded(exact_floats(f"term {number}", size) * scales))
        int8_blocks.add_decoded(*terms[-1], factors[number], total)
    formats.flush_in_place(total.view(np.int32))
    made = np.empty_like(terms[0][0]), np.empty_like(terms[0][1])
    whole = [np.concatenate([scales.view(np.uint8), codes.view(np.uint8)]) for scales, codes in terms]
    held = int8_blocks.Terms(whole)
    assert int8_blocks.encode_sum(held, factors, SEED, *made)
    assert held.are_valid(size).tolist() == [True] * num_terms
    if size:
        whole[-1][-1] = 0x80  # a code that no encoder writes
        assert held.are_valid(size).tolist() == [True] * (num_terms - 1) + [False]
    for array, wanted in zip(made, encoded(total), strict=True):
        np.testing.assert_array_equal(array, wanted)

    values, divisor = exact_floats("sum", size) * exact_scales("sum", size), np.float32(3.0)
    assert int8_blocks.encode(values, SEED, *made, divisor=divisor)
    for array, wanted in zip(made, encoded(values / divisor), strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**126, 2.0**127])
def test_a_quotient_too_large_is_refused_and_one_that_fits_is_not(value: float) -> None:
    values, made = np.ones(300, dtype=np.float32), (np.empty(3, dtype=np.uint16), np.empty(300, dtype=np.int8))
    values[299] = value
    assert not int8_blocks.encode(values, SEED, *made, divisor=np.float32(0.75))
    assert int8_blocks.encode(values, SEED, *made, divisor=np.float32(4.0)) == bool(np.isfinite(value))


@pytest.mark.parametrize(("scale", "code"), [(0x087F, 1), (0x7B03, 1), (0x8880, 1), (0x3F80, -128), (0xFFFF, 0)])
def test_what_no_encoder_writes_is_refused_when_decoded(scale: int, code: int) -> None:
    scales, codes = np.full(3, 0x3F80, dtype=np.uint16), np.ones(300, dtype=np.int8)
    out = np.empty(300, dtype=np.float32)
    assert int8_blocks.is_valid(scales, codes)
    scales[2], codes[299] = scale, code
    assert not int8_blocks.is_valid(scales, codes)
    assert not int8_blocks.decode(scales, codes, out)
    assert int8_blocks.sum_of_squares(scales, codes) is None


def test_rounding_is_unbiased_when_averaged_over_seeds() -> None:
    values = exact_floats("unbiased", 128 * 64)
    total = np.zeros(values.size)
    rounds = 400
    scales, codes, decoded = np.empty(64, np.uint16), np.empty(values.size, np.int8), np.empty_like(values)
    for index in range(rounds):
        seed = np.frombuffer(hashlib.sha256(index.to_bytes(4, "big")).digest(), dtype=np.uint64)
        assert int8_blocks.encode(values, seed, scales, codes)
        assert int8_blocks.decode(scales, codes, decoded)
        total += decoded
    steps = np.repeat(reference.from_bfloat16(scales), 128).astype(np.float64)
    error = (total / rounds - values) / steps
    # A fair coin's mean errs by at most 0.5 / sqrt(rounds) standard deviations: 0.025 steps here, 0 on average.
    assert abs(error.mean()) < 5 * 0.025 / np.sqrt(error.size)
    assert np.abs(error).max() < 6 * 0.025


def test_chances_are_uniform_and_uncorrelated_when_blocks_and_seeds_change() -> None:
    draws = np.stack([reference.half_draws(SEED, block) for block in range(512)]) / 32768
    other = np.stack([reference.half_draws(SEED ^ np.uint64(1), block) for block in range(512)]) / 32768
    counts = np.bincount((draws.reshape(-1) * 64).astype(int), minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 63 + 5 * np.sqrt(2 * 63)
    halves = draws[:, :64], draws[:, 64:]  # of the same draws
    for one, two in ((draws, other), (draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1]), halves):
        assert abs(np.corrcoef(one.reshape(-1), two.reshape(-1))[0, 1]) < 5 / np.sqrt(one.size)
