"""A round's heavy work, on the exact thread: encode and reduce.

A part, or a few small ones together, goes through all that is done to it while it is in cache.
"""

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kernels.threads import RANGES_PER_THREAD
from peer.state.replica import Accumulation, StageReplica
from swarm.averaging.codecs import vector_codec
from swarm.averaging.reduce import reduce_part as reduction
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import LocalError
from swarm.core.ids import Step
from swarm.core.round.contribution import Level
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

RUN_VALUES = 1 << 21
"""Of parts that a thread encodes in one go: fewer, and threads wait for one another's Python."""


class ContributionEncoder:
    """Makes a step's mean gradient the parts of a contribution."""

    def __init__(self, replica: StageReplica) -> None:
        self.replica = replica

    def encode(
        self, step: Step, accumulation: Accumulation, seeds: Sequence[bytes]
    ) -> tuple[list[memoryview], list[bytes]]:
        """The mean gradient in encoded parts, and their BLAKE3; nothing if there is no work or it is not finite.

        `seeds` are `swarm.averaging.seeds.part_seeds`. Where the codec leaves a residual, the replica's is said along
        with it and becomes what is left now.
        """
        if not accumulation.work:
            return [], []
        replica = self.replica
        parts, residual = replica.parts(), replica.residual

        def encode(run: range) -> list[tuple[memoryview, bytes]]:
            made = self.run_of_parts(accumulation, run, seeds[run.start : run.stop])
            return [(replica.inputs.put(encoded), bulk_digest(encoded)) for encoded in made]

        try:
            if residual is None:
                made = [one for run in replica.threads.map(encode, parts.runs(self._run_values())) for one in run]
                return [encoded for encoded, _ in made], [found for _, found in made]
            mean = partial(self.mean_part, accumulation)
            keep = replica.inputs.put
            codec = vector_codec(replica.settings.codecs.averaging)
            whole = residual.encode(mean, codec, parts=parts, seeds=seeds, threads=replica.threads, keep=keep)
            return whole, replica.threads.map(bulk_digest, whole)
        except LocalError as error:
            log.warning("stage %d step %d: this peer's gradient is left out: %s", replica.stage, step, error)
            accumulation.not_finite.update(accumulation.work)
            return [], []

    def _run_values(self) -> int:
        """So many that every thread has some runs: one whose core is busy elsewhere takes fewer of them."""
        return min(RUN_VALUES, self.replica.parts().num_values // (RANGES_PER_THREAD * self.replica.threads.count))

    def run_of_parts(self, accumulation: Accumulation, run: range, seeds: Sequence[bytes]) -> list[memoryview]:
        """One of `Parts.runs`, encoded."""
        parts = self.replica.parts()
        where = slice(parts[run.start].start, parts[run.stop - 1].stop)
        codec, quotient = parts.contribution_codec(run.start), accumulation.quotient_of(where)
        return codec.encode_parts(*quotient, part_values=parts.part_values, seeds=seeds)

    def mean_part(self, accumulation: Accumulation, where: slice) -> NDArray[np.float32]:
        """One part, for a codec that leaves a residual."""
        return self.replica.mean_part(accumulation, where)


class PartReducer:
    """Makes contributions to a part, or cohorts' shares of it, what all are to have."""

    def __init__(self, replica: StageReplica) -> None:
        self.replica = replica

    def reduce(
        self,
        part: int,
        bodies: Sequence[tuple[int, Bytes]],
        *,
        norm_cap: float | None,
        seed: bytes,
        level: Level = "all",
    ) -> tuple[memoryview, bytes]:
        """The aggregate of (tokens, encoded part) in the order of peers or cohorts, encoded once, and its BLAKE3."""
        replica = self.replica
        parts = replica.parts()
        made = reduction(
            level,
            parts.codec_name(part),
            parts.size(part),
            bodies,
            rule=replica.settings.averaging.reduction,
            norm_cap=parts.norm_cap(part, norm_cap),
            seed=seed,
            threads=replica.threads,
        )
        for error in made.left_out.values():
            log.warning("stage %d part %d: a contribution is left out: %s", replica.stage, part, error)
        return made.body, made.digest
