"""The host asks several peers at once, and goes on with the answers of those who give one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


async def of_each(peers: Collection[PeerId], ask: Callable[[PeerId], Awaitable[Answer]]) -> dict[PeerId, Answer]:
    """The answers of those who give one, by peer, sorted."""

    async def one(peer: PeerId) -> tuple[PeerId, Answer] | None:
        try:
            return peer, await ask(peer)
        except (TransientError, RemoteError) as error:
            log.info("%s: %s", peer[-6:], error)
            return None

    return dict([found for found in await asyncio.gather(*(one(peer) for peer in sorted(peers))) if found is not None])
