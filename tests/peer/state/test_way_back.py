"""A peer that was away for a while comes back by the results that it missed; only after longer by a whole state."""

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.state.way_back import state_to_go_on_from, stated
from swarm.checkpoint.snapshots import SnapshotStore, kept_states
from swarm.checkpoint.state import arrays_of, state_digest
from swarm.checkpoint.transfer import CHUNK, PART_BYTES
from swarm.core.ids import PeerId, StageIndex
from swarm.host_protocol import STANDING
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message, Transport
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from tests.verification.exhibits import SmallRun, small_settings

SNAPSHOT_EVERY = 8
AWAY_FROM = SNAPSHOT_EVERY + 1


def manifest(steps: int) -> str:
    """Of a run that goes on for a while after the peer was away for so many steps."""
    total = AWAY_FROM + steps + SNAPSHOT_EVERY
    return manifest_of(
        optimizer={"total_steps": total},
        checkpoint={"every_steps": total - total % SNAPSHOT_EVERY, "snapshot_every": SNAPSHOT_EVERY},
        limits={"founders_per_stage": 1},
        deadlines={"call_s": 1.0},
    )


class Counting:
    """A transport that counts the bytes of the answers to what its peer asks, by method."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.received: Counter[str] = Counter()

    async def call(self, peer: PeerId, method: str, request: Message, **options: Any) -> Message:
        answer = await self._inner.call(peer, method, request, **options)
        self.received[method] += len(answer.body)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def others_go_on(swarm: InProcessSwarm, steps: int) -> int:
    """They take at least so many without the one that is away, and stand still; the version they stand at."""
    first, other = swarm.of_stage(0)[0], swarm.of_stage(1)[0]
    await swarm.until_version(AWAY_FROM + steps, timeout_s=60.0)
    first.daemon.shared.permit.withhold("for the test")
    while await other.steps.wait_for_version(int(other.steps.version) + 1, timeout_s=0.5):
        pass
    return int(other.steps.version)


async def come_back(swarm: InProcessSwarm, counting: Counting, version: int) -> tuple[Counter[str], float]:
    """What the second peer of stage 1 received until it was where the others are, and what a state takes."""
    async with asyncio.timeout(120.0):
        while swarm.of_stage(1)[1].daemon.at is None:
            await asyncio.wait({swarm.of_stage(1)[1].task}, timeout=0.02)
    steps = swarm.of_stage(1)[1].steps
    assert await steps.wait_for_version(version, timeout_s=120.0)
    received = Counter(counting.received)
    swarm.of_stage(0)[0].daemon.shared.permit.give()
    report = await swarm.finished(timeout_s=60.0)
    assert [len(digests) for digests in report["state_digests"].values()] == [1, 2]
    assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())
    return received, sum(array.nbytes for _, array in arrays_of(steps.replica.state))


async def joined_early(swarm: InProcessSwarm) -> None:
    """Nothing goes on until all have joined: who came later would hold no snapshot of before it was away."""
    await swarm.until_version(1)
    swarm.of_stage(0)[0].daemon.shared.permit.withhold("for the test")
    async with asyncio.timeout(120.0):
        while any(peer.daemon.at is None for peer in swarm.peers):
            await asyncio.wait({peer.task for peer in swarm.peers}, timeout=0.02)
    swarm.of_stage(0)[0].daemon.shared.permit.give()


async def scenario(folder: Path, *, steps: int, restarted: bool) -> tuple[Counter[str], float]:
    transports: dict[tuple[int, int], Counting] = {}

    def counting(stage: int, index: int, transport: Transport) -> Any:
        transports[stage, index] = Counting(transport)
        return transports[stage, index]

    async with swarm_in_process(manifest(steps), folder, peers=(1, 2), wrap=counting) as swarm:
        away = swarm.of_stage(1)[1]
        await joined_early(swarm)
        await swarm.until_version(AWAY_FROM, timeout_s=60.0)
        others = [swarm.run.host_key.peer_id, *(peer.peer_id for peer in swarm.peers if peer is not away)]
        async with asyncio.timeout(120.0):
            while SNAPSHOT_EVERY not in away.steps.context.snapshots.versions():  # it is on its way to the disk
                await asyncio.wait({away.task}, timeout=0.02)
        if restarted:
            await swarm.kill(away)
        else:
            for other in others:
                swarm.network.cut(away.peer_id, other)
        version = await others_go_on(swarm, steps)
        print(f"missed {version - AWAY_FROM} versions")
        transports[1, 1].received.clear()
        if restarted:
            await swarm.restart(away)
        else:
            for other in others:
                swarm.network.heal(away.peer_id, other)
        return await come_back(swarm, transports[1, 1], version)


@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_peer_that_missed_few_versions_replays_them(tmp_path: Path, restarted: bool) -> None:
    """Restarted it begins at its last snapshot, one version earlier; it can replay ten under the default codec."""
    received, state_bytes = asyncio.run(scenario(tmp_path, steps=5, restarted=restarted))
    parts_bytes = received[PART_BYTES]
    print(f"received {parts_bytes} bytes of results' parts and {received[CHUNK]} of {state_bytes} bytes of state")
    assert received[CHUNK] == 0
    assert 0.3 * state_bytes < parts_bytes < state_bytes


@pytest.mark.soak
@pytest.mark.parametrize("restarted", [False, True])
def test_a_peer_that_missed_more_than_a_state_is_worth_loads_one(tmp_path: Path, restarted: bool) -> None:
    received, state_bytes = asyncio.run(scenario(tmp_path, steps=16, restarted=restarted))
    parts_bytes = received[PART_BYTES]
    print(f"received {parts_bytes} bytes of results' parts and {received[CHUNK]} of {state_bytes} bytes of state")
    assert state_bytes <= received[CHUNK] < 1.1 * state_bytes
    assert received[PART_BYTES] < state_bytes


def test_a_kept_state_is_used_only_whole_and_of_the_same_beginning(tmp_path: Path) -> None:
    run = SmallRun(small_settings(2))
    layout = run.replicas[1][0].layout
    store = SnapshotStore(tmp_path)
    for number in range(2):
        run.microbatch(number)
        run.step(0)
        run.step(1)
        asyncio.run(store.save(*run.snapshot(1)))

    def found() -> list[tuple[int, bytes]]:
        loaded = [(one.chain, one.load(layout)) for one in kept_states(tmp_path, StageIndex(1))]
        return [(int(chain.version), state_digest(state)) for chain, state in loaded if state is not None]

    stored = {version: snapshot for version in (1, 2) if (snapshot := store.get(version)) is not None}
    assert not kept_states(tmp_path, StageIndex(0))
    assert found() == [(2, stored[2].digest), (1, stored[1].digest)]
    with stored[2].path.open("r+b") as file:  # a block that the disk has lost
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    assert found() == [(1, stored[1].digest)]
    stored[1].path.with_suffix(".facts").write_bytes(b"torn")
    assert found() == []
    store = SnapshotStore(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "it goes before a newer state is whole"
    state, chain = run.snapshot(1)
    asyncio.run(store.save(state, replace(chain, lineage=bytes(32))))
    assert {path.stem for path in tmp_path.iterdir()} == {f"stage-1-{bytes(8).hex()}-00000002"}


@pytest.mark.parametrize("num_members", [0, 2])
def test_where_the_stage_is_says_no_stranger(num_members: int) -> None:
    """One that named version 2^60 had a peer fetch a whole state, which had all but one result."""
    run = SmallRun(small_settings(1))
    honest, liars = [identity_of(number) for number in range(1, 5)], [identity_of(number) for number in (5, 6)]
    donors = [liar.peer_id for liar in liars[: 2 if num_members else 1]] + [peer.peer_id for peer in honest]
    chain = SimpleNamespace(members=[peer.peer_id for peer in honest[:num_members]])
    past: Any = SimpleNamespace(
        settings=run.settings,
        layout=run.replicas[0][0].layout,
        stage=StageIndex(0),
        newest=lambda lineage: 5,
        chain_at=lambda lineage, version: chain,
        made_again=lambda lineage, version: ("state", version),
    )

    async def main() -> object:
        network = MemoryNetwork(random.Random(0))
        for identity in (*honest, *liars):

            async def on_standing(
                sender: PeerId, request: Message, at: int = 1 << 60 if identity in liars else 6
            ) -> Message:
                return Message({"version": at})

            network.transport(identity).serve(STANDING, on_standing, max_body_bytes=0)
        return await state_to_go_on_from(past, run.chains[0], network.transport(identity_of(0)), donors)

    assert asyncio.run(main()) == ("state", 5)


def test_what_more_than_a_third_state_is_where_the_stage_is() -> None:
    assert stated([]) is None
    assert stated([7]) == stated([3, 7]) == 7
    assert stated([1 << 60, 7, 6]) == 7
    assert stated([1 << 60, 1 << 60, 7, 6, 6, 5]) == 7
    assert stated([0, 0, 0, 8, 8]) == 8
