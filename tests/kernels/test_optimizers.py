"""Optimizer and format kernels write the bits of their plain references."""

import numpy as np
import pytest

from kernels import optimizers
from kernels.codecs import formats
from kernels.threads import Threads
from tests.kernels import reference
from tests.kernels.test_golden import exact_floats, exact_scales

SIZE = 5_003
BOUNDS = np.array([0, 17, 2_000, SIZE], dtype=np.int64)
KEEP = np.array([1.0, 0.99, 0.5], dtype=np.float32)
TIMES = np.array([1.0, 0.3, 7.0], dtype=np.float32)
FACTORS = np.repeat(KEEP, np.diff(BOUNDS)), np.repeat(TIMES, np.diff(BOUNDS))


def test_adamw_equals_the_reference_when_values_are_of_every_magnitude() -> None:
    scalars = np.array([0.3, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, 2e-3, 3e-4], dtype=np.float32)
    weights = exact_floats("weights", SIZE) * exact_scales("weights", SIZE)
    gradient = exact_floats("gradient", SIZE) * exact_scales("gradient", SIZE)
    first = exact_floats("first", SIZE)
    second = exact_floats("second", SIZE) ** 2
    new_weights, new_first, new_second = reference.adamw(weights, gradient, first, second, *FACTORS, scalars)
    out = np.empty_like(weights)
    optimizers.adamw(weights, gradient, first, second, out, BOUNDS, KEEP, TIMES, scalars)
    assert out.tobytes() == new_weights.tobytes()
    assert first.tobytes() == new_first.tobytes()
    assert second.tobytes() == new_second.tobytes()


def test_sgd_equals_the_reference_when_values_are_of_every_magnitude() -> None:
    scalars = np.array([0.3, 0.9, 0.07], dtype=np.float32)
    weights, velocity = exact_floats("weights", SIZE), exact_floats("velocity", SIZE)
    gradient = exact_floats("gradient", SIZE) * exact_scales("gradient", SIZE)
    new_weights, new_velocity = reference.sgd(weights, gradient, velocity, *FACTORS, scalars)
    out = np.empty_like(weights)
    optimizers.sgd(weights, gradient, velocity, out, BOUNDS, KEEP, TIMES, scalars)
    assert out.tobytes() == new_weights.tobytes()
    assert velocity.tobytes() == new_velocity.tobytes()


def test_division_and_extrapolation_equal_numpy_when_values_are_of_every_magnitude() -> None:
    one = exact_floats("one", SIZE) * exact_scales("one", SIZE)
    other = exact_floats("other", SIZE)
    out = np.empty_like(one)
    optimizers.divide(one, np.float32(4097), out)
    assert out.tobytes() == reference.flushed(one / np.float32(4097)).tobytes()
    optimizers.extrapolate(one, other, out)
    assert out.tobytes() == reference.flushed(one + (one - other)).tobytes()


def test_bfloat16_equals_the_reference_when_bits_are_of_every_kind() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32)
    upper = [(halves << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    values = np.concatenate(upper).astype(np.uint32).view(np.float32)
    values = values[np.abs(values) < np.float32(2.0**126)]
    out = np.empty(values.size, dtype=np.uint16)
    assert formats.to_bfloat16(values.view(np.int32), out)
    np.testing.assert_array_equal(out, reference.to_bfloat16(values))
    back = np.empty_like(values)
    assert formats.from_bfloat16(out, back.view(np.int32))
    assert back.tobytes() == reference.from_bfloat16(out).tobytes()


def test_flush_equals_the_reference_when_bits_are_of_every_kind() -> None:
    values = (exact_floats("flush", SIZE) * exact_scales("flush", SIZE)).astype(np.float32)
    values[::9] = -0.0
    out = np.empty_like(values)
    assert formats.flush(values.view(np.int32), out.view(np.int32))
    assert out.tobytes() == reference.flushed(values).tobytes()
    assert np.count_nonzero(out == 0) > SIZE // 9, "some values were to be flushed"
    assert formats.flush_in_place(values.view(np.int32))
    assert values.tobytes() == out.tobytes()
    values[-1] = -np.inf
    assert not formats.flush_in_place(values.view(np.int32))


def test_sums_of_what_was_sent_equal_decoding_first_when_bits_are_of_every_kind() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[(halves & 0x7FFF) <= 0x7E80]
    assert formats.is_valid_bfloat16(halves)
    assert not formats.is_valid_bfloat16(np.append(halves, np.uint16(0xFE81)))
    decoded, total = np.empty(halves.size, np.float32), exact_floats("total", halves.size)
    formats.from_bfloat16(halves, decoded.view(np.int32))
    sums = total.copy()
    formats.add_bfloat16(halves, np.float32(0.3), sums)
    assert sums.tobytes() == (total + decoded * np.float32(0.3)).tobytes()

    values = exact_floats("sent", halves.size) * exact_scales("sent", halves.size)
    assert formats.is_valid_fp32(values.view(np.int32))
    for bad in (np.inf, -np.inf, np.nan, 2.0**126, -(2.0**126)):
        assert not formats.is_valid_fp32(np.append(values, np.float32(bad)).view(np.int32))
    sums = total.copy()
    formats.add_fp32(values.view(np.int32), np.float32(0.3), sums)
    assert sums.tobytes() == (total + reference.flushed(values) * np.float32(0.3)).tobytes()


@pytest.mark.parametrize("count", [2, 4])
def test_bits_stay_when_threads_share_a_format(count: int) -> None:
    values = np.tile(exact_floats("shared", 100_003) * exact_scales("shared", 100_003), 6)
    threads, flushed, halves = Threads(count), np.empty_like(values), np.empty(values.size, np.uint16)
    assert formats.flush(values.view(np.int32), flushed.view(np.int32), threads=threads)
    assert flushed.tobytes() == reference.flushed(values).tobytes()
    assert formats.to_bfloat16(values.view(np.int32), halves, threads=threads)
    assert halves.tobytes() == reference.to_bfloat16(values).tobytes()
    assert formats.from_bfloat16(halves, flushed.view(np.int32), threads=threads)
    assert flushed.tobytes() == reference.from_bfloat16(halves).tobytes()
    values[-1] = np.nan
    assert not formats.flush(values.view(np.int32), flushed.view(np.int32), threads=threads)
    one, many = values.copy(), values.copy()
    formats.add_bfloat16(halves, np.float32(0.3), one)
    formats.add_bfloat16(halves, np.float32(0.3), many, threads=threads)
    assert one.tobytes() == many.tobytes()
