"""The one encoding of a part that everyone gets: a reducer's work, to the bit.

In a stage of several cohorts it is done in two levels: each cohort's contributions to a share, as fp32 has it, by the
run's rule; then the shares to the part, by their mean weighted with the cohorts' tokens.

What is malformed here was committed to by its maker: it is left out, the same way by everyone who has the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.aggregate import Rule, aggregate
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.averaging.encoded_mean import encoded_mean_of
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError
from swarm.core.round.contribution import Level
from swarm.core.settings import AveragingCodecName
from swarm.core.state.step_rule import median_norm
from swarm.memory.kept_buffers import empty_floats


def read_and_written(level: Level, name: AveragingCodecName) -> tuple[VectorCodec, VectorCodec]:
    """Codecs of what goes in and of what comes out, in a run whose contributions are in the codec of that name."""
    share = vector_codec("fp32")
    return (
        share if level == "shares" else vector_codec(name),
        share if level == "cohort" else result_codec(name),
    )


@dataclass(frozen=True)
class Reduction:
    """What a part's reducer has to send."""

    body: memoryview
    digest: bytes
    """BLAKE3 of the body."""
    left_out: dict[int, RemoteError]
    """What is wrong with the contribution at a place, for each that does not count."""


def reduce_part(
    level: Level,
    codec: AveragingCodecName,
    num_values: int,
    bodies: Sequence[tuple[int, Encoded]],
    *,
    rule: Rule,
    norm_cap: float | None,
    seed: bytes,
    threads: Threads = ONE_THREAD,
) -> Reduction:
    """The aggregate of (tokens, encoded part) in the order of peers, or of shares in that of cohorts, encoded once.

    `codec` and `rule` are the run's, for contributions; `num_values` is the part's; `seed` is `seeds.reduced_seed`;
    `norm_cap` that of the version the round starts from. `threads` share the work and change none of its bits.
    """
    read, written = read_and_written(level, codec)
    if rule == "mean" or level == "shares":
        body, left_out = encoded_mean_of(read, written, bodies, num_values=num_values, seed=seed, threads=threads)
    else:
        values, left_out = _aggregated(read, num_values, bodies, rule, norm_cap, threads)
        body = written.encode(values, seed=seed)
    return Reduction(body, bulk_digest(body), left_out)


def norm_cap(certified_norms: Sequence[float]) -> float | None:
    """Twice the median of the certified norms, once there are 16: what one of two contributors may weigh."""
    median = median_norm(certified_norms)
    return None if median is None else 2 * median


def _aggregated(
    codec: VectorCodec,
    num_values: int,
    bodies: Sequence[tuple[int, Encoded]],
    rule: Rule,
    cap: float | None,
    threads: Threads,
) -> tuple[NDArray[np.float32], dict[int, RemoteError]]:
    rows_NV = empty_floats(len(bodies) * num_values).reshape(len(bodies), num_values)

    def what_is_wrong(place: int) -> RemoteError | None:
        try:
            codec.decode(bodies[place][1], rows_NV[place])
        except RemoteError as error:
            return error
        return None

    wrong = threads.map(what_is_wrong, range(len(bodies)))
    left_out = {place: error for place, error in enumerate(wrong) if error is not None}
    counted = [place for place in range(len(bodies)) if place not in left_out]
    if not counted:
        return np.zeros(num_values, dtype=np.float32), left_out
    weights = [bodies[place][0] for place in counted]
    values_NV = rows_NV if not left_out else rows_NV[counted]
    return aggregate(values_NV, weights, rule=rule, norm_cap=cap, threads=threads), left_out
