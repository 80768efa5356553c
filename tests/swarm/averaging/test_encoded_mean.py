"""Averaging what was sent as it was sent gives the bits of decoding first; what is malformed counts for nothing."""

import random
from typing import get_args

import numpy as np
import pytest

from kernels.norms import sum_of_squares
from swarm.averaging.aggregate import aggregate
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded_mean import check_encoded, encoded_mean_of, mean_of_encoded
from swarm.core.errors import RemoteError
from swarm.core.settings import AveragingCodecName
from tests.kernels.test_golden import exact_floats, exact_scales

NAMES: tuple[AveragingCodecName, ...] = get_args(AveragingCodecName)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 4_096, 10_001])
def test_mean_equals_that_of_decoded_vectors_when_all_are_sound(name: AveragingCodecName, size: int) -> None:
    codec = vector_codec(name)
    vectors = [exact_floats(f"member {member}", size) * exact_scales("scales", size) for member in range(3)]
    encoded = [codec.encode(vector, seed=bytes([member] * 32)) for member, vector in enumerate(vectors)]
    for vector, data in zip(vectors, encoded, strict=True):
        codec.decode(data, vector)
    result = mean_of_encoded(codec, list(zip((5, 1, 30), encoded, strict=True)), num_values=size)
    assert result.left_out == {}
    assert result.values.tobytes() == aggregate(vectors, [5, 1, 30], rule="mean").tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 127, 1_025, 10_001])
def test_what_is_done_in_one_pass_gives_the_bits_of_its_steps(name: AveragingCodecName, size: int) -> None:
    codec, written = vector_codec(name), result_codec(name)
    values, seed = exact_floats("sum", size) * exact_scales("scales", size), bytes(range(32))
    divisor = np.float32(3072.0)
    assert codec.encode_quotients(values, divisor, seed=seed) == codec.encode(values / divisor, seed=seed)
    part_values, seeds = max(1, size // 3), [bytes([number] * 32) for number in range(-(-size // max(1, size // 3)))]
    for number, part in enumerate(codec.encode_parts(values, divisor, part_values=part_values, seeds=seeds)):
        here = values[number * part_values : (number + 1) * part_values]
        assert part == codec.encode(here / divisor, seed=seeds[number])
    encoded = [codec.encode(exact_floats(f"member {member}", size), seed=seed) for member in range(3)]
    decoded = np.empty(size, np.float32)
    codec.decode(encoded[0], decoded)
    assert codec.sum_of_squares(encoded[0], size) == sum_of_squares(decoded)
    nonsense = bytearray(b"\xff" * len(encoded[0]))
    with pytest.raises(RemoteError):
        codec.sum_of_squares(nonsense, size)
    for given in ((5, encoded[0]), (1, nonsense), (1, encoded[1]), (30, encoded[2])), ((1, nonsense),), ():
        body, left_out = encoded_mean_of(codec, written, given, num_values=size, seed=seed)
        plain = mean_of_encoded(codec, given, num_values=size)
        assert body == written.encode(plain.values, seed=seed)
        assert list(left_out) == list(plain.left_out)


@pytest.mark.parametrize("name", NAMES)
def test_malformed_contributions_count_for_nothing_when_others_are_sound(name: AveragingCodecName) -> None:
    codec = vector_codec(name)
    good = codec.encode(exact_floats("good", 5_000), seed=bytes(32))
    nonsense = bytearray(b"\xff" * len(good))
    with pytest.raises(RemoteError):
        codec.decode(nonsense, np.empty(5_000, dtype=np.float32))
    result = mean_of_encoded(codec, [(7, nonsense), (3, good), (9, good[:-1])], num_values=5_000)
    alone = mean_of_encoded(codec, [(1, good)], num_values=5_000)
    assert sorted(result.left_out) == [0, 2]
    assert all(error.kind == "malformed" for error in result.left_out.values())
    assert result.values.tobytes() == alone.values.tobytes()
    assert not mean_of_encoded(codec, [(7, nonsense)], num_values=5_000).values.any()
    assert not mean_of_encoded(codec, [], num_values=5_000).values.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [63, 4_101])
def test_check_refuses_what_decoding_refuses_when_bytes_are_changed(name: AveragingCodecName, size: int) -> None:
    codec, rng = vector_codec(name), random.Random(size)
    good = codec.encode(exact_floats("sent", size) * exact_scales("scales", size), seed=bytes(32))
    refused = 0
    for _ in range(400):
        changed = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 0x08, 0x80, 0x88, 0xFF, rng.randrange(256)))
        said = []
        for read in (
            lambda data: codec.decode(data, np.empty(size, dtype=np.float32)),
            lambda data: check_encoded(codec, data, num_values=size),
        ):
            try:
                read(changed)
                said.append("good")
            except RemoteError as error:
                said.append(error.kind)
        assert said[0] == said[1], f"change {bytes(changed).hex()}"
        refused += said[0] != "good"
    assert refused > 20
