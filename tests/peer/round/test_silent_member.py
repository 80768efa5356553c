"""A member that stands still breaks no call: its leader asks who has not reported for long, and others do its work.

A leader that answers every ping and begins no round: the others go on without it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import peer.round.presence
from peer.round.mail.mail import ROUND, RoundMail
from peer.round.presence import PING_FACTOR, Presence
from peer.round.step_progress import PROGRESS
from peer.round.taking import round_phase
from peer.stage.events import MemberBack, MemberGone
from peer.stage.tasks import Tasks
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.network.loop import happened
from swarm.network.transport import Handler, Message, TransportAround
from swarm.witness_service import WITNESS
from tests.swarm.test_witness_service import open_round
from tests.swarm_in_process import SwarmPeer, identity_of, manifest_of, swarm_in_process
from tests.verification.exhibits import small_settings

CALL_S, PING_S = 0.5, 0.2
SOON_S = 18.0
"""Two windows in which nothing of a transfer comes, and some; of the step's 60 s and the 20 s that an open call to a
neighbour lasts."""
IDLE = 1
IDLE_STEPS = 5
IDLE_DEADLINES = {"call_s": 0.5, "step_s": 0.6}


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

    @contextlib.asynccontextmanager
    async def answered(*_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def call(*_: Any, timeout_s: float, **__: Any) -> Any:
        await happened(goes_on, within_s=timeout_s)
        raise UnreachableError("no answer")

    transport: Any = member.transport
    assert callable(transport.answered)
    transport.answered, transport.call = answered, call


def test_a_step_goes_on_without_a_member_that_stands_still_with_work_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.round.presence, "PING_S", PING_S)
    manifest = manifest_of(optimizer={"total_steps": 100_000}, deadlines={"call_s": CALL_S, "step_s": 60.0})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 1)) as swarm:
            await swarm.until_version(2)
            victim = await swarm.first_of_stage(0, holds_work)
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
            async with asyncio.timeout(120.0):
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


def test_a_peer_opens_rounds_for_those_alone_who_live_in_the_stage_beside_it(tmp_path: Path) -> None:
    """A stranger's rounds filled the places of all, and the log in which the real ones stand."""

    async def main() -> None:
        manifest = manifest_of(optimizer={"total_steps": 100_000}, deadlines={"call_s": CALL_S})
        async with swarm_in_process(manifest, tmp_path, peers=(2, 1)) as swarm:
            await swarm.until_version(1, timeout_s=30.0)
            (voter,), leader = swarm.of_stage(1), swarm.of_stage(0)[0]
            await swarm.until(lambda: leader.peer_id in voter.daemon.at.neighbours.of_stage(0))
            stranger = swarm.network.transport(identity_of(77))
            with pytest.raises(TransientError, match="not known here to lead"):
                await open_round(stranger, voter.peer_id, swarm.run, stage=0, step=1)
            with pytest.raises(TransientError, match="too few members have turned"):
                await open_round(leader.transport, voter.peer_id, swarm.run, stage=0, step=1)

    asyncio.run(main())


class Idle(TransportAround):
    """Takes no report of what members have done, closes no step and asks for no votes."""

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def refused(sender: PeerId, request: Message) -> Message:
            raise RemoteError("protocol", "not now")

        self._inner.serve(method, refused if method == PROGRESS else handler, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        # A stage of two has voters outside it too, enough for a quorum without the other member.
        if method == WITNESS or (method == ROUND and request.meta.get("kind") in ("close", "ballot")):
            raise UnreachableError("it never gets there")
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


class Stingy(Idle):
    """Takes all reports, and has given everything to others."""

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def nothing(sender: PeerId, request: Message) -> Message:
            return Message({"granted": 0, "exhausted": True, "over": False})

        self._inner.serve(method, nothing if method == PROGRESS else handler, max_body_bytes=max_body_bytes)


def goes_on_without(folder: Path, kind: type[Idle], *, peers: tuple[int, int], stage: int) -> dict[str, Any]:
    """The report of a run in which one peer of the stage is such a one: it leads nothing."""
    manifest = manifest_of(
        optimizer={"total_steps": IDLE_STEPS},
        deadlines=IDLE_DEADLINES,
        limits={
            "founders_per_stage": 2
        },  # were it the only one, it would have all the votes, and lead with none to call
        batch={"target_tokens": 256},
    )
    led: set[PeerId] = set()

    async def main() -> dict[str, Any]:
        async with swarm_in_process(
            manifest,
            folder,
            peers=peers,
            wrap=lambda of, index, inner: kind(inner) if (of, index) == (stage, IDLE) else inner,
        ) as swarm:
            swarm.on_applied.append(lambda steps, applied: led.add(applied.result.leader))
            await swarm.until_version(IDLE_STEPS, timeout_s=40.0)
            assert swarm.of_stage(stage)[IDLE].peer_id not in led
            return await swarm.finished()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [Idle, Stingy])
def test_the_first_stage_goes_on_when_its_leader_gives_nobody_work(tmp_path: Path, kind: type[Idle]) -> None:
    """Who was given none had nothing to bring, and so nobody waited for a round: the run stood still for good."""
    goes_on_without(tmp_path, kind, peers=(4, 2), stage=0)


def test_a_stage_goes_on_when_its_leader_lives_and_begins_no_round(tmp_path: Path) -> None:
    report = goes_on_without(tmp_path, Idle, peers=(2, 4), stage=1)
    assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())


OTHER = PeerId("other")
STATE: Any = SimpleNamespace(
    step=Step(3),
    leader=OTHER,
    round=SimpleNamespace(view=1),
    view=1,
    progress=SimpleNamespace(lost=lambda peer: None),
    dirty=asyncio.Event(),
)
LONG_CALL_S = 100.0


class Silent:
    """A transport on which nobody answers."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.waited_s: list[float] = []
        self._meanwhile = meanwhile

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        self.waited_s.append(timeout_s)
        self._meanwhile()
        raise UnreachableError("no answer")


def presence_on(
    transport: Silent, tasks: Tasks | None = None, tell: Callable[[object], None] | None = None
) -> Presence:
    context = SimpleNamespace(
        transport=transport,
        settings=SimpleNamespace(deadlines=SimpleNamespace(call_s=LONG_CALL_S)),
        tasks=tasks,
        events=SimpleNamespace(publish=tell),
        me=PeerId("me"),
    )
    steps: Any = SimpleNamespace(
        context=context,
        may_join=lambda peer: True,
        is_open=lambda state: True,
        asks_no_more=lambda peer: None,
        version=3,
        chain=SimpleNamespace(stage=0),
    )
    return Presence(steps)


def test_a_member_of_which_something_comes_while_it_is_pinged_is_not_gone() -> None:
    """On a full line of 1 Mbit/s pings took longer than 2 s, and members were taken for lost while their parts came."""
    silent = Silent()
    alone = presence_on(silent)
    alone.heard_of(OTHER)
    assert asyncio.run(alone.is_gone(OTHER)), "that was before"
    heard: list[Presence] = []
    moving = presence_on(Silent(lambda: heard[0].heard_of(OTHER)))
    heard.append(moving)
    assert not asyncio.run(moving.is_gone(OTHER))


def test_a_ping_waits_as_long_as_small_calls_to_that_member_took() -> None:
    silent = Silent()
    presence = presence_on(silent)
    for _ in range(4):
        presence.answered(OTHER, within_s=0.01)
    asyncio.run(presence.is_gone(OTHER))
    assert silent.waited_s == [peer.round.presence.PING_S]
    for _ in range(60):
        presence.answered(OTHER, within_s=4.0)
    asyncio.run(presence.is_gone(OTHER))
    assert PING_FACTOR * 4.0 <= silent.waited_s[1] <= LONG_CALL_S


def test_a_member_for_which_something_waits_is_asked_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a line was cut, those at both its ends thought the others gone, and each waited for the others' word."""
    monkeypatch.setattr(peer.round.presence, "LOOK_AGAIN_S", 0.01)
    told: list[object] = []

    class Returning(Silent):
        async def call(
            self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
        ) -> Message:
            if len(self.waited_s) < 3:
                return await super().call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
            return Message({"stage": 0})

    async def main() -> None:
        silent, tasks = Returning(), Tasks(StageIndex(0))
        presence = presence_on(silent, tasks, told.append)
        presence.unreachable(STATE, OTHER)
        mail = RoundMail(presence._steps, presence)
        assert mail.waits_for(OTHER)
        assert mail.waits_for(OTHER), "one asks for all that waits"
        assert not mail.waits_for(PeerId("another"))
        async with asyncio.timeout(10.0):
            while presence.seems_gone(OTHER):
                await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=0.01)
        assert len(silent.waited_s) == 3
        assert not mail.waits_for(OTHER)
        await tasks.stop()

    asyncio.run(main())
    assert told == [MemberGone(STATE.step, OTHER), MemberBack(OTHER)]


def test_nobody_turns_to_the_next_leader_sooner_than_its_word_may_take() -> None:
    """After rounds of a second on fast lines members gave up leader after leader, whose words full lines held up."""
    settings = small_settings()
    phase = round_phase(settings, 1000)
    for _ in range(20):
        phase.observe(0.1)
    assert 4 * phase.seconds >= settings.deadlines.call_s
    assert phase.seconds < settings.deadlines.call_s
