"""Vector codecs: exact, strict, and good enough to average gradients with."""

import hashlib
import random

import numpy as np
import pytest

from swarm.averaging.codecs import VectorCodec, vector_codec
from swarm.averaging.parts import Parts
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import PART_VALUES, LimitSettings
from swarm.memory.kept_buffers import BUFFERS, UNIT_BYTES
from swarm.model.layout import ParameterLayout
from tests.kernels.test_golden import exact_floats, exact_scales
from tests.verification.exhibits import small_settings

SEED = hashlib.sha256(b"seed").digest()
CODECS = [vector_codec(name) for name in ("fp32", "bf16", "int8")]


def id_of(codec: VectorCodec) -> str:
    return codec.name


@pytest.mark.parametrize(
    ("codec", "bound"), list(zip(CODECS, (0.0, 0.002, 0.0095), strict=True)), ids=("fp32", "bf16", "int8")
)
def test_error_is_below_bound_when_values_are_normal(codec: VectorCodec, bound: float) -> None:
    values = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    data = codec.encode(values, seed=SEED)
    decoded = np.empty_like(values)
    codec.decode(data, decoded)
    assert np.linalg.norm(decoded - values) <= bound * np.linalg.norm(values)


def test_int8_takes_at_most_1_02_bytes_a_value_when_a_part_is_full() -> None:
    assert vector_codec("int8").encoded_bytes(PART_VALUES) <= 1.02 * PART_VALUES


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("size", [0, 1, 128, 129, 1000])
def test_bytes_decode_alike_when_they_come_in_any_buffer(codec: VectorCodec, size: int) -> None:
    values = exact_floats("buffer", size)
    data = codec.encode(values, seed=SEED)
    assert len(data) == codec.encoded_bytes(size)
    first, second, third = (np.empty_like(values) for _ in range(3))
    codec.decode(data, first)
    codec.decode(bytes(data), second)
    codec.decode(memoryview(b"x" + data)[1:], third)
    assert first.tobytes() == second.tobytes() == third.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decoded_values_are_zero_or_normal_when_values_are_tiny(codec: VectorCodec) -> None:
    values = exact_floats("tiny", 5_000) * exact_scales("tiny", 5_000)
    decoded = np.empty_like(values)
    codec.decode(codec.encode(values, seed=SEED), decoded)
    assert np.all((decoded.view(np.uint32) == 0) | (np.abs(decoded) >= np.float32(2.0**-126)))
    assert np.any(decoded == 0)
    assert np.any(decoded != 0)


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_largest_values_survive_when_they_are_just_below_the_limit(codec: VectorCodec) -> None:
    largest = np.nextafter(np.float32(2.0**126), np.float32(0))
    values = np.full(300, largest, dtype=np.float32)
    values[1::2] *= -1
    decoded = np.empty_like(values)
    codec.decode(codec.encode(values, seed=SEED), decoded)
    np.testing.assert_allclose(decoded, values, rtol=0.01)


@pytest.mark.parametrize("codec", [*CODECS, vector_codec("int4"), vector_codec("topk")], ids=id_of)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 2.0**126, -(2.0**127)])
def test_encode_raises_when_a_value_cannot_be_sent(codec: VectorCodec, bad: float) -> None:
    values = exact_floats("bad", 1_000)
    values[999] = bad
    with pytest.raises(LocalError, match=r"1 of 1000 values .* first at 999"):
        codec.encode(values, seed=SEED)


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("change", [-1, 1])
def test_decode_raises_when_length_is_wrong(codec: VectorCodec, change: int) -> None:
    length = codec.encoded_bytes(1_000) + change
    with pytest.raises(RemoteError, match=f"{length} bytes where {length - change} were expected") as caught:
        codec.decode(bytes(length), np.empty(1_000, dtype=np.float32))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("name", "at", "bad"),
    [
        ("fp32", 40, np.float32(np.nan).tobytes()),
        ("fp32", 40, np.float32(-np.inf).tobytes()),
        ("fp32", 40, np.float32(2.0**126).tobytes()),
        ("bf16", 40, b"\x80\x7f"),  # infinite
        ("bf16", 40, b"\xc1\xff"),  # NaN
        ("int8", 2, b"\x80\x7f"),  # infinite scale
        ("int8", 2, b"\xc0\x7f"),  # NaN scale
        ("int8", 2, b"\x80\xbf"),  # scale -1
        ("int8", 2, b"\x00\x80"),  # scale -0
        ("int8", 2, b"\x7f\x00"),  # subnormal scale
        ("int8", 2, b"\x03\x7b"),  # a scale whose code 127 would be over the limit
        ("int8", 400, b"\x80"),  # code -128
    ],
)
def test_decode_raises_when_one_number_is_malformed(name: str, at: int, bad: bytes) -> None:
    codec = vector_codec(name)  # type: ignore[arg-type]
    values = exact_floats("malformed", 1_000)
    data = codec.encode(values, seed=SEED)
    data[at : at + len(bad)] = bad
    with pytest.raises(RemoteError) as caught:
        codec.decode(data, values)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decode_raises_or_gives_usable_values_when_bytes_are_random(codec: VectorCodec) -> None:
    rng = random.Random(0)
    accepted = 0
    for size in [1, 2, 3] * 300:
        out = np.full(size, np.nan, dtype=np.float32)
        try:
            codec.decode(rng.randbytes(codec.encoded_bytes(size)), out)
        except RemoteError:
            continue
        accepted += 1
        assert np.all((out.view(np.uint32) << np.uint32(1) == 0) | (np.abs(out) >= np.float32(2.0**-126)))
        assert np.all(np.abs(out) < np.float32(2.0**127))
    assert 0 < accepted < 900


def test_int8_bytes_depend_on_the_seed_alone_when_values_are_equal() -> None:
    codec = vector_codec("int8")
    values = exact_floats("seeded", 1_000)
    assert codec.encode(values, seed=SEED) == codec.encode(values.copy(), seed=SEED)
    for place in range(32):
        other = bytearray(SEED)
        other[place] ^= 1
        assert codec.encode(values, seed=bytes(other)) != codec.encode(values, seed=SEED), f"byte {place} is not used"


@pytest.mark.parametrize("codec", [*CODECS, vector_codec("int4"), vector_codec("topk")], ids=id_of)
@pytest.mark.parametrize("num_values", [1, 65, 4097, 2 * UNIT_BYTES + 1])
def test_bytes_depend_on_the_values_alone_when_the_buffer_was_used_before(codec: VectorCodec, num_values: int) -> None:
    values = exact_floats("again", num_values) * exact_scales("again", num_values)
    num_bytes, found = codec.encoded_bytes(num_values), []
    for left_over in (0x00, 0xFF):
        buffer = BUFFERS.take(num_bytes)
        buffer[:] = bytes([left_over]) * num_bytes
        del buffer
        found.append(bytes(codec.encode(values, seed=SEED)))
    assert found[0] == found[1]


def test_int8_keeps_multiples_of_the_scale_when_rounding_by_chance() -> None:
    values = np.arange(-127, 128, dtype=np.float32)[:128] * np.float32(0.25)
    decoded = np.empty_like(values)
    vector_codec("int8").decode(vector_codec("int8").encode(values, seed=SEED), decoded)
    np.testing.assert_array_equal(decoded, values)


def test_parts_cover_the_vector_once_when_the_last_is_short() -> None:
    for num_values in (0, 1, PART_VALUES, PART_VALUES + 1, 3 * PART_VALUES - 1):
        slices = Parts(num_values)
        assert [i for part in slices for i in (part.start, part.stop)] == sorted(
            [0] * (num_values > 0)
            + [PART_VALUES * i for i in range(1, len(slices)) for _ in range(2)]
            + [num_values] * (num_values > 0)
        )
    with pytest.raises(IndexError):
        Parts(PART_VALUES + 1)[2]


def test_parts_touching_a_range_are_those_that_hold_some_of_it() -> None:
    cut = Parts(3 * PART_VALUES + 5)
    for where in (slice(0, 0), slice(0, 1), slice(PART_VALUES - 1, PART_VALUES + 1), slice(PART_VALUES, len(cut) * 9)):
        where = slice(where.start, min(where.stop, cut.num_values))
        held = [index for index, part in enumerate(cut) if part.start < where.stop and where.start < part.stop]
        assert list(cut.touching(where)) == held


@pytest.mark.parametrize("num_values", [1, PART_VALUES, 4 * PART_VALUES])
def test_runs_of_parts_are_of_values_that_follow_each_other(num_values: int) -> None:
    cut = Parts(5 * PART_VALUES + 3, PART_VALUES, means=9)
    runs = cut.runs(num_values)
    assert [part for run in runs for part in run] == list(range(len(cut)))
    for run in runs:
        assert all(cut[part].stop == cut[part + 1].start for part in run[:-1])
        assert {cut.codec_name(part) for part in run} == {cut.codec_name(run[0])}
        assert all(cut.size(part) == PART_VALUES for part in run[:-1])
        assert len(run) == 1 or sum(map(cut.size, run)) <= num_values
    assert len(runs) == (2 * 6 + 1 if num_values < 4 * PART_VALUES else 2 * 2 + 1)


def test_parts_are_larger_in_a_stage_where_every_peer_keeps_eight_of_them() -> None:
    def values_of(num_values: int, most_peers: int) -> int:
        settings = small_settings(limits=LimitSettings(max_peers_per_stage=most_peers))
        return Parts.of(settings, ParameterLayout.of({"flat": (num_values,)})).part_values

    assert values_of(1000, 1) == PART_VALUES
    assert [values_of(25_000_000, peers) for peers in (2, 3, 5, 12, 64)] == [
        1 << 20,
        1 << 20,
        1 << 19,
        1 << 18,
        1 << 18,
    ]
    for peers in (1, 2, 3, 7, 64):
        size = values_of(150_000_000, peers)
        assert size == PART_VALUES or len(Parts(150_000_000, size)) >= 8 * peers


def test_decoded_values_can_be_encoded_again_whatever_the_seed() -> None:
    """The extreme of a block is then -127 scales exactly; the rounded inverse of the scale may carry it past that."""
    codec = vector_codec("int8")
    scales = (np.arange(0x3F80, 0x4000, dtype=np.uint32) << 16).view(np.float32)  # every bf16 mantissa
    values = np.repeat(scales * np.float32(-127), 128)
    decoded = np.empty_like(values)
    for number in range(60):
        codec.decode(codec.encode(values, seed=bytes([number]) * 32), decoded)
        assert np.abs(decoded - values).max() <= scales.max()
