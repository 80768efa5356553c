"""A stage's steps agree with themselves between any two changes; what contradicts itself is found and said."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peer.round.stage_steps import StageSteps
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis, StageChain
from tests.swarm.core.audit.chances import HOST_CHAIN
from tests.swarm.core.round.round_world import identities
from tests.verification.exhibits import small_settings

STAGE = StageIndex(1)
MEMBERS = tuple(sorted(identity.peer_id for identity in identities(2)))
STRANGER = PeerId("stranger")


class Replica:
    """Weights that are nothing but a version."""

    stage, era = STAGE, 0
    model = SimpleNamespace(is_first=False, is_last=True)

    def __init__(self) -> None:
        self.version = Version(0)

    def swap(self, new: Any) -> None:
        self.version = Version(self.version + 1)

    def num_done(self, step: Step) -> int:
        return 0


def chain_of(settings: Any, *, version: int = 0) -> StageChain:
    genesis = Genesis(
        run_id="run",
        stage=STAGE,
        version=Version(version),
        state_digest=bytes(32),
        members=MEMBERS,
        leases=LeaseTable(),
        host=MEMBERS[0],
        run_key=MEMBERS[0],
        neighbours=(),
        host_chain_end=HOST_CHAIN.end,
    )
    return StageChain.begin(genesis, settings)


def steps_of() -> StageSteps:
    settings = small_settings()
    context: Any = SimpleNamespace(
        settings=settings, me=MEMBERS[0], tasks=SimpleNamespace(is_stopped=False), snapshots={}
    )
    replica: Any = Replica()
    made = StageSteps(context, replica, chain_of(settings), may_join=lambda peer: peer != STRANGER)
    made.open_those_due()
    made.announce_version()
    return made


def turned(steps: StageSteps) -> None:
    new: Any = None
    steps.turn(new, replace(steps.chain, version=Version(steps.version + 1)))


def run(play: Callable[[StageSteps], None]) -> None:
    async def main() -> None:
        play(steps_of())

    asyncio.run(main())


def test_steps_of_the_version_are_open_and_those_before_it_are_not() -> None:
    def play(steps: StageSteps) -> None:
        first = list(steps.open)
        assert first[0] == 0
        assert len(first) == 1 + (steps.context.settings.delay_at(1) > 0)
        turned(steps)
        (over,) = steps.close_those_over()
        assert over.step == 0
        assert [state.step for state in steps.open_those_due()] == [first[-1] + 1]
        steps.announce_version()

    run(play)


def test_no_step_is_open_beyond_the_eras_end_and_a_later_end_opens_it_again() -> None:
    def play(steps: StageSteps) -> None:
        turned(steps)
        steps.close_those_over()
        steps.open_those_due()
        steps.announce_version()
        first, *_ = steps.end_at(1)
        assert first.step == 1
        assert (steps.open, steps.is_over, steps.is_run_over) == ({}, True, False)
        assert not steps.open_those_due()
        steps.validate()
        assert not steps.end_at(2)
        assert [int(state.step) for state in steps.open_those_due()] == [1]
        assert not steps.is_over
        steps.end_at(1 << 30)
        assert steps.ends_at == steps.context.settings.optimizer.total_steps

    run(play)


def test_a_version_that_takes_anothers_place_is_no_contradiction_until_it_is_announced() -> None:
    def play(steps: StageSteps) -> None:
        turned(steps)
        steps.validate()
        with pytest.raises(AssertionError, match="step 0 is open, only"):
            steps.announce_version()

    run(play)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda steps: setattr(steps.replica, "version", Version(3)), "at version 0: weights of version 3"),
        (lambda steps: setattr(steps.replica, "era", 2), "weights of era 2, not 0"),
        (lambda steps: setattr(steps.replica, "stage", 0), "weights of stage 0"),
        (lambda steps: steps.joining.add(MEMBERS[1]), "members ask to become members"),
        (lambda steps: steps.open.update({Step(7): steps.open[Step(0)]}), "step 7 is open, only"),
        (lambda steps: setattr(steps.open[Step(0)], "step", Step(1)), "the state of step 1 is kept as that of 0"),
        (lambda steps: setattr(steps.open[Step(0)].grants, "step", Step(1)), "grants are of another step"),
        (lambda steps: setattr(steps.open[Step(0)], "closed_at", 1.0), "step 0: closed without a round"),
        (lambda steps: steps.open[Step(0)].grants.passed_on.add(MicrobatchId(3)), "passed on is not in flight"),
        (lambda steps: steps.open[Step(0)].parts.own.append(memoryview(b"")), "a sum that was never closed"),
        (lambda steps: steps.open[Step(0)].parts.received.update({(0, MEMBERS[1]): b""}), "without a round"),
    ],
)
def test_what_contradicts_itself_is_found(plant: Callable[[StageSteps], None], said: str) -> None:
    def play(steps: StageSteps) -> None:
        plant(steps)
        with pytest.raises(AssertionError, match=said):
            steps.validate()

    run(play)


def test_whoever_waits_for_a_version_or_a_step_is_woken_by_it() -> None:
    async def main() -> None:
        steps = steps_of()
        waits = asyncio.ensure_future(steps.wait_for_version(1, timeout_s=5.0))
        last = Step(max(steps.open) + 1)
        state = asyncio.ensure_future(steps.step_state(last))
        await asyncio.sleep(0.01)
        turned(steps)
        steps.close_those_over()
        (made,) = steps.open_those_due()
        steps.announce_version()
        assert await waits
        assert await state is made
        with pytest.raises(TransientError, match="step 0 is not open here: version 1"):
            await steps.step_state(Step(0))
        assert not await steps.wait_for_version(2, timeout_s=0.01)

    asyncio.run(main())


def test_who_asks_to_join_waits_for_the_next_roster_unless_it_is_a_member() -> None:
    def play(steps: StageSteps) -> None:
        for peer in (*MEMBERS, STRANGER):
            steps.asks_to_join(peer)
        assert steps.joining == {STRANGER}
        assert steps.next_to_join() == 1
        steps.asks_no_more(STRANGER)
        assert not steps.joining

    run(play)


def test_what_is_meant_for_another_stage_is_refused() -> None:
    def play(steps: StageSteps) -> None:
        steps.check_stage(STRANGER, STAGE)
        with pytest.raises(RemoteError, match="this peer serves stage 1"):
            steps.check_stage(STRANGER, 0)

    run(play)
