"""What a peer found, brought before the run key."""

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol, TypeVar

from peer.round.stage_steps import StageSteps
from peer.state.provable_past import provable_past
from swarm.core.errors import LocalError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.transfers import shared_longest_s
from swarm.host_protocol import ACCUSE, MAX_ACCUSATION_PIECE_BYTES, AccusationPiece
from swarm.manifest.signed_run import SignedRun
from swarm.network.transport import Message, Transport
from verification.audit.evidence import Evidence
from verification.kinds.bias import WITH_A_STATE
from verification.kinds.equivocation import Equivocation
from verification.kinds.mismatch import Mismatch

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Mismatch)

PIECE_S = 60.0
"""For one piece to get there."""
MAX_TRIES = 5
"""In which nothing more of the evidence comes to be there, or after which the host has lost some of it."""
AGAIN_S = 1.0
MAX_AGAIN_S = 60.0
AGAIN_AFTER_S = 120.0


class Case(Protocol):
    """One of `verification.kinds`."""

    @property
    def accused(self) -> PeerId: ...

    def to_evidence(self, run: SignedRun) -> Evidence: ...


class Prosecution:
    """Brings what a replay found before the run key, with everything that a replay there needs."""

    def __init__(self, steps: StageSteps, host: PeerId, accuser: "Accuser") -> None:
        self._steps = steps
        self._host = host
        self._accuser = accuser

    def check(self, case: Mismatch) -> None:
        """Raises LocalError if this peer does not hold the past that proves the case, or not any more."""
        (oldest, version), context = case.versions, self._steps.context
        begins = max((number for number in context.snapshots.versions() if number <= oldest), default=None)
        if begins is None or any(step not in context.results for step in range(begins, version)):
            raise LocalError(f"what proves the work of version {oldest} wrong is not held here")

    async def whole(self, case: M) -> M:
        """The case with the past that this peer holds. Raises LocalError if it holds it not, or not any more,
        TransientError or RemoteError if the host does not say where that begins."""
        oldest, version = case.versions
        held = await provable_past(self._steps, self._host, oldest=oldest, version=version)
        return replace(case, past=held.past, state_chunks=tuple(held.snapshot.chunks()), bodies=held.bodies)

    async def bring(self, case: Mismatch) -> None:
        """Until it is there, or its past is held no more: the host may be away, or have its hands full."""
        while not self._steps.is_over:
            try:
                await self._accuser.accuse(await self.whole(case))
                return
            except LocalError as error:
                log.warning("%s cannot be brought before the host: %s", case.accused, error)
                return
            except TransientError as error:
                log.info("%s is to be brought before the host again: %s", case.accused, error)
            await self._steps.turned(within_s=self._steps.context.settings.deadlines.step_s)


class Accuser:
    """Accuses peers, each once in a while: the host may dismiss what was brought, and there may be more."""

    def __init__(self, transport: Transport, host: PeerId, signed_run: SignedRun) -> None:
        self._transport = transport
        self._host = host
        self.signed_run = signed_run
        self._accused_at: dict[PeerId, float] = {}
        self._bringing = asyncio.Lock()

    def has_accused(self, peer: PeerId) -> bool:
        """Whether the peer was accused from here lately: its judgement is not to be hurried by more of the same."""
        return time.monotonic() < self._accused_at.get(peer, -AGAIN_AFTER_S) + AGAIN_AFTER_S

    async def accuse_of_both(self, case: Equivocation) -> None:
        """Of two statements, each checked by itself: if they contradict each other."""
        if case.contradiction is not None:
            log.warning("%s signed %s", case.accused, case.contradiction)
            await self.accuse(case)

    async def accuse(self, case: Case) -> None:
        """Raises TransientError if the host cannot be reached: then it may be done again."""
        if self.has_accused(case.accused):
            return
        self._accused_at[case.accused] = time.monotonic()
        try:
            await self.bring(case)
        except BaseException:
            self._accused_at.pop(case.accused, None)
            raise

    async def bring(self, case: Case) -> None:
        """Have it judged, and go on with audits of the peer meanwhile. Raises as `accuse`."""
        evidence = await asyncio.to_thread(case.to_evidence, self.signed_run)
        digest = await asyncio.to_thread(evidence.digest)
        chunks = [memoryview(chunk).cast("B") for chunk in evidence.chunks()]
        # The host takes such a head by itself: it may have the accused's stage send what comes next.
        alone = len(chunks[0]) if evidence.kind in WITH_A_STATE else 0
        await self._bring(evidence.accused, digest, chunks, alone)

    async def _bring(self, accused: PeerId, digest: bytes, chunks: Sequence[memoryview], alone: int) -> None:
        """Evidence, a piece at a time, its first `alone` bytes by themselves; one after the other what is larger than a
        piece. Raises TransientError, RemoteError."""
        starts = list(accumulate(map(len, chunks), initial=0))
        size, at, tries, restarts = starts[-1], 0, 0, 0
        waits_until = time.monotonic() + shared_longest_s(size, floor_s=PIECE_S)
        async with self._bringing if size > MAX_ACCUSATION_PIECE_BYTES else contextlib.nullcontext():
            while at < size:
                end = min(alone if at < alone else size, at + MAX_ACCUSATION_PIECE_BYTES)
                piece = Message(AccusationPiece(accused, digest, size, at).to_value(), _cut(chunks, starts, at, end))
                tries, again_s = tries + 1, 0.0
                try:
                    reply = await self._transport.call(self._host, ACCUSE, piece, timeout_s=PIECE_S, max_body_bytes=0)
                    fields = Fields("accusation answer", reply.meta)
                    began, at = at, fields.integer("next", high=size)
                    again_s = min(MAX_AGAIN_S, fields.number("again_s"))
                    tries = 0 if at > began or (again_s > 0 and time.monotonic() < waits_until) else tries
                    restarts += at < began
                    reason = f"the host has {at} of {size} bytes of evidence, and takes no more"
                except TransientError as error:
                    reason = str(error)
                if MAX_TRIES in (tries, restarts):
                    raise TransientError(reason)
                if tries or again_s > 0:
                    await asyncio.sleep(again_s if again_s > 0 else AGAIN_S)


def _cut(chunks: Sequence[memoryview], starts: Sequence[int], at: int, end: int) -> bytes:
    """What lies between two places of all chunks end to end; `starts` are where each begins."""
    found = []
    for index in range(bisect_right(starts, at) - 1, len(chunks)):
        if starts[index] >= end:
            break
        found.append(chunks[index][max(0, at - starts[index]) : end - starts[index]])
    return b"".join(found)
