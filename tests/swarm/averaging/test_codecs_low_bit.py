"""Codecs of less than a byte a value: strict with hostile bytes, exact with their own, unbiased in the mean."""

import hashlib
import random

import numpy as np
import pytest

from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import VectorCodec
from swarm.averaging.low_bit import Int2Codec
from swarm.core.errors import RemoteError
from swarm.core.settings import PART_VALUES
from tests.kernels.test_golden import exact_floats, exact_scales

SEED = hashlib.sha256(b"seed").digest()
INT4, TOPK = vector_codec("int4"), vector_codec("topk")
INT2 = Int2Codec()
CODECS: list[VectorCodec] = [INT4, TOPK, INT2]
SIZES = [0, 1, 2, 31, 64, 65, 1000, 4096, 4097]


def id_of(codec: VectorCodec) -> str:
    return codec.name


def decoded(codec: VectorCodec, data: bytes | bytearray | memoryview, size: int) -> np.ndarray:
    out = np.full(size, np.nan, dtype=np.float32)
    codec.decode(data, out)
    return out


def sparse(size: int, share: float = 0.1) -> np.ndarray:
    values = exact_floats("sparse", size)
    values[np.argsort(exact_floats("places", size))[round(share * size) :]] = 0
    return values


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_decode_alike_when_they_come_in_any_buffer(codec: VectorCodec, size: int) -> None:
    values = sparse(size)
    data = codec.encode(values, seed=SEED)
    assert len(data) == codec.encoded_bytes(size)
    first = decoded(codec, data, size)
    assert first.tobytes() == decoded(codec, bytes(data), size).tobytes()
    assert first.tobytes() == decoded(codec, memoryview(b"x" + data)[1:], size).tobytes()
    assert np.all((first.view(np.uint32) == 0) | (np.abs(first) >= np.float32(2.0**-126)))


@pytest.mark.parametrize(("codec", "bound"), [(INT4, 0.16), (TOPK, 0.40), (INT2, 0.72)], ids=("int4", "topk", "int2"))
def test_error_is_below_bound_when_values_are_normal(codec: VectorCodec, bound: float) -> None:
    values = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    error = np.linalg.norm(decoded(codec, codec.encode(values, seed=SEED), values.size) - values)
    assert 0.9 * bound * np.linalg.norm(values) < error <= bound * np.linalg.norm(values), "the table says so"


def test_bytes_of_a_part_are_those_of_the_table() -> None:
    assert INT4.encoded_bytes(PART_VALUES) == 0.53125 * PART_VALUES
    assert INT2.encoded_bytes(PART_VALUES) == 0.28125 * PART_VALUES
    assert TOPK.encoded_bytes(PART_VALUES) == (1 / 8 + 0.53125 * 3 / 8) * PART_VALUES


def test_results_are_encoded_without_leaving_anything_out() -> None:
    values = sparse(10_000, 0.5)
    codec, total = result_codec("topk"), np.zeros(values.size)
    for number in range(200):
        total += decoded(codec, codec.encode(values, seed=bytes([number]) * 32), values.size)
    assert not total[values == 0].any()
    assert np.abs(total / 200 - values).max() < 0.2, "a value is right in the mean"


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_tiny_values_are_written_as_zero(codec: VectorCodec) -> None:
    values = exact_floats("tiny", 5_000) * exact_scales("tiny", 5_000)
    out = decoded(codec, codec.encode(values, seed=SEED), values.size)
    assert np.all((out.view(np.uint32) == 0) | (np.abs(out) >= np.float32(2.0**-126)))
    assert np.any(out != 0)


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("change", [-1, 1])
def test_decode_raises_when_length_is_wrong(codec: VectorCodec, change: int) -> None:
    data = codec.encode(exact_floats("length", 1_000), seed=SEED)
    wrong = bytes(data[:-1]) if change < 0 else bytes(data) + b"\0"
    for hostile in (wrong, b"", b"\0"):
        with pytest.raises(RemoteError, match="bytes where") as caught:
            codec.decode(hostile, np.empty(1_000, dtype=np.float32))
        assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("codec", "size", "at", "bad"),
    [
        (INT4, 1000, 2, b"\x80\x7f"),  # infinite scale
        (INT4, 1000, 2, b"\x80\xbf"),  # negative scale
        (INT4, 1000, 2, b"\x00\x80"),  # scale -0
        (INT4, 1000, 2, b"\x7f\x00"),  # subnormal scale
        (INT4, 1000, 2, b"\x14\x7d"),  # a scale whose code 7 would be over the limit
        (INT4, 1000, 0, b"\x00\x00"),  # scale 0, codes not
        (INT4, 1000, 100, b"\x08"),  # code -8 in the low half
        (INT4, 1000, 100, b"\x80"),  # code -8 in the high half
        (INT4, 999, 531, b"\x10"),  # a code past the last value
        (INT2, 1000, 2, b"\x80\x7f"),  # infinite scale
        (INT2, 1000, 2, b"\x7f\x00"),  # subnormal scale
        (INT2, 1000, 2, b"\xac\x7d"),  # a scale three of which are over the limit
        (INT2, 1000, 0, b"\x00\x00"),  # scale 0, codes not
        (INT2, 999, 281, b"\x40"),  # a code past the last value
        (TOPK, 5000, 0, b"\xff"),  # too many marks
        (TOPK, 5000, 625, b"\x80\x7f"),  # infinite scale
        (TOPK, 5000, 625, b"\x14\x7d"),  # scale over the limit
        (TOPK, 5000, 625 + 100, b"\x88"),  # code -8
    ],
)
def test_decode_raises_when_one_number_is_malformed(codec: VectorCodec, size: int, at: int, bad: bytes) -> None:
    data = codec.encode(exact_floats("malformed", size), seed=SEED)
    assert data[at : at + len(bad)] != bad
    data[at : at + len(bad)] = bad
    with pytest.raises(RemoteError) as caught:
        codec.decode(data, np.empty(size, dtype=np.float32))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decode_raises_or_gives_usable_values_when_bytes_are_random(codec: VectorCodec) -> None:
    rng = random.Random(0)
    accepted = 0
    for size in [1, 2, 3, 5] * 400:
        try:
            out = decoded(codec, rng.randbytes(codec.encoded_bytes(size)), size)
        except RemoteError:
            continue
        accepted += 1
        assert np.all((out.view(np.uint32) << np.uint32(1) == 0) | (np.abs(out) >= np.float32(2.0**-126)))
        assert np.all(np.abs(out) < np.float32(2.0**127))
    assert 0 < accepted < 1600


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decode_raises_or_gives_usable_values_when_bytes_are_flipped(codec: VectorCodec) -> None:
    rng = random.Random(0)
    data = codec.encode(sparse(4500), seed=SEED)
    refused = 0
    for _ in range(1_000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            out = decoded(codec, damaged, 4500)
        except RemoteError:
            refused += 1
            continue
        assert np.all(np.abs(out) < np.float32(2.0**127))
    assert 0 < refused < 1_000


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_bytes_depend_on_the_whole_seed_and_the_values_alone(codec: VectorCodec) -> None:
    values = exact_floats("seeded", 10_000)
    assert codec.encode(values, seed=SEED) == codec.encode(values.copy(), seed=SEED)
    for place in range(32):
        other = bytearray(SEED)
        other[place] ^= 1
        assert codec.encode(values, seed=bytes(other)) != codec.encode(values, seed=SEED), f"byte {place} is not used"


@pytest.mark.parametrize("codec", [INT4, TOPK], ids=id_of)
def test_decoded_values_can_be_encoded_again_whatever_the_seed(codec: VectorCodec) -> None:
    """The extreme of a block is then -7 scales exactly; the rounded inverse of the scale may carry it past that."""
    scales = (np.arange(0x3F80, 0x4000, dtype=np.uint32) << 16).view(np.float32)  # every bf16 mantissa
    values = np.repeat(scales * np.float32(-7), 64)
    for number in range(20):
        out = decoded(codec, codec.encode(values, seed=bytes([number]) * 32), values.size)
        error = np.abs(out - values)[out != 0]
        assert error.size >= values.size // 4
        assert error.max() <= scales.max()
