"""An entry of a contribution is put together from what its maker's neighbours show, whatever the maker does."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peer.audit.beside import Beside
from peer.audit.hop_desk import message_of
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Version
from swarm.core.round.contribution import Contribution
from swarm.network.transport import Message
from tests.peer.audit.test_inquiry import DUE, Line, inquiry_of
from tests.swarm.core.audit.chances import NO_CHANCE
from tests.verification.exhibits import RUN_ID, SmallRun, received, sent, small_settings, work_of
from verification.round.papers import Exhibit

BEFORE, OTHER, AFTER = PeerId("before"), PeerId("other"), PeerId("after")


class World:
    """A microbatch that has passed through three stages."""

    def __init__(self) -> None:
        self.run = SmallRun(small_settings(3))
        self.exhibits = self.run.microbatch(0)

    def neighbours(self, stage: int) -> dict[PeerId, Message | Exception]:
        """What honest ones answer; one of two before the stage was not in it."""
        answers: dict[PeerId, Message | Exception] = {}
        if stage > 0:
            answers |= {BEFORE: message_of([sent(self.exhibits[stage - 1])]), OTHER: TransientError("not here")}
        if stage < 2:
            answers[AFTER] = message_of([received(self.exhibits[stage + 1])])
        return answers

    def put_together(self, stage: int, answers: dict[PeerId, Message | Exception]) -> Exhibit:
        """The stage's exhibit, by an auditor of it."""
        shown, line = self.exhibits[stage], Line(answers)

        async def batch(number: MicrobatchId) -> Any:
            return (np.frombuffer(shown.x, dtype="<i4"),)

        inquiry = inquiry_of(
            line,
            tokens=SimpleNamespace(batch=batch) if stage == 0 else None,
            settings=self.run.settings,
            run_id=RUN_ID,
            chain=SimpleNamespace(stage=stage),
            replica=self.run.replicas[stage][0],
        )
        work = work_of(shown.papers, Version(0))
        maker = self.run.peers[stage][0].peer_id
        facts: Any = (RUN_ID, StageIndex(stage), DUE.step, bytes(32), maker, (work,), (), NO_CHANCE)
        made = Contribution(*facts, signature=bytes(64))
        live = {stage - 1: {BEFORE, OTHER} & {*answers}, stage + 1: {AFTER} & {*answers}}
        found = asyncio.run(Beside(inquiry, live.__getitem__).exhibit(DUE, made, work))
        assert {peer for peer, _, _ in line.asked} == {*answers}
        assert all(meta["contribution"] == made.to_value() for _, _, meta in line.asked)
        return found


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_neighbours_show_what_the_maker_would(world: World, stage: int) -> None:
    found, shown = world.put_together(stage, world.neighbours(stage)), world.exhibits[stage]
    assert found.papers == shown.papers
    assert [bytes(body) for body in found.bodies] == [bytes(body) for body in shown.bodies]


def unanswered(world: World) -> Message:
    return message_of([replace(sent(world.exhibits[0]), gradient=None, answer=b"")])


@pytest.mark.parametrize(
    "said", [lambda world: RemoteError("draw", "no"), lambda world: Message({"exchanges": []}), unanswered]
)
def test_an_entry_of_which_a_side_shows_nothing_is_not_there(
    world: World, said: Callable[[World], Message | Exception]
) -> None:
    with pytest.raises(TransientError, match="not with its neighbours"):
        world.put_together(1, world.neighbours(1) | {BEFORE: said(world)})
