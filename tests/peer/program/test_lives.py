"""Two devices of one machine are two peers of one daemon: what they need comes once, their owner speaks to both, and
each lives and ends by itself."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from peer.directory.known_peers import KnownPeers
from peer.machine.core_share import DaemonThreads
from peer.owner.consent import silent
from peer.owner.desk import OwnerDesk
from peer.owner.log_lines import LogLines
from peer.owner.own_peer import OwnPeer
from peer.program.lives import Lives
from peer.program.state_folder import StateFolder
from swarm.core.errors import LocalError
from swarm.core.ids import PeerId
from swarm.core.owner.limits import OwnerLimits
from swarm.file_donor import FileDonor
from swarm.network.identity_file import load_or_create_identity
from swarm.network.transport import Message
from swarm.proto import daemon_pb2 as pb
from tests.pretend_device import DEVICE_TYPE, OTHERS, PRETEND
from tests.swarm_in_process import InProcessSwarm, Volunteer, manifest_of, swarm_in_process

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PRETEND not in OTHERS, reason="two devices are only pretended"),
]

WITHIN_S = 120.0
RUN = manifest_of(
    model={"stages": 1},
    adapters={"rank": 2, "base": "nf4"},
    optimizer={"total_steps": 5000},
    checkpoint={"every_steps": 5000, "snapshot_every": 5},
    limits={"founders_per_stage": 2},
    deadlines={"call_s": 15.0, "hop_s": 60.0, "step_s": 60.0, "straggler_s": 5.0, "lease_s": 60.0},
)
"""Of one stage, whose frozen base both have; with time for a busy machine, for all is in one process."""


@dataclass
class TwoDevices:
    """A daemon, and the task that its two peers live in."""

    desk: OwnerDesk
    stop: asyncio.Event
    task: asyncio.Task[None]
    said: list[str]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                assert not self.task.done(), self.task.result()
                await asyncio.sleep(0.05)

    def peers(self) -> list[pb.Peer]:
        """As their owner is told of them."""
        return list(self.desk.status().peers)


@asynccontextmanager
async def daemon_of_two(folder: Path, swarm: InProcessSwarm, stages: Sequence[int]) -> AsyncIterator[TwoDevices]:
    state, threads, stop, said = StateFolder(folder), DaemonThreads(2, 2), asyncio.Event(), list[str]()
    folders = state, state.of_gpu(1)
    for each in folders:
        each.make()
    peers = [
        OwnPeer(
            f"GPU {number}",
            load_or_create_identity(own.identity),
            Volunteer(
                folder=folder,
                threads=1,
                stage=stage,
                device=f"{DEVICE_TYPE}:{number + 1}",
                listen=("/ip4/127.0.0.1/tcp/0",),
            ),
            own.path,
            threads.of[number],
        )
        for number, (own, stage) in enumerate(zip(folders, stages, strict=True))
    ]
    host = swarm.run.host_key.peer_id
    desk = OwnerDesk(peers, threads, state, OwnerLimits(), host, LogLines(), stop, stop.set)
    lives = Lives(
        *(desk, host, swarm.host_addresses(), KnownPeers(folder / "known-peers.json"), stop),
        on_run=silent,
        say=said.append,
        rng=random.Random(0),
    )
    two = TwoDevices(desk, stop, asyncio.ensure_future(lives.run()), said)
    try:
        yield two
    finally:
        two.task.cancel()
        await asyncio.gather(two.task, return_exceptions=True)


def count_pieces(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bytes, int]]:
    """Pieces of files that anybody in this process gives, by file and number."""
    given, answer = Counter[tuple[bytes, int]](), FileDonor._on_file

    async def counted(donor: FileDonor, sender: PeerId, request: Message) -> Message:
        reply = await answer(donor, sender, request)
        given[request.meta["digest"], request.meta["piece"]] += 1  # type: ignore[index]
        return reply

    monkeypatch.setattr(FileDonor, "_on_file", counted)
    return given


def test_two_peers_of_a_stage_have_all_once_and_one_goes_on_without_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = count_pieces(monkeypatch)

    async def main() -> None:
        async with (
            swarm_in_process(RUN, tmp_path, peers=(0,), real_network=True) as swarm,
            daemon_of_two(tmp_path / "daemon", swarm, (0, 0)) as two,
        ):
            await two.until(lambda: all(peer.work.certified_microbatches for peer in two.peers()))
            assert [(peer.name, peer.device, peer.state) for peer in two.peers()] == [
                ("GPU 0", "pretend:1", "working"),
                ("GPU 1", "pretend:2", "working"),
            ]
            data, base = swarm.run.settings.data, swarm.run.settings.base_digest
            assert set(given) >= {(data.train_digest, 0), (base, 0)}
            assert set(given.values()) == {1}, "each piece came once, for both"

            two.desk.pause()
            await two.until(lambda: [peer.state for peer in two.peers()] == ["paused", "paused"])
            lives = [peer.daemon.live for peer in two.desk.peers if peer.daemon is not None]
            await two.until(lambda: not any(live.in_flight for live in lives if live is not None))
            before = [peer.work.computed for peer in two.peers()]
            await asyncio.sleep(0.5)
            assert [peer.work.computed for peer in two.peers()] == before
            two.desk.resume()

            second = two.desk.peers[1].daemon
            assert second is not None
            assert second.live is not None

            async def breaks() -> None:
                raise LocalError("planted")

            second.live.context.tasks.spawn(breaks())
            await two.until(lambda: two.peers()[1].state == "ended")
            assert "planted" in two.peers()[1].reason
            assert any("GPU 1: has ended, and the others go on" in said for said in two.said)
            version = two.peers()[0].place.version
            await two.until(lambda: two.peers()[0].place.version >= version + 3)
            assert two.desk.status().state == "working"
            assert (two.desk.shared.line.num_peers, two.desk.peers[0].threads.number) == (1, 2)

            two.desk.leave(now=False)
            await two.task
            assert two.peers()[0].reason == "it has left"

    asyncio.run(main())
