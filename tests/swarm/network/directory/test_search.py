"""A search of the DHT that is given up leaves nothing that waits for its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID

from swarm.network.directory.search import SearchingNode


class Node(SearchingNode):
    """Knows five others, who answer when `answered` is set."""

    def __init__(self) -> None:
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self.node_id = DHTID.generate(source="itself")
        self.num_workers, self.blacklist, self.peer_id = 3, (), "itself"
        others: dict[Any, str] = {DHTID.generate(source=name): name for name in "abcde"}
        table = SimpleNamespace(get_nearest_neighbors=lambda query, k, exclude: others.items())
        self.protocol = SimpleNamespace(bucket_size=3, routing_table=table, node_id=self.node_id)

    async def _call_find_with_blacklist(self, peer_id: Any, keys: Any) -> None:
        self.asked.set()
        await self.answered.wait()


@pytest.mark.parametrize("is_answered", [True, False])
def test_no_task_waits_after_a_search(is_answered: bool) -> None:
    async def main() -> None:
        node, before = Node(), asyncio.all_tasks()
        query = DHTID.generate(source="what is looked for")
        searching = asyncio.ensure_future(node.find_nearest_nodes([query], k_nearest=3))
        async with asyncio.timeout(5.0):
            await node.asked.wait()
        await asyncio.sleep(0)  # the other questions begin
        if is_answered:
            node.answered.set()
            assert len((await searching)[query]) == 3
        else:
            searching.cancel()
            await asyncio.gather(searching, return_exceptions=True)
            assert searching.cancelled()
            node.answered.set()
        left = asyncio.all_tasks() - before - {searching}
        assert not left or not (await asyncio.wait(left, timeout=5.0))[1]

    asyncio.run(main())
