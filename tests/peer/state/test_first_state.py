"""A peer that waits for its stage's state asks the host now and then, however soon it answers."""

import asyncio
import errno
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from kernels.threads import ONE_THREAD
from peer.directory.host import HOST_RETRY_S, Host
from peer.state import first_state
from peer.state.first_state import FirstState
from swarm.checkpoint.state import UNNAMED, StageState, chunk_hash, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.errors import DiskFullError, RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.disk import cold_bytes
from swarm.host_protocol import GENESIS
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm.core.round.round_world import run_key
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import RUN_ID, SmallRun, small_settings

STAGE = StageIndex(1)
HOST, ME = identity_of(0), identity_of(1)
MOST_QUESTIONS = 100


Answer = Callable[[int], dict[str, Any]]
"""What the host says to the question of this number, beside what it always says."""
TOLD: dict[str, Any] = {
    **{"begins": False, "is_lost": False, "waits_for": "others", "amendments": 0},
    **{"genesis": None, "beside": [], "to_version": 0},
}


class Scene:
    """A host that gives the state of a stage, and a peer that waits for it; virtual time."""

    def __init__(self, folder: Path) -> None:
        self.run = SmallRun(small_settings(2), num_peers=1)
        self.replica = self.run.replicas[STAGE][0]
        self.folder = folder
        self.asked_at: list[float] = []
        self.spoilt = 0
        """So many chunks are of another state at first."""
        self.state = replace(self.replica.state, name=UNNAMED)
        self._chunks = state_chunks(self.state)

    @property
    def genesis(self) -> Genesis:
        """By which the stage begins with the peer alone, from that state."""
        return Genesis(
            run_id=RUN_ID,
            stage=STAGE,
            version=Version(0),
            state_digest=state_digest(self.state),
            members=(ME.peer_id,),
            leases=LeaseTable(),
            host=HOST.peer_id,
            run_key=run_key().peer_id,
            neighbours=(),
            host_chain_end=bytes(32),
        ).signed_by(run_key())

    def get(self, answer: Answer) -> tuple[StageState, StageChain]:
        """What the peer gets. Raises RemoteError("enough") after so many questions."""
        hashes = tuple(map(chunk_hash, self._chunks))
        offer = Offer(STAGE, self.state.version, state_digest(self.state), hashes, sum(map(len, self._chunks)), None)

        async def on_genesis(sender: PeerId, request: Message) -> Message:
            self.asked_at.append(asyncio.get_running_loop().time())
            if len(self.asked_at) == MOST_QUESTIONS:
                raise RemoteError("protocol", "enough", sender)
            return Message({**TOLD, **answer(len(self.asked_at))})

        async def on_snapshot(sender: PeerId, request: Message) -> Message:
            return offer.to_message()

        async def on_chunk(sender: PeerId, request: Message) -> Message:
            self.spoilt -= 1
            if self.spoilt >= 0:
                return Message({}, b"of another state")
            return Message({}, bytes(self._chunks[Fields("chunk request", request.meta).integer("index")]))

        async def main() -> tuple[StageState, StageChain]:
            network = MemoryNetwork(random.Random(0))
            host, mine = network.transport(HOST), network.transport(ME)
            for method, handler in ((GENESIS, on_genesis), (SNAPSHOT, on_snapshot), (CHUNK, on_chunk)):
                host.serve(method, handler, max_body_bytes=0)
            wanted = FirstState(
                settings=self.run.settings,
                run_id=RUN_ID,
                run_key=run_key().peer_id,
                amendments=0,
                stage=STAGE,
                layout=self.replica.layout,
                me=ME.peer_id,
                host=Host(mine, HOST.peer_id),
                transport=mine,
                directory=network.directory(ME),
                kept=self.folder,
                on_begun=lambda geneses: None,
                threads=ONE_THREAD,
                say=lambda words: None,
                rng=random.Random(0),
            )
            return await wanted.get()

        return run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)


def test_a_host_that_never_waits_is_asked_no_oftener_than_one_that_is_away(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(RemoteError, match="enough"):
        scene.get(lambda number: {})
    # The first question does not wait: whoever finds the run about to begin is ready at once.
    pauses_s = [after - before for before, after in pairwise(scene.asked_at[1:])]
    assert min(pauses_s) >= HOST_RETRY_S


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_state_that_the_host_replaced_while_it_came_is_asked_for_again(tmp_path: Path, has_begun: bool) -> None:
    """A run that was rolled back meanwhile ended a volunteer's daemon for good."""
    scene = Scene(tmp_path)
    scene.spoilt = 1
    begins = {"begins": True, "genesis": scene.genesis.to_value()}
    state, chain = scene.get(lambda number: begins if has_begun or number > 2 else {})
    assert scene.spoilt < 0
    assert state.name == chain.name == scene.genesis.name


def test_gigabytes_are_not_hashed_where_all_else_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_threads: list[Callable[..., object]] = []
    to_thread, num_hashed = asyncio.to_thread, 0

    def hashed(state: StageState) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return state_digest(state)

    async def told(function: Callable[..., object], *arguments: Any) -> object:
        on_threads.append(function)
        return await to_thread(function, *arguments)

    monkeypatch.setattr(first_state, "state_digest", hashed)
    monkeypatch.setattr(first_state.asyncio, "to_thread", told)
    scene = Scene(tmp_path)
    scene.get(lambda number: {"begins": True, "genesis": scene.genesis.to_value()} if number > 2 else {})
    assert num_hashed == on_threads.count(hashed) == 1


def test_a_full_disk_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of a state stayed in memory without a word."""

    def pwrite(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cold_bytes.os, "pwrite", pwrite)
    with pytest.raises(DiskFullError, match="make room there"):
        Scene(tmp_path).get(lambda number: {})
