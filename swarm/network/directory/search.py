"""A node of hivemind's DHT with a search of its own: it ends with whoever asked, and strangers do not make it long.

hivemind's goes on for as long as nodes are named that are nearer, and leaves tasks that wait for ever for the end of
one that was given up, as every one is that takes too long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from itertools import islice
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

MOST_ASKED = 64
"""Nodes, of one search. Where nobody lies the nearest ones are found by asking some twenty."""

OnFound = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]
"""Told of a search's end: what was looked for, the nearest nodes and those asked."""


class SearchingNode(DHTNode):  # type: ignore[misc]
    """As hivemind's own."""

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        k_nearest: int | None = None,
        node_to_peer_id: dict[DHTID, PeerID] | None = None,
        exclude_self: bool = False,
        found_callback: OnFound | None = None,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """The nodes nearest to each, nearest first, as hivemind calls it: whom it knows is in `node_to_peer_id`."""
        size = self.protocol.bucket_size
        known = node_to_peer_id if node_to_peer_id is not None else {}
        if node_to_peer_id is None:
            for query in queries:
                known.update(self._known_near(query))
        most = size if k_nearest is None else k_nearest

        async def search(query: DHTID) -> dict[DHTID, PeerID]:
            nearest, held = await self._nearest(query, known, max(size, most))
            if found_callback is not None:
                await found_callback(query, nearest, {self.node_id, *held})
            if not exclude_self:
                known[self.node_id] = self.peer_id
                nearest = sorted([*nearest, self.node_id], key=query.xor_distance)
            return {node: known[node] for node in nearest[:most]}

        return dict(zip(queries, await asyncio.gather(*map(search, queries)), strict=True))

    async def held_under(self, key: DHTID, most: int) -> list[object]:
        """What so many of the nearest nodes that hold something at `key` hold: it is said with who is near."""
        _, held = await self._nearest(key, self._known_near(key), max(self.protocol.bucket_size, most))
        holders = sorted((node for node in held if held[node] is not None), key=key.xor_distance)
        return [held[node].value for node in holders[:most]]

    def _known_near(self, query: DHTID) -> dict[DHTID, PeerID]:
        """Those of the routing table."""
        near = self.protocol.routing_table.get_nearest_neighbors(query, self.protocol.bucket_size, self.node_id)
        known: dict[DHTID, PeerID] = self._filter_blacklisted(dict(near))
        return known

    async def _nearest(
        self, query: DHTID, known: dict[DHTID, PeerID], beam: int
    ) -> tuple[list[DHTID], dict[DHTID, Any]]:
        """The `beam` nearest nodes of which anybody tells, and what those that were asked hold under `query`; None of
        who does not answer. Adds to what is `known`."""
        held: dict[DHTID, Any] = {}
        questions: dict[asyncio.Task[dict[DHTID, tuple[Any, dict[DHTID, PeerID]]] | None], DHTID] = {}
        try:
            while True:
                nearest = sorted(known.keys() - {self.node_id}, key=query.xor_distance)[:beam]
                room = min(self.num_workers - len(questions), MOST_ASKED - 1 - len(held))
                for node in islice((one for one in nearest if one not in held), max(0, room)):
                    held[node] = None
                    questions[asyncio.create_task(self._call_find_with_blacklist(known[node], [query]))] = node
                if not questions:
                    return nearest, held
                answered, _ = await asyncio.wait(questions, return_when=asyncio.FIRST_COMPLETED)
                for question in answered:
                    asked, answer = questions.pop(question), question.result() or {}
                    held[asked], told = answer.get(query, (None, {}))
                    for node, peer in islice(told.items(), self.protocol.bucket_size):
                        known.setdefault(node, peer)  # nobody says where a node is that is known
        finally:
            for question in questions:
                question.cancel()
            await asyncio.gather(*questions, return_exceptions=True)
