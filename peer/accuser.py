"""This is where a peer brings what it found before the run key."""

import asyncio
import logging
import time
from typing import Protocol

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import ACCUSE, SignedRun
from swarm.network.transport import Message, Transport
from verification.evidence import Evidence
from verification.kinds.equivocation import Equivocation, Statement

log = logging.getLogger(__name__)

ACCUSE_S = 60.0
MAX_ACCUSE_TRIES = 5
AGAIN_AFTER_S = 120.0


class Case(Protocol):
    """One of `verification.kinds`."""

    @property
    def accused(self) -> PeerId: ...

    def to_evidence(self, run: SignedRun) -> Evidence: ...


class Accuser:
    """Accuses peers, each once in a while: the host may dismiss what was brought, and there may be more."""

    def __init__(self, transport: Transport, coordinator: PeerId, signed_run: SignedRun) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._signed_run = signed_run
        self._accused_at: dict[PeerId, float] = {}

    def has_accused(self, peer: PeerId) -> bool:
        """Whether the peer was accused from here lately: its judgement is not to be hurried by more of the same."""
        return time.monotonic() < self._accused_at.get(peer, -AGAIN_AFTER_S) + AGAIN_AFTER_S

    async def accuse_of_both(self, one: Statement, other: Statement) -> None:
        """Two statements of one peer, each checked by itself: if they contradict each other."""
        case = Equivocation(one=one, other=other)
        if case.contradiction is not None:
            log.warning("%s signed %s", case.accused, case.contradiction)
            await self.accuse(case)

    async def accuse(self, case: Case) -> None:
        """Raises TransientError if the host cannot be reached: then it may be done again."""
        if self.has_accused(case.accused):
            return
        self._accused_at[case.accused] = time.monotonic()
        try:
            body = await asyncio.to_thread(lambda: case.to_evidence(self._signed_run).to_bytes())
            for left in range(MAX_ACCUSE_TRIES - 1, -1, -1):
                try:
                    await self._transport.call(
                        self._coordinator, ACCUSE, Message({}, body), timeout_s=ACCUSE_S, max_body_bytes=0
                    )
                    return
                except TransientError:
                    if not left:
                        raise
                    await asyncio.sleep(1.0)
        except BaseException:
            self._accused_at.pop(case.accused, None)
            raise
