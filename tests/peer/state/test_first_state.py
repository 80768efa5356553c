"""A peer that waits for its stage's state asks the host now and then, however soon it answers."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from kernels.threads import ONE_THREAD
from peer.directory.host import HOST_RETRY_S, Host
from peer.state.first_state import FirstState
from swarm.checkpoint.state import chunk_hash, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex
from swarm.host_protocol import GENESIS
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm.core.round.round_world import run_key
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import RUN_ID, SmallRun, small_settings

STAGE = StageIndex(1)
HOST, ME = identity_of(0), identity_of(1)
MOST_QUESTIONS = 100


def test_a_host_that_never_waits_is_asked_no_oftener_than_one_that_is_away(tmp_path: Path) -> None:
    run = SmallRun(small_settings(2), num_peers=1)
    replica = run.replicas[STAGE][0]
    chunks = state_chunks(replica.state)
    hashes = tuple(map(chunk_hash, chunks))
    offer = Offer(STAGE, replica.state.version, state_digest(replica.state), hashes, sum(map(len, chunks)), None)
    asked_at: list[float] = []

    async def on_genesis(sender: PeerId, request: Message) -> Message:
        asked_at.append(asyncio.get_running_loop().time())
        if len(asked_at) == MOST_QUESTIONS:
            raise RemoteError("protocol", "enough", sender)
        told = {"begins": False, "is_lost": False, "waits_for": "others", "amendments": 0}
        return Message({**told, "genesis": None, "beside": [], "to_version": 0})

    async def on_snapshot(sender: PeerId, request: Message) -> Message:
        return offer.to_message()

    async def on_chunk(sender: PeerId, request: Message) -> Message:
        return Message({}, bytes(chunks[Fields("chunk request", request.meta).integer("index")]))

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        host, mine = network.transport(HOST), network.transport(ME)
        for method, handler in ((GENESIS, on_genesis), (SNAPSHOT, on_snapshot), (CHUNK, on_chunk)):
            host.serve(method, handler, max_body_bytes=0)
        wanted = FirstState(
            settings=run.settings,
            run_id=RUN_ID,
            run_key=run_key().peer_id,
            amendments=0,
            stage=STAGE,
            layout=replica.layout,
            me=ME.peer_id,
            host=Host(mine, HOST.peer_id),
            transport=mine,
            directory=network.directory(ME),
            kept=tmp_path,
            on_begun=lambda geneses: None,
            threads=ONE_THREAD,
            say=lambda words: None,
            rng=random.Random(0),
        )
        with pytest.raises(RemoteError, match="enough"):
            await wanted.get()

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    # The first question does not wait: whoever finds the run about to begin is ready at once.
    pauses_s = [after - before for before, after in pairwise(asked_at[1:])]
    assert min(pauses_s) >= HOST_RETRY_S
