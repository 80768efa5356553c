"""A search of the DHT that is given up leaves nothing that waits for its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID

from swarm.network.directory.search import MOST_ASKED, SearchingNode


class Node(SearchingNode):
    """Knows five others, who answer when `answered` is set."""

    def __init__(self) -> None:
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self.node_id = DHTID.generate(source="itself")
        self.num_workers, self.blacklist, self.peer_id = 3, (), "itself"
        others: dict[Any, str] = {DHTID.generate(source=name): name for name in "abcde"}
        table = SimpleNamespace(get_nearest_neighbors=lambda query, k, exclude: others.items())
        self.num_asked = 0
        self.protocol = SimpleNamespace(bucket_size=3, routing_table=table, node_id=self.node_id)

    async def _call_find_with_blacklist(self, peer_id: Any, keys: Any) -> Any:
        self.num_asked += 1
        self.asked.set()
        await self.answered.wait()
        return {key: (None, self.told_of(key)) for key in keys}

    def told_of(self, query: DHTID) -> dict[DHTID, str]:
        return {}


class Endless(Node):
    """Whoever is asked tells of a crowd, each nearer than all before, and that a node known is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.answered.set()

    def told_of(self, query: DHTID) -> dict[DHTID, str]:
        nearer = {DHTID(int(query) ^ (1 << 150) // (self.num_asked * 64 + one)): "a liar" for one in range(64)}
        return {DHTID.generate(source="a"): "elsewhere", **nearer}


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
        assert not asyncio.all_tasks() - before - {searching}

    asyncio.run(main())


class Holding(Node):
    """Whose others hold a value each, but one, and one does not answer; one of them knows another."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    async def _call_find_with_blacklist(self, peer_id: Any, keys: Any) -> Any:
        self.names.append(peer_id)
        if peer_id == "a":
            return None
        value = None if peer_id == "b" else SimpleNamespace(value=f"held by {peer_id}")
        return {key: (value, {DHTID.generate(source="f"): "f"} if peer_id == "c" else {}) for key in keys}


def test_what_nodes_hold_is_told_when_they_are_asked_who_is_near() -> None:
    async def main() -> None:
        node = Holding()
        held = await node.held_under(DHTID.generate(source="what is looked for"), 10)
        assert sorted(node.names) == [*"abcdef"], "nobody is asked twice"
        assert sorted(map(str, held)) == [f"held by {name}" for name in "cdef"]

    asyncio.run(main())


def test_of_those_who_hold_something_the_nearest_are_heard() -> None:
    assert asyncio.run(Holding().held_under(DHTID.generate(source="d"), 1)) == ["held by d"]
    assert len(asyncio.run(Holding().held_under(DHTID.generate(source="a"), 1))) == 1, (
        "who answers nothing takes no place"
    )


def test_a_search_ends_though_ever_nearer_nodes_are_named() -> None:
    """hivemind's goes on until its time is over, and holds all that it was told of."""

    async def main() -> None:
        node, query, known = Endless(), DHTID.generate(source="what is looked for"), dict[DHTID, Any]()
        known[DHTID.generate(source="a")] = "a"
        found = await node.find_nearest_nodes([query], k_nearest=2, node_to_peer_id=known, exclude_self=True)
        assert len(found[query]) == 2
        assert node.num_asked < MOST_ASKED
        assert known[DHTID.generate(source="a")] == "a"
        assert len(known) <= 1 + MOST_ASKED * node.protocol.bucket_size

    asyncio.run(main())
