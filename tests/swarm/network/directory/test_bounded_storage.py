"""What one node of the DHT stores: nobody's records alone."""

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
    found = storage.get(stage)
    assert found is not None
    assert "member" in found.value
