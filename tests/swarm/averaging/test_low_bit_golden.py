"""The bits of the low-bit codecs, pinned: they must not depend on the machine or its instruction set.

Golden digests are only ever changed with the protocol's version, as those of `tests.kernels.test_golden`.
"""

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.averaging.error_feedback import Residual
from swarm.core.settings import AveragingCodecName
from tests.kernels.test_golden import exact_floats, exact_scales
from tests.other_cpu import digests_on_another_cpu

NAMES: tuple[AveragingCodecName, ...] = ("int4", "topk")
GOLDEN = {
    "vector int4 plain": "d5a365cf4a79a78c",
    "vector int4 wide": "08ee75e18446b05c",
    "feedback int4": "bbf75aabd47ec29a",
    "vector topk plain": "ee7ecbe6e65a35f9",
    "vector topk wide": "1f496a583f473cb2",
    "feedback topk": "de9ef44a414f0167",
    "activations int4": "b40a27eb166babc3",
    "activations int4h": "17108d8b12ab3c67",
}


def digests() -> dict[str, str]:
    """Digest of what each codec writes and reads from the same inputs."""
    results: dict[str, str] = {}

    def pin(name: str, *data: bytes | bytearray | NDArray[np.float32]) -> None:
        results[name] = hashlib.sha256(b"".join(bytes(item) for item in data)).hexdigest()[:16]

    plain = exact_floats("plain", 20_001)
    wide = plain * exact_scales("wide", plain.size)
    seed = hashlib.sha256(b"seed").digest()
    for name in NAMES:
        codec, out = vector_codec(name), np.empty_like(plain)
        for label, values in (("plain", plain), ("wide", wide)):
            data = codec.encode(values, seed=seed)
            codec.decode(data, out)
            pin(f"vector {name} {label}", data, out)
        residual = Residual(plain.size)
        whole = [slice(0, 9_000), slice(9_000, plain.size)]
        sent = [
            residual.encode(exact_floats(f"mean {step}", plain.size).__getitem__, codec, parts=whole, seeds=[seed] * 2)
            for step in range(3)
        ]
        pin(f"feedback {name}", *(part for parts in sent for part in parts), residual.digest())
    tokens_BLD = torch.from_numpy(wide[: 3 * 5 * 131].reshape(3, 5, 131).copy())
    cubes_BLD = torch.from_numpy((plain[: 3 * 5 * 131] ** 3).reshape(3, 5, 131))
    for activations, values_BLD in ((activation_codec("int4"), tokens_BLD), (activation_codec("int4h"), cubes_BLD)):
        data = activations.encode(values_BLD)
        pin(f"activations {activations.name}", data, activations.decode(data, (3, 5, 131)).numpy())
    return results


def test_digests_equal_the_golden_ones_when_computed_here() -> None:
    assert digests() == GOLDEN


@pytest.mark.soak
def test_digests_equal_the_golden_ones_when_compiled_for_another_cpu() -> None:
    assert digests_on_another_cpu(__name__) == GOLDEN
