"""What one node of the DHT stores: nobody's records alone."""

from typing import NoReturn

from hivemind.dht.routing import DHTID

from swarm.network.directory.dht import MAX_TOPICS, MAX_TOPICS_OF_A_PEER, _BoundedStorage
from swarm.network.directory.swarm_time import swarm_time


def test_records_of_one_key_that_live_longest_push_out_nobody_elses() -> None:
    storage, now = _BoundedStorage(), swarm_time.now()
    stage = DHTID.generate(source="a stage's topic")
    assert storage.store_subkey(stage, "member", b"here", now + 30)
    topics = [DHTID.generate(source=f"topic {number}") for number in range(MAX_TOPICS + 1)]
    stored = [storage.store_subkey(topic, "liar", b"", now + 300) for topic in topics]
    assert sum(stored) == MAX_TOPICS_OF_A_PEER
    assert storage.store_subkey(topics[0], "liar", b"again", now + 301)
    kept = [topic for topic, stored_there in zip(topics, stored, strict=True) if stored_there]
    del storage[kept[0]]
    assert storage.store_subkey(topics[-1], "liar", b"", now + 300), "one of its topics has ended"
    assert not storage.store_subkey(kept[0], "liar", b"", now + 300)
    found = storage.get(stage)
    assert found is not None
    assert "member" in found.value


class NotWalked(dict[object, object]):
    def values(self) -> NoReturn:  # type: ignore[override]
        raise AssertionError("a stranger's record costs a walk over all topics")


def test_a_record_costs_no_walk_over_all_topics() -> None:
    storage, now = _BoundedStorage(), swarm_time.now()
    storage.data = NotWalked()
    for number in range(3):
        assert storage.store_subkey(DHTID.generate(source=number), "member", b"here", now + 30)
