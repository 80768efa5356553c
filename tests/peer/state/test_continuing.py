"""What a peer makes again of what is on its disk it makes for the host alone; what it lacks it gets from all who have
it."""

import asyncio
import random
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.threads import Threads
from peer.state import continuing
from peer.state.continuing import Continuing, from_elsewhere
from peer.state.joining_state import JoiningState
from swarm.checkpoint import many_donors
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.state import CHUNK_BYTES, UNNAMED, StageState, chunk_hash, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import HOLDINGS, PREPARE, RESULTS
from swarm.identity.key import Identity
from swarm.model.layout import ParameterLayout
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of, manifest_of, prepare
from tests.verification.exhibits import small_settings

HOST, ME, STRANGER, ONE, OTHER = (identity_of(number) for number in range(5))
LAYOUT = ParameterLayout.of({"a": (6 * CHUNK_BYTES // 4,)})
STATE = StageState(24, LAYOUT, np.random.default_rng(1).standard_normal(LAYOUT.num_values, dtype=np.float32))
GENESIS = Genesis(
    "run",
    StageIndex(0),
    Version(24),
    state_digest(STATE),
    tuple(sorted(one.peer_id for one in (ME, ONE, OTHER))),
    LeaseTable(),
    HOST.peer_id,
    HOST.peer_id,
    (),
    bytes(32),
    1,
)
NAMED = replace(STATE, name=GENESIS.name)
EVERYTHING = range(9)


def test_a_stranger_has_a_peers_disk_read_by_nobody(tmp_path: Path) -> None:
    run = prepare(manifest_of(), tmp_path)

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        me, host, stranger = (network.transport(identity) for identity in (ME, HOST, STRANGER))
        past = KeptPast(tmp_path / "kept", StageIndex(0), run.settings, run.states[0].layout)
        Continuing(past, HOST.peer_id).serve(me)
        asked = {
            HOLDINGS: Message(),
            RESULTS: Message({"from": 0}),
            PREPARE: Message({"lineage": bytes(32), "version": 0, "number": 0}),
        }
        for method, request in asked.items():
            with pytest.raises(RemoteError, match="only the host"):
                await stranger.call(ME.peer_id, method, request, timeout_s=10.0, max_body_bytes=0)
        held = await host.call(ME.peer_id, HOLDINGS, Message(), timeout_s=10.0, max_body_bytes=0)
        assert held.meta == {"held": []}
        for transport in (me, host, stranger):
            await transport.close()

    asyncio.run(scenario())


class Scene:
    """A peer that goes back to a state it has not, and those who give some of its chunks."""

    def __init__(self, folder: Path) -> None:
        self._network = MemoryNetwork(random.Random(0))
        self.asked: list[tuple[PeerId, int]] = []
        me = self._network.transport(ME)
        self._wanted = JoiningState(
            me, small_settings(1), "run", HOST.peer_id, HOST.peer_id, StageIndex(0), LAYOUT, folder, 0
        )

    def gives(self, identity: Identity, state: StageState, indices: Collection[int] = EVERYTHING) -> None:
        chunks = state_chunks(state)
        hashes, transport = tuple(map(chunk_hash, chunks)), self._network.transport(identity)
        offer = Offer(0, state.version, state_digest(state), hashes, sum(map(len, chunks)), None)

        async def on_snapshot(sender: PeerId, request: Message) -> Message:
            return offer.to_message()

        async def on_chunk(sender: PeerId, request: Message) -> Message:
            index = Fields("chunk request", request.meta).integer("index")
            self.asked.append((identity.peer_id, index))
            if index not in indices:
                raise TransientError("the line is full")
            return Message({}, bytes(chunks[index]))

        transport.serve(SNAPSHOT, on_snapshot, max_body_bytes=0)
        transport.serve(CHUNK, on_chunk, max_body_bytes=0)

    async def gone_back(self) -> StageState:
        state = await from_elsewhere(GENESIS, self._wanted)
        assert state.name == UNNAMED
        assert state_digest(state) == GENESIS.state_digest
        return state


def test_who_goes_back_has_the_state_of_the_host_and_of_members_who_are_there_already(tmp_path: Path) -> None:
    """The host's line carried the state to every peer of the run, one after the other."""

    async def play() -> None:
        scene = Scene(tmp_path)
        scene.gives(HOST, STATE, {0, 1, 2})
        scene.gives(ONE, NAMED)
        await scene.gone_back()
        assert {peer for peer, _ in scene.asked} == {HOST.peer_id, ONE.peer_id}

    asyncio.run(play())


def test_what_came_of_a_state_stays_when_its_donors_break_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_donors, "LOOK_FOR_MORE_S", 0.05)

    async def play() -> None:
        scene = Scene(tmp_path)
        scene.gives(HOST, STATE, {0, 1, 2})
        with pytest.raises(TransientError):
            await scene.gone_back()
        scene.gives(ONE, NAMED)
        await scene.gone_back()
        assert {index for peer, index in scene.asked if peer == ONE.peer_id}.isdisjoint({1, 2})

    asyncio.run(play())


def test_without_the_host_members_give_what_the_genesis_names_and_nothing_else_is_taken(tmp_path: Path) -> None:
    """By its digest: neither an anchor nor the word of most members is needed for what the run key names."""

    async def play() -> None:
        scene = Scene(tmp_path)
        scene.gives(HOST, replace(STATE, version=32))
        scene.gives(ONE, replace(NAMED, weights=np.zeros(LAYOUT.num_values, np.float32)))
        with pytest.raises(TransientError, match="none of 3 gives version 24"):
            await scene.gone_back()
        scene.gives(OTHER, NAMED)
        await scene.gone_back()
        assert {peer for peer, index in scene.asked if index} == {OTHER.peer_id}

    asyncio.run(play())


class HeldUp(Threads):
    """Hash when the test lets them, and count it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.let = threading.Event()
        self.num_hashed = 0

    def map(self, function: Any, items: Any) -> list[Any]:
        self.let.wait(20.0)
        self.num_hashed += len(items)
        return super().map(function, items)


def test_a_state_that_was_made_again_is_hashed_once_and_the_host_does_not_wait_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several GB take longer to hash than the host waits for an answer: each of its questions began anew with it."""
    monkeypatch.setattr(continuing, "WAIT_S", 0.05)
    threads = HeldUp()

    class Past(KeptPast):
        def made_again(self, lineage: bytes, version: int) -> tuple[StageState, StageChain]:
            return replace(NAMED, version=version), StageChain.begin(GENESIS, small_settings(1))

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        me, host = network.transport(ME), network.transport(HOST)
        held = Continuing(Past(tmp_path, StageIndex(0), small_settings(1), LAYOUT, threads), HOST.peer_id)
        held.serve(me)
        request = Message({"lineage": bytes(32), "version": 8, "number": 24})

        async def asked() -> Message:
            return await host.call(ME.peer_id, PREPARE, request, timeout_s=10.0, max_body_bytes=1 << 24)

        for _ in range(3):
            assert (await asked()).meta["state"] is None
        threads.let.set()
        async with asyncio.timeout(10.0):
            while (told := await asked()).meta["state"] is None:
                pass
        again = await asked()
        assert again.meta == told.meta
        said = Fields("prepared", told.meta).message("state")
        assert said["digest"] == GENESIS.state_digest
        chunks = state_chunks(STATE)
        assert bytes(told.body) == b"".join([*map(chunk_hash, chunks), chunks[0]])
        state = await held.state_of(GENESIS, 8)
        assert state is not None
        assert threads.num_hashed == len(chunks)
        assert state_digest(state) == GENESIS.state_digest
        for transport in (me, host):
            await transport.close()

    asyncio.run(scenario())
