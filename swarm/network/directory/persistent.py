"""hivemind's connection to p2pd, on which all questions of the DHT come and go, without what it trips over.

An answer that comes as its question is given up ends hivemind's reading, and the node hears nothing more, for good; and
a handler that fails or is cancelled stays in its list with all that it held.
"""

import asyncio
import logging
from typing import Any
from uuid import UUID

from hivemind.p2p import P2P

logger = logging.getLogger(__name__)


def mend(p2p: P2P) -> "asyncio.Task[None]":
    """Before anything is asked or served. The task that reads: when it ends, nothing is heard any more."""
    control = p2p._client.control
    control._pending_calls, control._handler_tasks = OpenCalls(), Handlers()
    reading: asyncio.Task[None] = control._read_task
    return reading


class OpenCalls(dict[UUID, "asyncio.Future[Any]"]):
    """Questions under way. One that was given up is not, though whoever gave it up has yet to take it out."""

    def __contains__(self, call_id: object) -> bool:
        question = self.get(call_id)  # type: ignore[call-overload]
        return question is not None and not question.done()


class Handlers(dict[UUID, "asyncio.Task[None]"]):
    """Of others' questions, until they end, however that is."""

    def __setitem__(self, call_id: UUID, handler: "asyncio.Task[None]") -> None:
        super().__setitem__(call_id, handler)
        handler.add_done_callback(lambda ended: self._forget(call_id, ended))

    def _forget(self, call_id: UUID, ended: "asyncio.Task[None]") -> None:
        self.pop(call_id, None)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.debug("a question of the DHT was not answered: %r", error)
