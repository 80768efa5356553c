"""Records passed on from peer to peer: nobody with a few keys has others' forgotten."""

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest

from swarm.core.errors import RemoteError
from swarm.identity.key import Identity
from swarm.network.directory import records
from swarm.network.directory.passed_on import MAX_TOPICS, MAX_TOPICS_OF_A_PEER, TELL, PassedOn
from swarm.network.directory.records import sign_record
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message, Transport

ME, *OTHERS = [Identity.from_seed(f"peer {number}".encode().ljust(32)) for number in range(80)]


async def tell(teller: Transport, identity: Identity, topic: str) -> int:
    """How many records it is told of in return."""
    _, data = sign_record(identity, topic, {"addresses": []}, ttl_s=60.0, now=swarm_time.now())
    meta = Message({"topic": topic, "own": [data]})
    answer = await teller.call(ME.peer_id, TELL, meta, timeout_s=10.0, max_body_bytes=0)
    records = answer.meta["records"]
    assert isinstance(records, list)
    return len(records)


@pytest.mark.parametrize("is_asked_here", [False, True], ids=["a seed", "a peer of the stage"])
def test_keys_that_tell_of_many_topics_have_no_stage_forgotten(is_asked_here: bool) -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        passed_on = PassedOn(network.transport(ME))
        passed_on.serve()
        if is_asked_here:
            await passed_on.ask("stage/0")
        members, liars = OTHERS[:2] if not is_asked_here else OTHERS[:1], OTHERS[2:]
        for member in members:
            await tell(network.transport(member), member, "stage/0")
        for liar in liars:
            teller = network.transport(liar)
            for number in range(2 * MAX_TOPICS_OF_A_PEER):
                with contextlib.suppress(RemoteError):
                    await tell(teller, liar, f"{liar.peer_id}/{number}")
        assert len(passed_on.hear("stage/0", [])[0]) == len(members)
        assert len(passed_on._heard) <= MAX_TOPICS

    asyncio.run(scenario())


def test_to_ask_for_records_has_no_signature_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else some hundred keys whose records push one another out of what is remembered have a peer do nothing else."""
    checked = 0

    def verify(*args: Any) -> bool:
        nonlocal checked
        checked += 1
        return True

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        passed_on = PassedOn(network.transport(ME))
        for one in OTHERS:
            _, data = sign_record(one, "stage/0", {}, ttl_s=60.0, now=swarm_time.now())
            passed_on.hear("stage/0", [data])
        records._signed_record.cache_clear()
        monkeypatch.setattr(records, "verify", verify)
        assert len(passed_on.hear("stage/0", [])[0]) == len(OTHERS)
        monkeypatch.setattr(swarm_time, "now", lambda: time.time() + 61.0)
        assert passed_on.hear("stage/0", [])[0] == {}

    asyncio.run(scenario())
    assert checked == 0
