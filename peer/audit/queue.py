"""What a peer has drawn to audit: one thing after another, once the draw may be shown and while its subject is held.

A kind of audit says what is drawn of a round and how one is made. How many may wait, when it is too late for one, which
weights stay here for it, and what becomes of one that cannot be made is the same for all.
"""

import logging
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from peer.audit.inquiry import AuditCounters, Drawn, Inquiry
from peer.stage.events import Applied
from swarm.core.audit.chance import REVEALED_AFTER
from swarm.core.errors import LocalError, RemoteError, TransientError

log = logging.getLogger(__name__)

D = TypeVar("D", bound=Drawn)


class Audits(Protocol[D]):
    """A kind of audit."""

    name: str
    most_due: int
    """Of those drawn; the oldest go."""

    def drawn(self, applied: Applied, reveal: bytes) -> Iterable[D]:
        """What chance hits of a round that is over, by the value of this peer's hash chain for its step."""

    def computed_on(self, due: D) -> Iterable[int]:
        """The versions whose weights it takes."""

    async def audit(self, due: D) -> None:
        """Fetch, compute again, compare, accuse.

        Raises LocalError if it cannot be made here, TransientError or RemoteError if it is owed.
        """


class AuditQueue(Generic[D]):
    """The audits of one kind that are due."""

    def __init__(self, inquiry: Inquiry, audits: Audits[D]) -> None:
        self._inquiry = inquiry
        self._audits = audits
        self._due: deque[D] = deque(maxlen=audits.most_due)

    @property
    def counters(self) -> AuditCounters:
        return self._inquiry.counters

    def applied(self, applied: Applied) -> None:
        """A round is over: draw on what the other members did, if this peer was one."""
        roster = applied.result.roster
        if self._inquiry.steps.context.me in roster.members:
            self._due.extend(self._audits.drawn(applied, self._inquiry.draws.reveal(int(roster.step))))
        self._want_weights()

    async def run(self) -> None:
        """Audit what is due, for ever."""
        steps = self._inquiry.steps
        while True:
            if not self._due:
                await steps.wait_for_version(steps.version + 1, timeout_s=1.0)
                continue
            due = self._due[0]
            step_s = steps.context.settings.deadlines.step_s
            if not await steps.wait_for_version(due.step + REVEALED_AFTER, timeout_s=step_s):
                continue
            await self._audit(due)
            if self._due[0] is due:  # or it was dropped meanwhile, for too many were due
                self._due.popleft()
            self._want_weights()

    async def _audit(self, due: D) -> None:
        try:
            if self._inquiry.is_late(due.step):
                raise LocalError("who has it need not hold it any more")
            await self._audits.audit(due)
        except LocalError as error:
            self.counters.skipped += 1
            log.info("audit of %s is left out: %s", due, error)
        except (TransientError, RemoteError, TimeoutError) as error:
            self.counters.debts += 1
            log.log(logging.WARNING if isinstance(error, RemoteError) else logging.INFO, "%s is owed: %s", due, error)
        except Exception:  # what is shown is a stranger's: what an audit breaks on costs that audit, and not this peer
            self.counters.skipped += 1
            log.exception("audit of %s breaks", due)

    def _want_weights(self) -> None:
        """Keep the versions that what is due was computed on."""
        due = [one for one in self._due if not self._inquiry.is_late(one.step)]
        versions = {version for one in due for version in self._audits.computed_on(one)}
        self._inquiry.steps.replica.past.want(versions, by=self._audits.name)
