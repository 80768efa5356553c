"""Activation codecs: outlier dimensions cost the others nothing, and nothing malformed becomes a tensor."""

import random

import numpy as np
import pytest
import torch

from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import ActivationCodecName

CODECS = [activation_codec(name) for name in ("fp32", "bf16", "int8", "int4", "int4h")]
SHAPES = [(2, 3, 512), (1, 1, 1), (2, 1, 3), (1, 4, 65), (3, 2, 100), (1, 2, 4096), (0, 3, 64)]


def id_of(codec: ActivationCodec) -> str:
    return codec.name


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_returns_within_the_codecs_error_when_shapes_are_odd(
    codec: ActivationCodec, shape: tuple[int, int, int]
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    data = codec.encode(tensor)
    decoded = codec.decode(memoryview(b"x" + data)[1:], shape)
    assert len(data) == codec.encoded_bytes(shape)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == torch.float32
    bound = {"fp32": 0.0, "bf16": 0.004, "int8": 0.0075, "int4": 0.12, "int4h": 0.12}[codec.name]
    assert (decoded - tensor).norm() <= bound * tensor.norm()


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.01), ("int4", 0.13), ("int4h", 0.13)])
@pytest.mark.parametrize("width", [64, 100, 512, 768, 2048])
def test_other_dimensions_keep_their_digits_when_outliers_are_planted(
    width: int, name: ActivationCodecName, bound: float
) -> None:
    tensor = torch.randn((4, 64, width), generator=torch.Generator().manual_seed(2))
    tensor[:, :, [3, width - 1]] *= 60
    tensor[1, 7, [5, width // 2]] = torch.tensor([1000.0, -1000.0])
    codec = activation_codec(name)
    decoded = codec.decode(codec.encode(tensor), (4, 64, width))
    others = torch.ones(width, dtype=torch.bool)
    others[[3, 5, width // 2, width - 1]] = False
    error = (decoded - tensor)[:, :, others].norm(dim=-1) / tensor[:, :, others].norm(dim=-1)
    assert error.max() <= bound, "in any token"
    planted = (decoded - tensor)[:, :, ~others].norm() / tensor[:, :, ~others].norm()
    assert planted <= 0.004


def test_int4h_loses_less_than_int4_in_as_many_bytes_when_more_stands_out_than_goes_aside() -> None:
    tensor = torch.randn((4, 64, 512), generator=torch.Generator().manual_seed(2))
    tensor[:, :, ::16] *= 10
    off = {}
    for name in ("int4", "int4h"):
        codec = activation_codec(name)  # type: ignore[arg-type]
        data = codec.encode(tensor)
        assert len(data) == activation_codec("int4").encoded_bytes((4, 64, 512))
        off[name] = float((codec.decode(data, (4, 64, 512)) - tensor).norm() / tensor.norm())
    assert off["int4h"] < 0.75 * off["int4"]


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (1, b"\xff"),  # the scale of a turned tile is over the limit
        (1, b"\x80"),  # and under it
        (7, b"\xbf"),  # a tile is turned that holds an outlier
        (9, b"\xbf"),  # the last is, of 5 values
        (18, b"\x03"),  # an index in a turned tile
    ],
)
def test_int4h_decode_raises_when_a_turn_was_never_written(at: int, bad: bytes) -> None:
    tensor = torch.zeros((1, 1, 133))
    tensor[0, 0, 3], tensor[0, 0, 96:100] = 1.0, 100.0
    codec = activation_codec("int4h")
    data = codec.encode(tensor)
    assert data[1] == 0xBB, "the first tile is turned"
    assert (codec.decode(data, (1, 1, 133)) - tensor).abs().max() < 0.01
    data[at : at + 1] = bad
    with pytest.raises(RemoteError, match="never written"):
        codec.decode(data, (1, 1, 133))


def test_int8_costs_little_when_tokens_are_wide() -> None:
    for width, bound in ((512, 1.08), (4096, 1.06)):
        assert activation_codec("int8").encoded_bytes((4, 512, width)) <= bound * 4 * 512 * width


def test_int4_costs_little_more_than_half_of_int8_when_tokens_are_wide() -> None:
    for width, bound in ((512, 0.62), (4096, 0.59)):
        assert activation_codec("int4").encoded_bytes((4, 512, width)) <= bound * 4 * 512 * width


def test_tokens_do_not_touch_each_other_when_one_changes() -> None:
    tensor = torch.randn((2, 3, 100), generator=torch.Generator().manual_seed(3))
    codec = activation_codec("int8")
    before = codec.decode(codec.encode(tensor), (2, 3, 100))
    tensor[1, 1] *= 1e6
    after = codec.decode(codec.encode(tensor), (2, 3, 100))
    changed = (before != after).any(dim=-1)
    assert changed.tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_bytes_are_equal_when_the_tensor_is_strided_or_requires_grad(codec: ActivationCodec) -> None:
    tensor = torch.randn((4, 3, 70), generator=torch.Generator().manual_seed(4))
    strided = tensor.permute(1, 0, 2).contiguous().permute(1, 0, 2).requires_grad_()
    assert not strided.is_contiguous()
    assert codec.encode(strided) == codec.encode(tensor)


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -(2.0**126)])
def test_encode_raises_when_a_value_cannot_be_sent(codec: ActivationCodec, bad: float) -> None:
    tensor = torch.zeros((2, 2, 70))
    tensor[1, 1, 69] = bad
    with pytest.raises(LocalError, match="1 of 280 values"):
        codec.encode(tensor)


def test_encode_raises_when_a_token_is_wider_than_its_indices_count() -> None:
    for codec in CODECS[2:]:
        with pytest.raises(LocalError, match="use bf16"):
            codec.encode(torch.zeros((1, 1, (1 << 16) + 1)))


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decode_raises_before_allocating_when_length_does_not_fit_the_shape(codec: ActivationCodec) -> None:
    data = codec.encode(torch.zeros((1, 2, 64)))
    for shape in ((1, 2, 62), (1, 3, 64), (1 << 20, 1 << 20, 1 << 20)):
        with pytest.raises(RemoteError) as caught:
            codec.decode(data, shape)
        assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (0, b"\x80\x7f"),  # infinite scale
        (0, b"\x80\xbf"),  # negative scale
        (0, b"\x03\x7b"),  # scale over the limit
        (0, b"\x00\x00"),  # scale 0, codes not
        (8, b"\xc0\x7f"),  # NaN outlier
        (8, b"\x80\xff"),  # infinite outlier
        (24, b"\x64\x00"),  # index 100 of a token of 100
        (50, b"\x80"),  # code -128
    ],
)
def test_int8_decode_raises_when_one_number_is_malformed(at: int, bad: bytes) -> None:
    codec = activation_codec("int8")
    data = codec.encode(torch.randn((1, 2, 100), generator=torch.Generator().manual_seed(5)))
    data[at : at + len(bad)] = bad
    with pytest.raises(RemoteError) as caught:
        codec.decode(data, (1, 2, 100))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1.5])
def test_decode_raises_when_two_outliers_have_one_place(name: ActivationCodecName, value: float) -> None:
    codec = activation_codec(name)
    data = codec.encode(torch.full((1, 1, 64), value))
    scales_bytes = 2 if name == "int8" else 4
    indices = data[scales_bytes + 8 : scales_bytes + 16]
    assert bytes(indices) == bytes([0, 0, 1, 0, 2, 0, 3, 0])
    indices[6] = 1
    with pytest.raises(RemoteError, match="never written"):
        codec.decode(data, (1, 1, 64))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_decode_raises_when_an_outlier_has_a_code(name: ActivationCodecName) -> None:
    codec = activation_codec(name)
    data = codec.encode(torch.full((1, 1, 64), 1.5))
    codes = data[18:] if name == "int8" else data[20:]
    assert codes[0] == 0
    codes[0] = 1
    with pytest.raises(RemoteError, match="never written"):
        codec.decode(data, (1, 1, 64))


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (0, b"\x80\x7f"),  # infinite scale
        (0, b"\x80\xbf"),  # negative scale
        (0, b"\x14\x7d"),  # scale over the limit
        (0, b"\x00\x00"),  # scale 0, codes not
        (16, b"\xc0\x7f"),  # NaN outlier
        (16, b"\x80\xff"),  # infinite outlier
        (32, b"\x63\x00"),  # index 99 of a token of 99
        (50, b"\x08"),  # code -8
        (50, b"\x80"),  # code -8 in the high half
        (97, b"\x10"),  # a code past the token's last value
    ],
)
def test_int4_decode_raises_when_one_number_is_malformed(at: int, bad: bytes) -> None:
    codec = activation_codec("int4")
    data = codec.encode(torch.randn((1, 2, 99), generator=torch.Generator().manual_seed(5)))
    assert data[at : at + len(bad)] != bad
    data[at : at + len(bad)] = bad
    with pytest.raises(RemoteError) as caught:
        codec.decode(data, (1, 2, 99))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("codec", CODECS, ids=id_of)
def test_decode_raises_or_gives_finite_values_when_bytes_are_flipped(codec: ActivationCodec) -> None:
    rng = random.Random(0)
    data = codec.encode(torch.randn((1, 3, 70), generator=torch.Generator().manual_seed(6)))
    refused = 0
    for _ in range(2_000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            values = codec.decode(damaged, (1, 3, 70)).numpy()
        except RemoteError:
            refused += 1
            continue
        assert np.all(np.abs(values) < np.float32(2.0**127))
    assert 0 < refused < 2_000
