"""Early work: whom the round that runs will name takes microbatches of the next step, and they count."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.pipeline.downstream import METHOD, ROOM
from peer.round.mail.mail import ROUND
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import Contribution
from swarm.network.transport import Message, Transport
from tests.peer.pipeline.hop_line import STEP, hop_line
from tests.swarm_in_process import SwarmPeer, manifest_of, swarm_in_process

MANIFEST = manifest_of(
    averaging={"delay": 1, "sync_steps": 0},
    batch={"microbatch_size": 2, "target_tokens": 512},
    optimizer={"total_steps": 400},
    limits={"founders_per_stage": 2},
)


class Patient:
    """A transport whose owner makes a call only when it may."""

    def __init__(self, inner: Transport, may_call: Callable[[PeerId, str, Message], bool]) -> None:
        self._inner = inner
        self._may_call = may_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        while not self._may_call(peer_id, method, request):
            if method == METHOD:
                raise TransientError("to somebody else")
            await asyncio.sleep(0.01)
        return await self._inner.call(peer_id, method, request, **limits)


class Joined:
    """A swarm that a third peer of stage 1 joins. Until it has done a microbatch of the step that it is to be a member
    for, the round before does not go on, and sources send what is of the step to nobody else."""

    def __init__(self) -> None:
        self.newcomer: SwarmPeer | None = None

    def wrap(self, stage: int, index: int, transport: Transport) -> Transport:
        held = (METHOD, ROUND)[stage]
        return Patient(  # type: ignore[return-value]
            transport, lambda peer, method, request: method != held or self._may_call(peer, method, request.meta)
        )

    def _may_call(self, peer: PeerId, method: str, meta: Any) -> bool:
        at = self.newcomer.daemon.at if self.newcomer is not None else None
        if at is None or at.steps.is_member or peer == at.context.me:
            return True
        step = Step(meta["birth"]["value"]["step"] if method == METHOD else meta["step"] + 1)
        return not at.steps.may_work_for(step) or at.steps.replica.num_done(step) > 0


@pytest.mark.soak
def test_a_newcomers_first_contribution_holds_what_it_did_before_it_was_a_member(tmp_path: Path) -> None:
    joined = Joined()
    found: list[tuple[Step, Contribution | None]] = []

    def look(steps: StageSteps, applied: Applied) -> None:
        roster = applied.result.roster
        assert joined.newcomer is not None
        if joined.newcomer.peer_id in roster.members:
            found.append((roster.step, roster.contribution_of(joined.newcomer.peer_id)))

    async def main() -> None:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(2, 2), wrap=joined.wrap) as swarm:
            await swarm.until_version(2)
            joined.newcomer = await swarm.add_peer(1)
            swarm.on_applied.append(look)
            await swarm.until(lambda: bool(found))

    asyncio.run(main())
    step, first = found[0]
    assert first is not None
    assert min(work.version for work in first.work) == step - 1  # it was a member from version `step` on


def test_who_joins_for_a_later_step_says_so_when_asked_and_gets_nothing_of_this_one() -> None:
    async def main() -> None:
        async with hop_line() as line:
            joining, member = line.peers[1]
            joining.gate.works_from = Step(STEP + 1)
            source = line.peers[0][0]
            for number in range(4):
                await line.send(number)
            assert (member.counters.microbatches, joining.counters.microbatches) == (4, 0)

            async def ask(step: Step) -> Message:
                request = Message({"birth": bytes(32), "step": step})
                return await source.transport.call(joining.peer_id, ROOM, request, timeout_s=5.0, max_body_bytes=0)

            assert (await ask(Step(STEP + 1))).meta["waits_s"] == 0
            with pytest.raises(TransientError, match="nor will be for step 0"):
                await ask(STEP)

    asyncio.run(main())
