"""What a window's inner moments start from, in every form that is compared."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from benchmarks.windows.method import DeltaCodec, MomentForm
from swarm.averaging.aggregate import aggregate
from swarm.averaging.codecs import vector_codec
from swarm.averaging.encoded import SEED_BYTES
from swarm.averaging.low_bit import Int2Codec
from swarm.model.layout import ParameterLayout
from swarm.optim.factored_moments import from_means, means_of
from swarm.optim.window import InnerMoments

Floats = NDArray[np.float32]

_BLOCK = 64
_LOWEST_OCTAVE = 15


def fresh(form: MomentForm, num_values: int) -> InnerMoments:
    """Before the first window: "nobc" forms never correct the first moment's bias."""
    zeros = np.zeros(num_values, dtype=np.float32)
    beta1_power = 0.0 if form.endswith("_nobc") else 1.0
    return InnerMoments(zeros, zeros, {"beta1_power": beta1_power, "beta2_power": 1.0})


def public(
    form: MomentForm,
    ends: Sequence[InnerMoments],
    mean_delta: Floats,
    rate_sum: float,
    layout: ParameterLayout,
    seed: bytes,
) -> InnerMoments:
    """What the members' moments at their windows' ends make public; `rate_sum`: of the window's steps."""
    zeros, scalars = np.zeros(layout.num_values, dtype=np.float32), dict(ends[0].scalars)
    if form in ("reset", "reset_nobc"):
        return fresh(form, layout.num_values)
    seconds = [end.second for end in ends]
    if form in ("v4_nobc", "averaged4"):
        second = in_octaves(_mean([in_octaves(one) for one in seconds]))
    elif form == "averaged":
        second = _mean(seconds)
    else:
        second = from_means(_mean([means_of(one, layout) for one in seconds]), layout)
    if form in ("vfac_nobc", "v4_nobc"):
        return InnerMoments(zeros, second, scalars | {"beta1_power": 0.0})
    firsts = [end.first for end in ends]
    if form == "averaged":
        first = _mean(firsts)
    elif form == "delta_vfac":
        unbiased = np.sqrt(second / np.float32(1.0 - scalars["beta2_power"]))
        first = mean_delta * (unbiased / np.float32(rate_sum))
        return InnerMoments(first, second, scalars | {"beta1_power": 0.0})
    else:
        codec = "int2" if form == "m2_vfac" else "int4"
        said = [sent(one, codec, seed + bytes([place])) for place, one in enumerate(firsts)]
        first = sent(_mean(said), codec, seed + b"result")
    return InnerMoments(first, second, scalars)


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


def sent(values: Floats, name: DeltaCodec, words: bytes) -> Floats:
    """As everyone decodes it."""
    if name == "fp32":
        return values
    codec = Int2Codec() if name == "int2" else vector_codec(name)
    out = np.empty_like(values)
    codec.decode(codec.encode(values, seed=blake2b(words, digest_size=SEED_BYTES).digest()), out)
    return out


def _mean(vectors: Sequence[Floats]) -> Floats:
    return aggregate(vectors, [1] * len(vectors), rule="mean")
