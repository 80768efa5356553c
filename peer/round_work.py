"""This is where a round's heavy work is done, on the exact thread: encode, reduce, decode.

What is malformed here was committed to by its maker: it is left out, the same way by everyone who has the bytes.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from peer.replica import Accumulation, StageReplica
from peer.step_state import Bytes
from swarm.averaging.aggregate import aggregate
from swarm.averaging.error_feedback import encode_parts
from swarm.core.canonical import Value, digest
from swarm.core.errors import LocalError, RemoteError

log = logging.getLogger(__name__)


def encode_contribution(
    replica: StageReplica, accumulation: Accumulation, seed_facts: list[Value]
) -> tuple[list[bytearray], list[bytes]]:
    """The mean gradient in encoded parts, and their SHA-256; nothing if there is no work or it is not finite.

    Where the codec leaves a residual, the replica's is said along with it and becomes what is left now.
    """
    try:
        mean = replica.mean(accumulation)
        if mean is None:
            return [], []
        parts, codec = replica.parts(), replica.contribution_codec
        seeds = [digest("part-seed", [*seed_facts, index]) for index in range(len(parts))]
        if replica.residual is None:
            encoded = encode_parts(mean, codec, parts=parts, seeds=seeds)
        else:
            encoded = replica.residual.encode(mean, codec, parts=parts, seeds=seeds)
    except LocalError as error:
        log.warning("stage %d: this peer's gradient is left out: %s", replica.stage, error)
        return [], []
    return encoded, [hashlib.sha256(part).digest() for part in encoded]


def reduce_part(
    replica: StageReplica,
    part: int,
    bodies: Sequence[tuple[int, Bytes]],
    *,
    rule: Literal["mean", "centered_clip"],
    norm_cap: float | None,
    seed: bytes,
) -> tuple[bytearray, bytes]:
    """The aggregate of (tokens, encoded part) in the order of peers, encoded once as results are, and its SHA-256."""
    where = replica.parts()[part]
    size = where.stop - where.start
    values, weights = [], []
    for weight, body in bodies:
        decoded = np.empty(size, dtype=np.float32)
        try:
            replica.contribution_codec.decode(body, decoded)
        except RemoteError as error:  # committed to, but nonsense: it counts for nothing
            log.warning("stage %d part %d: a contribution is left out: %s", replica.stage, part, error)
            continue
        values.append(decoded)
        weights.append(weight)
    mean = aggregate(values, weights, rule=rule, norm_cap=norm_cap) if values else np.zeros(size, dtype=np.float32)
    encoded = replica.codec.encode(mean, seed=seed)
    return encoded, hashlib.sha256(encoded).digest()


def decode_gradient(replica: StageReplica, bodies: Sequence[Bytes]) -> NDArray[np.float32] | None:
    """The certified gradient of a result's parts; None if there are none, or if what was certified is malformed.

    A part without bytes, which nobody's contribution reached, is zeros.
    """
    if not any(bodies):
        return None
    gradient = np.empty(replica.layout.num_values, dtype=np.float32)
    try:
        for part, body in zip(replica.parts(), bodies, strict=True):
            if body:
                replica.codec.decode(body, gradient[part])
            else:
                gradient[part] = 0.0
    except RemoteError as error:  # the same bytes everywhere: every replica skips the step alike
        log.warning("stage %d: a result is not applied: %s", replica.stage, error)
        return None
    return gradient
