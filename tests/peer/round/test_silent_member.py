"""A member that stands still breaks no call: its leader asks who has not reported for long, and others do its work."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import peer.round.presence
from peer.round.mail import ROUND
from peer.round.step_progress import PROGRESS
from swarm.core.errors import RemoteError, UnreachableError
from swarm.core.ids import Step
from swarm.network.loop import happened
from swarm.network.transport import Message
from tests.swarm_in_process import InProcessSwarm, SwarmPeer, manifest_of, swarm_in_process

CALL_S, PING_S = 0.5, 0.2
SOON_S = 8.0
"""Of the step's 60 s and the 20 s that an open call to a neighbour lasts."""


def holds_work(member: SwarmPeer) -> bool:
    """Whether another's step waits for what this peer has been granted."""
    if member.daemon.at is None:
        return False
    steps = member.steps
    step = Step(steps.version)
    state = steps.open_step(step)
    if state is None or state.leader == member.peer_id or state.closed_at is not None:
        return False
    return state.grants.started > steps.replica.num_done(step)


def stop(member: SwarmPeer, goes_on: asyncio.Event) -> None:
    """As SIGSTOP does: what is sent to it gets there, and nothing comes back."""

    async def answer(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def call(*_: Any, timeout_s: float, **__: Any) -> Any:
        await happened(goes_on, within_s=timeout_s)
        raise UnreachableError("no answer")

    transport: Any = member.transport
    transport.answer, transport.call = answer, call


async def until_one_holds_work(swarm: InProcessSwarm) -> SwarmPeer:
    async with asyncio.timeout(20.0):
        while True:
            for member in swarm.of_stage(0):
                if holds_work(member):
                    return member
            await asyncio.sleep(0)


def test_a_step_goes_on_without_a_member_that_stands_still_with_work_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.round.presence, "PING_S", PING_S)
    manifest = manifest_of(optimizer={"total_steps": 100_000}, deadlines={"call_s": CALL_S, "step_s": 60.0})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 1)) as swarm:
            await swarm.until_version(2)
            victim = await until_one_holds_work(swarm)
            stop(victim, at_the_end := asyncio.Event())
            victim.killed = True
            await swarm.until_version(swarm.host.progress.done_versions() + 4, timeout_s=SOON_S)
            at_the_end.set()

    asyncio.run(scenario())


def test_a_peer_of_another_stage_answers_and_is_gone_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(optimizer={"total_steps": 100_000}, deadlines={"call_s": CALL_S})
        async with swarm_in_process(manifest, tmp_path, peers=(2, 1)) as swarm:
            await swarm.until_version(1, timeout_s=30.0)
            async with asyncio.timeout(20.0):
                while any(peer.daemon.live is None for peer in swarm.peers):  # one of them is no founder
                    await asyncio.wait({peer.task for peer in swarm.peers}, timeout=0.05)
            one, other = swarm.of_stage(0)
            (elsewhere,) = swarm.of_stage(1)
            assert not await one.rounds.presence.is_gone(other.peer_id)
            assert await one.rounds.presence.is_gone(elsewhere.peer_id)
            for method in (PROGRESS, ROUND):
                message = Message({"stage": 0, "step": one.steps.version, "kind": "close"})
                with pytest.raises(RemoteError, match="this peer serves stage 1"):
                    await one.transport.call(elsewhere.peer_id, method, message, timeout_s=CALL_S, max_body_bytes=0)

    asyncio.run(main())
