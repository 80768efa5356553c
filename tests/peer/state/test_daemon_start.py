"""A peer's start and its going: who hears of a lie is there first, and nothing of a start that fails stays."""

import asyncio
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from peer.pipeline.source import EVALUATE
from peer.program.at_stage import PeerAtStage
from peer.stage.events import Applied
from peer.state.catch_up import StateDonor
from swarm.checkpoint.snapshots import SnapshotStore
from swarm.core.errors import LocalError, TransientError
from swarm.network.transport import Message
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.kinds.equivocation import Equivocation
from verification.kinds.protocol_violation import ProtocolViolation

MANIFEST = manifest_of(optimizer={"total_steps": 60}, limits={"founders_per_stage": 1, "max_peers_per_stage": 2})
PUBLIC = manifest_of(run={"trust": "public"}, optimizer={"total_steps": 60}, limits={"founders_per_stage": 1})
DESCRIPTORS = Path("/proc/self/fd")


def threads_of_peers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in ("compute", "exact")}


def test_whoever_hears_of_a_lie_is_there_before_rounds_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, int, int]] = []
    serve = PeerAtStage.serve

    async def look(at: PeerAtStage) -> None:
        hearers = at.context.events._hearers
        steps_heard_by = [hearer for hearer in hearers[Applied] if hearer.__module__.startswith("peer.audit")]
        heard.append((len(hearers[Equivocation]), len(hearers[ProtocolViolation]), len(steps_heard_by)))
        with pytest.raises(AssertionError, match="a hearer came after"):
            at.context.events.hear(Applied, lambda applied: None)
        await serve(at)

    monkeypatch.setattr(PeerAtStage, "serve", look)

    async def scenario() -> None:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(1)

    asyncio.run(scenario())
    assert heard == [(1, 1, 4)] * 2


def test_a_start_that_fails_leaves_no_thread_and_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads_of_peers()

    async def full(store: SnapshotStore, *arguments: Any) -> None:
        raise LocalError("planted: nothing is saved")

    monkeypatch.setattr(SnapshotStore, "save", full)

    async def scenario() -> None:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(1, 1)) as swarm:
            tasks = [peer.task for peer in swarm.peers]
            await asyncio.wait(tasks, timeout=120)
            for task in tasks:
                with pytest.raises(LocalError, match="planted"):
                    task.result()

    asyncio.run(scenario())
    assert threads_of_peers() <= before


async def asked_to_evaluate(swarm: InProcessSwarm, version: int) -> None:
    host, _ = await swarm._connected(swarm.run.run_key)
    meta: Any = {"version": version, "index": 0}
    await host.call(swarm.of_stage(0)[0].peer_id, EVALUATE, Message(meta), timeout_s=5.0, max_body_bytes=0)


def test_who_has_left_the_first_stage_evaluates_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(2)
            source = swarm.of_stage(0)[0]
            source.stop.set()
            await source.task
            with pytest.raises(TransientError, match="has left the first stage"):
                await asked_to_evaluate(swarm, 2)
            source.killed = True  # it has ended as it was told to

    asyncio.run(scenario())


def held_of(folder: Path, others: Set[threading.Thread]) -> tuple[int, int]:
    """Threads that write there, those of `others` apart, and descriptors of what they wrote."""
    threads = sum(thread.name.startswith("exchanges") for thread in {*threading.enumerate()} - others)
    files = [link.resolve() for link in DESCRIPTORS.iterdir() if link.exists()]
    return threads, sum(folder in file.parents and file.name.startswith(("exchanges", "past")) for file in files)


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="descriptors are counted in /proc")
def test_who_has_left_a_stage_has_no_thread_and_no_file_open_of_what_it_would_have_shown(tmp_path: Path) -> None:
    others = {*threading.enumerate()}  # stores of other tests, whose threads end when they are collected

    async def scenario() -> None:
        async with swarm_in_process(PUBLIC, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(2)
            threads, files = held_of(tmp_path, others)
            assert threads == 2
            assert files >= 4
            for peer in swarm.peers:
                await swarm.leave(peer)
            assert held_of(tmp_path, others) == (0, 0)

    asyncio.run(scenario())


def test_a_peer_that_asks_again_does_not_count_against_itself(tmp_path: Path) -> None:
    """The stage has two places: the second is for whoever asks for it, however often."""

    async def scenario() -> None:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(1)
            member = swarm.of_stage(1)[0]
            member.daemon.shared.permit.withhold("for the test")
            swarm.of_stage(0)[0].daemon.shared.permit.withhold("for the test")
            newcomer = await swarm.add_peer(1)
            async with asyncio.timeout(120.0):
                while newcomer.peer_id not in member.steps.joining | set(member.steps.chain.members):
                    await asyncio.wait({newcomer.task}, timeout=0.05)
                while newcomer.daemon.live is None:
                    await asyncio.wait({newcomer.task}, timeout=0.05)
            asked: Any = {"ticket": newcomer.verifying.ticket.to_value(), "promotion": None}
            member.steps.joining.add(newcomer.peer_id)
            assert member.daemon.at is not None
            donor = StateDonor(member.steps, member.daemon.at.rounds.joiners, member.daemon.verdicts.take)
            answer = await donor._on_join(newcomer.peer_id, Message(asked))
            assert answer.meta["version"] == member.steps.next_to_join()
            stranger = identity_of(99).peer_id
            member.steps.joining.add(stranger)
            with pytest.raises(TransientError, match="has its 2 peers"):
                await donor._on_join(newcomer.peer_id, Message(asked))

    asyncio.run(scenario())
