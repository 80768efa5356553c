"""This is where a round's heavy work is done, on the exact thread: encode and reduce.

A part goes through all that is done to it while it is in cache.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from peer.replica import Accumulation, StageReplica
from peer.step_state import Bytes
from swarm.averaging.aggregate import Rule
from swarm.averaging.reduce import reduce_part as reduction
from swarm.bulk_digest import bulk_digest
from swarm.core.contribution import Level
from swarm.core.errors import LocalError

log = logging.getLogger(__name__)


def encode_contribution(
    replica: StageReplica,
    accumulation: Accumulation,
    seeds: Sequence[bytes],
    said: Callable[[slice, NDArray[np.float32]], NDArray[np.float32]] | None = None,
) -> tuple[list[memoryview], list[bytes]]:
    """The mean gradient in encoded parts, and their SHA-256; nothing if there is no work or it is not finite.

    `seeds` are `swarm.averaging.seeds.part_seeds`; `said`: what an adversary makes of each part of the mean.
    Where the codec leaves a residual, the replica's is said along with it and becomes what is left now.
    """
    if not accumulation.work:
        return [], []
    parts, codec = replica.parts(), replica.contribution_codec

    def encode(index: int) -> tuple[memoryview, bytes]:
        where = parts[index]
        if said is None:
            encoded = codec.encode_quotients(*accumulation.gradient.quotient_of(where), seed=seeds[index])
        else:
            encoded = codec.encode(said(where, replica.mean_part(accumulation, where)), seed=seeds[index])
        return encoded, bulk_digest(encoded)

    try:
        if replica.residual is None:
            made = replica.threads.map(encode, range(len(parts)))
            return [encoded for encoded, _ in made], [found for _, found in made]
        mean = replica.mean(accumulation)
        mean = mean if said is None else said(slice(0, mean.size), mean)
        encoded = replica.residual.encode(mean, codec, parts=parts, seeds=seeds)
        return encoded, replica.threads.map(bulk_digest, encoded)
    except LocalError as error:
        log.warning("stage %d: this peer's gradient is left out: %s", replica.stage, error)
        accumulation.not_finite.update(accumulation.work)
        return [], []


def reduce_part(
    replica: StageReplica,
    part: int,
    bodies: Sequence[tuple[int, Bytes]],
    *,
    rule: Rule,
    norm_cap: float | None,
    seed: bytes,
    level: Level = "all",
) -> tuple[memoryview, bytes]:
    """The aggregate of (tokens, encoded part) in the order of peers or cohorts, encoded once, and its SHA-256."""
    where = replica.parts()[part]
    made = reduction(
        level,
        replica.settings.codecs.averaging,
        where.stop - where.start,
        bodies,
        rule=rule,
        norm_cap=norm_cap,
        seed=seed,
    )
    for error in made.left_out.values():
        log.warning("stage %d part %d: a contribution is left out: %s", replica.stage, part, error)
    return made.body, made.digest
