"""The pleas of who is accused of wrong work: the host finds a fault where it is right when it is done again."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from bootstrap.program.ledger import Ledger
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.round.contribution import MAX_PARTS
from swarm.core.settings import RunSettings
from swarm.data.piece_store import WholeFile
from swarm.host_protocol import MAX_CASE_BYTES, PAST_IS_GONE, PLEA
from swarm.network.transport import Message, Transport
from verification.audit.evidence import Evidence
from verification.audit.verdicts import Plea
from verification.kinds.mismatch import MISMATCHES, mismatch_of
from verification.replay.judge import judge_plea
from verification.replay.verdict import Verdict
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

HEAD_BYTES = 32 << 20
"""Of a case's largest, what is not its blobs."""
ASK_AGAIN_S = 2.0
ASK_TIMES_S = 3.0
"""Times `deadlines.call_s`: so long it is asked again where no answer comes. One broken stream makes nobody a liar."""


class Pleas:
    """Asks the accused to do their work again."""

    def __init__(
        self, settings: RunSettings, run_id: str, transport: Transport, ledger: Ledger, base: WholeFile | None
    ) -> None:
        """`base`: the frozen base, of a run with adapters."""
        self._base = base
        self._settings = settings
        self._run_id = run_id
        self._transport = transport
        self._ledger = ledger
        self._with_past = asyncio.Lock()
        """A case is in memory with its past: one at a time."""

    def may_be_fault(self, evidence: Evidence, verdict: Verdict) -> bool:
        """Whether little is wrong, as a broken machine's work is. Who changed more is not asked."""
        return evidence.kind in MISMATCHES and verdict.is_local

    async def is_fault(self, evidence: Evidence) -> bool:
        """Whether the accused's work is right when it does it again."""
        try:
            plea, bodies = await self._plea(evidence)
            again = await asyncio.to_thread(partial(judge_plea, evidence, bodies, base=self._base))
        except (TransientError, RemoteError) as error:
            log.info("%s does not plead a fault: %s", evidence.accused, error)
            return False
        log.info("%s did its work again: %s", evidence.accused, again.reason)
        self._ledger.append("plea", plea.to_value())
        return not again.guilty

    async def _plea(self, evidence: Evidence) -> tuple[Plea, list[Bytes]]:
        """What the accused's work comes to when it does it again, on weights of its own, or if it has those no more of
        the evidence. Raises TransientError or RemoteError."""
        light = mismatch_of(evidence).without_past().to_evidence(evidence.run)
        give_up_at = time.monotonic() + ASK_TIMES_S * self._settings.deadlines.call_s
        while True:
            try:
                return await self._ask(light)
            except TransientError as error:
                if time.monotonic() >= give_up_at:
                    raise
                log.info("%s is asked again for what it has to say: %s", evidence.accused, error)
                await asyncio.sleep(ASK_AGAIN_S)
            except RemoteError as error:
                if error.kind != PAST_IS_GONE or sum(map(len, evidence.blobs)) > MAX_CASE_BYTES - HEAD_BYTES:
                    raise
                async with self._with_past:
                    return await self._ask(evidence)

    async def _ask(self, shown: Evidence) -> tuple[Plea, list[Bytes]]:
        body = await asyncio.to_thread(shown.to_bytes)
        reply = await self._transport.call(
            shown.accused,
            PLEA,
            Message({}, body),
            timeout_s=self._settings.deadlines.step_s,
            max_body_bytes=len(body),
        )
        fields = Fields("plea answer", reply.meta)
        plea = Plea.from_value(fields.message("plea"))
        sizes = fields.items("sizes", integer_item, max_items=MAX_PARTS)
        fields.done()
        bodies = _cut(reply.body, sizes)
        plea.check(self._run_id)
        digests = await asyncio.to_thread(lambda: tuple(bulk_digest(body) for body in bodies))
        if plea.evidence_digest != shown.digest() or plea.body_digests != digests:
            raise RemoteError("plea", "the plea is of another case, or of other bodies", shown.accused)
        return plea, bodies


def _cut(body: bytes | bytearray | memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """Raises RemoteError unless the body is of these sizes, end to end."""
    if sum(sizes) != len(body):
        raise RemoteError("malformed", f"bodies of {sum(sizes)} bytes in {len(body)}")
    ends = list(accumulate(sizes))
    return [memoryview(body)[end - size : end] for size, end in zip(sizes, ends, strict=True)]
