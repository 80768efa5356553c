"""What a window's inner moments start from, in every form that is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.windows.method import MomentForm
from swarm.averaging.aggregate import aggregate
from swarm.averaging.codecs import vector_codec
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer

Floats = NDArray[np.float32]

_BLOCK = 64
_LOWEST_OCTAVE = 15


@dataclass(frozen=True)
class Moments:
    """AdamW's, and the powers of its betas: 0 where no bias is corrected any more."""

    first: Floats
    second: Floats
    beta1_power: float
    beta2_power: float

    def load_into(self, optimizer: ExactOptimizer) -> None:
        scalars = {"beta1_power": self.beta1_power, "beta2_power": self.beta2_power}
        optimizer.load_state({"first": self.first, "second": self.second}, scalars)

    @classmethod
    def of(cls, optimizer: ExactOptimizer) -> "Moments":
        """Copies."""
        first, second = (optimizer.moments[name].copy() for name in ("first", "second"))
        return cls(first, second, optimizer.scalars["beta1_power"], optimizer.scalars["beta2_power"])


def fresh(form: MomentForm, num_values: int) -> Moments:
    """Before the first window: "nobc" forms never correct the first moment's bias."""
    zeros = np.zeros(num_values, dtype=np.float32)
    return Moments(zeros, zeros, 0.0 if form.endswith("_nobc") else 1.0, 1.0)


def public(
    form: MomentForm, ends: Sequence[Moments], mean_delta: Floats, rate_sum: float, layout: ParameterLayout, seed: bytes
) -> Moments:
    """What the members' moments at their windows' ends make public; `rate_sum`: of the window's steps."""
    num_values = layout.num_values
    zeros = np.zeros(num_values, dtype=np.float32)
    powers = ends[0].beta1_power, ends[0].beta2_power
    if form in ("reset", "reset_nobc"):
        return fresh(form, num_values)
    seconds = [end.second for end in ends]
    if form in ("v4_nobc", "averaged4"):
        second = in_octaves(_mean([in_octaves(one) for one in seconds]))
    elif form == "averaged":
        second = _mean(seconds)
    else:
        second = factored(_mean(seconds), layout)
    if form in ("vfac_nobc", "v4_nobc"):
        return Moments(zeros, second, 0.0, powers[1])
    firsts = [end.first for end in ends]
    if form == "averaged":
        first = _mean(firsts)
    elif form == "delta_vfac":
        unbiased = np.sqrt(second / np.float32(1.0 - powers[1]))
        return Moments(zeros + mean_delta * (unbiased / np.float32(rate_sum)), second, 0.0, powers[1])
    elif form == "m2_vfac":
        rng = np.random.default_rng(list(seed))
        first = in_bits(_mean([in_bits(one, 2, rng) for one in firsts]), 2, rng)
    else:
        first = in_int4(_mean([in_int4(one, seed + bytes([place])) for place, one in enumerate(firsts)]), seed + b"r")
    return Moments(first, second, *powers)


def factored(second: Floats, layout: ParameterLayout) -> Floats:
    """Matrices from the means of their rows and columns (Shazeer, Stern, "Adafactor", 2018); the rest as it is."""
    out = second.copy()
    views: Mapping[str, Floats] = layout.views(out)
    for view in views.values():
        if view.ndim == 2:
            rows, columns = view.mean(axis=1), view.mean(axis=0)
            view[:] = np.outer(rows, columns) / max(float(rows.mean()), 1e-30)
    return out


def in_octaves(second: Floats) -> Floats:
    """In 4-bit codes: powers of two below each block's largest, never zero where another of the block is not."""
    padded = np.zeros(-(-second.size // _BLOCK) * _BLOCK, dtype=np.float32)
    padded[: second.size] = second
    blocks = padded.reshape(-1, _BLOCK)
    largest = blocks.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.rint(np.log2(largest / blocks))
    octaves = np.clip(np.nan_to_num(octaves, nan=0.0, posinf=_LOWEST_OCTAVE), 0, _LOWEST_OCTAVE)
    decoded: Floats = (largest * np.exp2(-octaves)).astype(np.float32).reshape(-1)[: second.size]
    return decoded


def in_int4(values: Floats, seed: bytes) -> Floats:
    """As decoded after the product's codec."""
    codec, out = vector_codec("int4"), np.empty_like(values)
    codec.decode(codec.encode(values, seed=seed.ljust(32, b"\0")[:32]), out)
    return out


def in_bits(values: Floats, bits: int, rng: np.random.Generator) -> Floats:
    """Unbiased on 2^bits even levels from a block's largest magnitude to its negative; none of them is 0."""
    padded = np.zeros(-(-values.size // _BLOCK) * _BLOCK, dtype=np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, _BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    top = np.float32(2**bits - 1)
    safe = np.where(largest > 0, largest, np.float32(1.0))
    codes = np.floor((blocks / safe + 1) * (top / 2) + rng.random(blocks.shape, dtype=np.float32))
    levels = np.clip(codes, 0, top) * (2 / top) - 1
    decoded: Floats = (levels * largest).astype(np.float32).reshape(-1)[: values.size]
    return decoded


def _mean(vectors: Sequence[Floats]) -> Floats:
    return aggregate(vectors, [1] * len(vectors), rule="mean")
