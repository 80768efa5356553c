"""The bits of every kernel, pinned: a change of machine, thread count, instruction set or library must not show here.

Golden digests are only ever changed with the protocol's version: peers of one run must agree on them.
"""

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import robust
from kernels.codecs import formats
from swarm.averaging.activations import activation_codec
from swarm.averaging.aggregate import aggregate
from swarm.averaging.codecs import vector_codec
from swarm.core.settings import OptimizerSettings
from swarm.core.state.schedule import learning_rate
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer, extrapolated
from swarm.optim.gradient_sum import GradientSum
from tests.other_cpu import digests_on_another_cpu

NAMES = ("fp32", "bf16", "int8")

GOLDEN = {
    "vector fp32 plain": "a5c8bedfcd2d25c2",
    "vector fp32 wide": "a0a908b91e5f73ba",
    "vector bf16 plain": "a84aa14f0e241f62",
    "vector bf16 wide": "4488ffc77af0fb11",
    "vector int8 plain": "e132cc018821002d",
    "vector int8 wide": "dab481e0638b63ec",
    "activations fp32": "7b9633ff2d828eb9",
    "activations bf16": "1ef1a123a16e1b6c",
    "activations int8": "d2c488bf80cfca8c",
    "mean": "785b444dafe3c832",
    "capped mean": "0f7784b520d6dd7e",
    "centered clip of 3": "4db651becb9066ae",
    "centered clip of 4": "dc03b4cfd6febf40",
    "median": "e002abaa39c555a3",
    "adamw none": "362ef7c3558c4397",
    "adamw nadamw": "07cdfb97fa02a723",
    "sgd none": "78c1813fcf75392b",
    "extrapolated": "5db14c131b8a95e3",
    "mean gradient": "27073210e123686b",
    "muon": "8f689f600a5326a5",
    "learning rates": "5c2a62ba7fa7e370",
}


def exact_floats(seed: str, size: int) -> NDArray[np.float32]:
    """Roughly normal values, of deviation about 1, that no library's arithmetic can change: sums of hashed bytes."""
    digits = np.frombuffer(hashlib.shake_256(seed.encode()).digest(12 * size), dtype=np.uint16).reshape(size, 6)
    return ((digits.astype(np.int64).sum(axis=1) - 3 * 65535) * 2.0**-16 * 1.4375).astype(np.float32)


def exact_scales(seed: str, size: int) -> NDArray[np.float32]:
    """Powers of two from 2^-140 to 2^51, mostly subnormal or tiny to plain: they make every branch run."""
    exponents = np.frombuffer(hashlib.shake_256(seed.encode()).digest(size), dtype=np.uint8) % 192
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 140).astype(np.float32)


def digests() -> dict[str, str]:
    """Digest of what each kernel computes from the same inputs."""
    results: dict[str, str] = {}

    def pin(name: str, *data: bytes | bytearray | NDArray[np.float32]) -> None:
        results[name] = hashlib.sha256(b"".join(bytes(item) for item in data)).hexdigest()[:16]

    plain = exact_floats("plain", 20_001)
    wide = plain * exact_scales("wide", plain.size)
    seed = hashlib.sha256(b"seed").digest()
    for codec in map(vector_codec, NAMES):
        out = np.empty_like(plain)
        for label, values in (("plain", plain), ("wide", wide)):
            data = codec.encode(values, seed=seed)
            codec.decode(data, out)
            pin(f"vector {codec.name} {label}", data, out)
    tokens_BLD = torch.from_numpy(wide[: 3 * 5 * 131].reshape(3, 5, 131).copy())
    for activations in map(activation_codec, NAMES):
        data = activations.encode(tokens_BLD)
        pin(f"activations {activations.name}", data, activations.decode(data, (3, 5, 131)).numpy())

    members = [plain, exact_floats("second", plain.size), exact_floats("third", plain.size) * np.float32(9), wide]
    pin("mean", aggregate(members[:3], [3, 1, 2], rule="mean"))
    pin("capped mean", aggregate(members[:2], [3, 1], rule="centered_clip", norm_cap=100.0))
    pin("centered clip of 3", aggregate(members[:3], [300, 100, 7], rule="centered_clip"))
    pin("centered clip of 4", aggregate(members, [1, 1, 1, 1], rule="centered_clip"))
    center = np.empty_like(plain)
    robust.median(np.stack(members), center)
    pin("median", center)

    for name, correction in (("adamw", "none"), ("adamw", "nadamw"), ("sgd", "none")):
        settings = OptimizerSettings(name=name, correction=correction)  # type: ignore[arg-type]
        optimizer = ExactOptimizer(settings, num_values=plain.size, decay_ranges=((10, 5_000), (6_000, 6_001)))
        weights = plain.copy()
        for step in range(4):
            new = np.empty_like(weights)
            gradient = np.empty_like(wide)
            formats.flush((np.roll(wide, step) * np.float32(2.0**-20)).view(np.int32), gradient.view(np.int32))
            optimizer.step(weights, gradient, step=step, clip_norm=1.0, out=new)
            weights, old = new, weights
        scalars = np.array(list(optimizer.scalars.values()))
        pin(f"{name} {correction}", weights, *optimizer.state_arrays().values(), scalars.tobytes())
    new = np.empty_like(weights)
    extrapolated(weights, old, new)
    pin("extrapolated", new)
    total = GradientSum(wide.size)
    total.flat += torch.from_numpy(wide)
    total.add_tokens(4097)
    pin("mean gradient", total.take_mean())
    rates = [learning_rate(OptimizerSettings(warmup_steps=7, total_steps=90), step) for step in range(100)]
    pin("learning rates", np.array(rates).tobytes())
    layout = ParameterLayout.of({"layers.0.tall": (200, 37), "layers.0.wide": (3, 4001), "other": (598,)})
    muon = ExactOptimizer.of(OptimizerSettings(name="muon"), layout)
    weights, new = plain.copy(), np.empty_like(plain)
    for step in range(2):
        muon.step(weights, np.roll(plain, step), step=step, clip_norm=1.0, out=new)
        weights, new = new, weights
    pin("muon", weights, *muon.state_arrays().values())
    return results


def test_digests_equal_the_golden_ones_when_computed_here() -> None:
    assert digests() == GOLDEN


@pytest.mark.soak
def test_digests_equal_the_golden_ones_when_compiled_for_another_cpu() -> None:
    assert digests_on_another_cpu(__name__) == GOLDEN


def test_digests_equal_the_golden_ones_when_threads_differ() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert digests() == GOLDEN
    finally:
        torch.set_num_threads(threads)
