"""A node of hivemind's DHT, of whose searches nothing waits any more once they were given up.

Each question of a search has a task beside it that waits for the search's end. Where the search is cancelled, as every
one is that takes too long, hivemind leaves those tasks waiting for an event that nobody sets or holds any more: one
after the other the garbage collector finds them, and asyncio says that a task was destroyed but is pending.
"""

import asyncio
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import hivemind.dht.traverse
from hivemind.dht.node import DHTNode

_EVENTS: ContextVar[list[asyncio.Event] | None] = ContextVar("events", default=None)
"""Of the search that is under way; None outside of any."""


def _event() -> asyncio.Event:
    event, events = asyncio.Event(), _EVENTS.get()
    if events is not None:
        events.append(event)
    return event


hivemind.dht.traverse.asyncio = SimpleNamespace(**{**vars(asyncio), "Event": _event})


class SearchingNode(DHTNode):  # type: ignore[misc]
    """As hivemind's own; a cancelled search ends what waits for its end. Questions under way end by themselves."""

    async def find_nearest_nodes(self, *args: Any, **options: Any) -> Any:
        events: list[asyncio.Event] = []
        token = _EVENTS.set(events)
        try:
            return await super().find_nearest_nodes(*args, **options)
        finally:
            _EVENTS.reset(token)
            for event in events:
                event.set()
