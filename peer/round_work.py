"""This is where a round's heavy work is done, on the exact thread: encode and reduce.

A part goes through all that is done to it while it is in cache. What is malformed here was committed to by its maker:
it is left out, the same way by everyone who has the bytes.
"""

import hashlib
import logging
from collections.abc import Sequence

import numpy as np

from peer.replica import Accumulation, StageReplica
from peer.step_state import Bytes
from swarm.averaging.aggregate import Rule, aggregate
from swarm.averaging.encoded_mean import mean_of_encoded
from swarm.core.canonical import Value, digest
from swarm.core.errors import LocalError, RemoteError

log = logging.getLogger(__name__)


def encode_contribution(
    replica: StageReplica, accumulation: Accumulation, seed_facts: list[Value]
) -> tuple[list[bytearray], list[bytes]]:
    """The mean gradient in encoded parts, and their SHA-256; nothing if there is no work or it is not finite.

    Where the codec leaves a residual, the replica's is said along with it and becomes what is left now.
    """
    if not accumulation.work:
        return [], []
    parts, codec = replica.parts(), replica.contribution_codec
    seeds = [digest("part-seed", [*seed_facts, index]) for index in range(len(parts))]

    def encode(index: int) -> tuple[bytearray, bytes]:
        where = parts[index]
        encoded = codec.encode(replica.mean_part(accumulation, where), seed=seeds[index])
        return encoded, hashlib.sha256(encoded).digest()

    try:
        if replica.residual is None:
            made = replica.threads.map(encode, range(len(parts)))
            return [encoded for encoded, _ in made], [found for _, found in made]
        encoded = replica.residual.encode(replica.mean(accumulation), codec, parts=parts, seeds=seeds)
        return encoded, replica.threads.map(lambda part: hashlib.sha256(part).digest(), encoded)
    except LocalError as error:
        log.warning("stage %d: this peer's gradient is left out: %s", replica.stage, error)
        return [], []


def reduce_part(
    replica: StageReplica,
    part: int,
    bodies: Sequence[tuple[int, Bytes]],
    *,
    rule: Rule,
    norm_cap: float | None,
    seed: bytes,
) -> tuple[bytearray, bytes]:
    """The aggregate of (tokens, encoded part) in the order of peers, encoded once as results are, and its SHA-256."""
    where = replica.parts()[part]
    size = where.stop - where.start
    if rule == "mean":
        found = mean_of_encoded(replica.contribution_codec, bodies, num_values=size)
        for error in found.left_out.values():
            _left_out(replica, part, error)
        mean = found.values
    else:
        values, weights = [], []
        for weight, body in bodies:
            decoded = np.empty(size, dtype=np.float32)
            try:
                replica.contribution_codec.decode(body, decoded)
            except RemoteError as error:
                _left_out(replica, part, error)
                continue
            values.append(decoded)
            weights.append(weight)
        mean = aggregate(values, weights, rule=rule, norm_cap=norm_cap) if values else np.zeros(size, dtype=np.float32)
    encoded = replica.codec.encode(mean, seed=seed)
    return encoded, hashlib.sha256(encoded).digest()


def _left_out(replica: StageReplica, part: int, error: RemoteError) -> None:
    """A contribution that was committed to, but is nonsense, counts for nothing."""
    log.warning("stage %d part %d: a contribution is left out: %s", replica.stage, part, error)
