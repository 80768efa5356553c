"""Error feedback: what is sent follows what was meant, and what is owed stays bounded."""

import hashlib
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import norms
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import Encoded
from swarm.averaging.error_feedback import MOST_OF_SENT, Residual
from swarm.averaging.parts import Parts
from swarm.core.errors import LocalError
from swarm.core.settings import PART_VALUES, AveragingCodecName, AveragingSettings, CodecSettings
from tests.kernels.test_golden import exact_floats
from tests.verification.exhibits import small_settings

Floats = NDArray[np.float32]
LOW_BIT: tuple[AveragingCodecName, ...] = ("int4", "topk")


def said(name: AveragingCodecName, residual: Residual, mean: Floats, step: int) -> Floats:
    """What a reducer reads of the contribution of a step."""
    parts = Parts(mean.size)
    seeds = [hashlib.sha256(f"{step} {index}".encode()).digest() for index in range(len(parts))]
    codec, decoded = vector_codec(name), np.empty_like(mean)
    for part, body in zip(parts, residual.encode(mean.__getitem__, codec, parts=parts, seeds=seeds), strict=True):
        codec.decode(body, decoded[part])
    return decoded


def test_only_codecs_of_less_than_a_byte_leave_a_residual() -> None:
    names: tuple[AveragingCodecName, ...] = get_args(AveragingCodecName)
    runs = {name: small_settings(1, codecs=CodecSettings(averaging=name)) for name in names}
    assert [name for name, run in runs.items() if run.leaves_residual] == ["int4", "topk"]
    windows = AveragingSettings(local_steps=2)
    assert not any(replace(run, averaging=windows).leaves_residual for run in runs.values())


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "topk"])
def test_a_contribution_is_never_longer_than_a_result(name: AveragingCodecName) -> None:
    for size in (3, 31, 4097, PART_VALUES):
        assert vector_codec(name).encoded_bytes(size) <= result_codec(name).encoded_bytes(size)


@pytest.mark.parametrize("name", LOW_BIT)
def test_sum_of_what_is_sent_follows_the_sum_of_the_means(name: AveragingCodecName) -> None:
    """With the same direction in every mean, as in training; without feedback most values are never sent."""
    size, steps = 3 * 4096 + 5, 120
    direction = exact_floats("direction", size)
    residual, meant, sent = Residual(size), np.zeros(size), np.zeros(size)
    for step in range(steps):
        mean = direction + np.float32(0.5) * exact_floats(f"noise {step}", size)
        meant += mean
        sent += said(name, residual, mean, step)
    off = np.linalg.norm(sent - meant) / np.linalg.norm(meant)
    without = np.zeros(size)
    for step in range(steps):
        mean = direction + np.float32(0.5) * exact_floats(f"noise {step}", size)
        without += said(name, Residual(size), mean, step)
    assert off < {"int4": 0.003, "topk": 0.05}[name]
    assert off < np.linalg.norm(without - meant) / np.linalg.norm(meant) / 3


@pytest.mark.parametrize("name", LOW_BIT)
def test_what_is_sent_and_what_is_owed_make_the_sum_of_the_means(name: AveragingCodecName) -> None:
    size = 8192
    residual, meant, sent = Residual(size), np.zeros(size), np.zeros(size)
    for step in range(30):
        mean = np.zeros(size, dtype=np.float32)
        mean[:: 4096 // 100] = exact_floats(f"rows {step % 3}", mean[:: 4096 // 100].size)
        meant += mean
        sent += said(name, residual, mean, step)
        np.testing.assert_allclose(sent + residual.values, meant, atol=1e-4)
    assert norms.tree_norm(residual.values) > 0


class OneInAHundred:
    """A codec so coarse that the bound is met."""

    name = "one in a hundred"

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode(self, values: Floats, *, seed: bytes) -> bytearray:
        kept = np.zeros_like(values)
        kept[::100] = values[::100]
        return bytearray(kept.tobytes())

    def decode(self, data: Encoded, out: Floats) -> None:
        out[:] = np.frombuffer(data, dtype=np.float32)


def test_residual_is_scaled_down_to_twice_what_was_sent() -> None:
    size = PART_VALUES + 4099
    residual, codec = Residual(size), OneInAHundred()
    parts = Parts(size)
    mean = exact_floats("mean", size)
    sent = np.where(
        np.arange(size) < PART_VALUES, np.arange(size) % 100 == 0, (np.arange(size) - PART_VALUES) % 100 == 0
    )
    residual.encode(mean.__getitem__, codec, parts=parts, seeds=[bytes(32)] * 2)
    limit = MOST_OF_SENT * norms.tree_norm(mean[sent])
    assert 0.999 * limit < norms.tree_norm(residual.values) <= limit
    factor = residual.values[~sent & (mean != 0)] / mean[~sent & (mean != 0)]
    np.testing.assert_allclose(factor, factor[0], rtol=1e-6)
    assert not residual.values[sent].any()


@pytest.mark.parametrize("name", LOW_BIT)
def test_the_codecs_of_a_run_never_meet_the_bound(name: AveragingCodecName) -> None:
    """The largest 3 of 8 values have 3/8 of the squares, or more: the rest is at most sqrt(5 / 3) as long."""
    for make in (lambda step: exact_floats(f"new {step}", 9000), lambda step: np.full(9000, 1.0, dtype=np.float32)):
        residual = Residual(9000)
        for step in range(6):
            mean = make(step) * np.float32(8.0**-step)
            sent = said(name, residual, mean, step)
            assert norms.tree_norm(residual.values) < 1.9 * norms.tree_norm(sent)


@pytest.mark.parametrize("name", LOW_BIT)
def test_residual_and_bytes_are_the_same_for_whoever_recomputes_them(name: AveragingCodecName) -> None:
    def history() -> tuple[bytes, bytes]:
        residual = Residual(5000)
        sent = [said(name, residual, exact_floats(f"mean {step}", 5000), step) for step in range(4)]
        return residual.digest(), b"".join(vector.tobytes() for vector in sent)

    assert history() == history()
    fresh = Residual(5000)
    assert fresh.digest() == Residual(5000).digest() != history()[0]


def test_residual_is_what_it_was_when_a_mean_cannot_be_encoded() -> None:
    residual = Residual(2 * PART_VALUES)
    said("int4", residual, exact_floats("mean", 2 * PART_VALUES), 0)
    before = residual.digest()
    mean = exact_floats("next", 2 * PART_VALUES)
    mean[-1] = np.inf  # in the second part: the first is encoded by then
    with pytest.raises(LocalError, match="not finite"):
        said("int4", residual, mean, 1)
    assert residual.digest() == before


def test_parts_are_encoded_each_with_its_seed() -> None:
    values = exact_floats("parts", 256)
    seeds = [bytes(32), bytes(31) + b"1"]
    codec = vector_codec("int4")
    encoded = Residual(256).encode(values.__getitem__, codec, parts=[slice(0, 128), slice(128, 256)], seeds=seeds)
    assert encoded == [codec.encode(values[:128], seed=seeds[0]), codec.encode(values[128:], seed=seeds[1])]
