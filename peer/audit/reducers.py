"""Audits of the reducers of a stage: a part is aggregated again from its committed inputs.

Aggregation is exact: one differing bit is a lie. Inputs come from their contributors or, where one is gone or silent,
from the reducer, which had to have them.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from peer.audit.desk import INPUT
from peer.audit.inquiry import Inquiry
from peer.stage.events import Applied
from swarm.averaging.reduce import read_and_written
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, Step
from swarm.core.round.words import Reduction, ReductionInput
from verification.audit.draws import draw, reducer_rate
from verification.kinds.reducer_fraud import ReducerFraud
from verification.replay.reduced_again import digest_again
from verification.round.papers import Bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartDue:
    """A reduced part, or a cohort's share of it, that was drawn."""

    reduction: Reduction
    cohort: int | None
    """Whose share it made; None: the whole part."""
    reveal: bytes

    @property
    def step(self) -> Step:
        return self.reduction.step

    def __str__(self) -> str:
        return f"part {self.reduction.part} of {self.reduction.reducer} at step {self.step}"


class ReducerAudits:
    """Of the parts that the other members reduced."""

    name = "parts"
    most_due = 1024

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._steps = inquiry.steps

    def drawn(self, applied: Applied, reveal: bytes) -> Iterable[PartDue]:
        """Parts whose reducer signed for them."""
        roster, me = applied.result.roster, self._steps.context.me
        rate_of = partial(reducer_rate, num_parts=roster.num_parts)
        for (part, cohort), made in self._steps.context.reductions.of_step(roster.step).items():
            if made.reducer == me:
                continue
            drawn = draw(reveal, made.statement_digest, auditor=me, target=made.reducer)
            rate = self._inquiry.rate(rate_of, len(roster.members), made.reducer, applied.chain.version)
            if drawn.hits_part(part, rate):
                yield PartDue(made, cohort, reveal)

    def computed_on(self, due: PartDue) -> Iterable[int]:
        """No weights."""
        return ()

    async def audit(self, due: PartDue) -> None:
        """To the bit."""
        made, inquiry, steps = due.reduction, self._inquiry, self._steps
        inquiry.check_not_accused(made.reducer)
        bodies = [await self._input(due, one) for one in made.inputs]
        settings, parts = steps.context.settings, steps.replica.parts()
        again = await inquiry.exact(lambda: digest_again(made, bodies, settings, parts))
        inquiry.counters.parts += 1
        if again == made.digest:
            return
        log.warning("%s was reduced to %s, not %s", due, made.digest.hex()[:16], again.hex()[:16])
        await inquiry.accuse(ReducerFraud(reduction=made, bodies=tuple(bodies)))

    async def _input(self, due: PartDue, one: ReductionInput) -> Bytes:
        """The encoded part that was committed to, or the share. Raises what the last one asked had to say."""
        made = due.reduction
        if one.peer_id == self._steps.context.me:
            own = self._steps.context.reductions.input(made.step, made.part, one.digest)
            if own is None:
                raise LocalError(f"the own part {made.part} of step {made.step} is not here any more")
            return own
        if one.peer_id != made.reducer:
            try:
                return await self._fetch(due, one, one.peer_id)
            except (TransientError, RemoteError, TimeoutError) as error:
                log.info("%s from %s: %s", due, one.peer_id, error)
        return await self._fetch(due, one, made.reducer)

    async def _fetch(self, due: PartDue, one: ReductionInput, holder: PeerId) -> Bytes:
        made = due.reduction
        asked: dict[str, Value] = {"part": made.part, "cohort": due.cohort, "digest": one.digest}
        parts = self._steps.replica.parts()
        read, _ = read_and_written(made.level, parts.codec_name(made.part))
        largest = read.encoded_bytes(parts.size(made.part))
        reply = await self._inquiry.ask(holder, INPUT, due, asked, max_body_bytes=largest)
        if await self._inquiry.exact(partial(bulk_digest, reply.body)) != one.digest:
            raise RemoteError("digest", f"part {made.part} of {one.peer_id} differs from its commitment", holder)
        return reply.body
