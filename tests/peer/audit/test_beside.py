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
from peer.audit.hops import HopAudits, StepDue, in_turns
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Contribution
from swarm.network.transport import Message
from tests.peer.audit.test_inquiry import DUE, Line, inquiry_of
from tests.swarm.core.audit.chances import NO_CHANCE
from tests.verification.exhibits import RUN_ID, SmallRun, received, sent, small_settings, work_of
from verification.audit.tolerance import Bounds, Comparison, compare
from verification.pipeline.exchanges import Exchange
from verification.pipeline.hop_claim import HopClaim
from verification.round.papers import Exhibit

BEFORE, OTHER, AFTER, LIAR = PeerId("before"), PeerId("other"), PeerId("after"), PeerId("liar")


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

    def beside(self, stage: int, line: Line) -> Beside:
        """Of an auditor of the stage, among those who answer."""
        shown = self.exhibits[stage]

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
        live = {stage - 1: {BEFORE, OTHER} & {*line.answers}, stage + 1: {AFTER} & {*line.answers}}
        return Beside(inquiry, live.__getitem__)

    def put_together(self, stage: int, answers: dict[PeerId, Message | Exception]) -> Exhibit:
        """The stage's exhibit, by an auditor of it."""
        shown, line = self.exhibits[stage], Line(answers)
        work = work_of(shown.papers, Version(0))
        maker = self.run.peers[stage][0].peer_id
        facts: Any = (RUN_ID, StageIndex(stage), DUE.step, bytes(32), maker, (work,), (), NO_CHANCE)
        made = Contribution(*facts, signature=bytes(64))
        found = asyncio.run(self.beside(stage, line).exhibit(DUE, made, work))
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


# -- what is forged ---------------------------------------------------------------------------------------


def forgeries(true: Exchange) -> dict[str, Exchange]:
    """Of an exchange, what whoever shows it can make of it: under nobody's signature, or of something else."""
    body = bytes(len(true.activation))
    other = replace(true.birth, microbatch_id=MicrobatchId(5))
    header = true.gradient
    assert header is not None
    return {
        "another body": replace(true, activation=body),
        "another answer": replace(true, answer=bytes(len(true.answer))),
        "another digest": replace(true, forward=replace(true.forward, body_digest=bulk_digest(body)), activation=body),
        "another gradient": replace(true, gradient=replace(header, signature=bytes(64))),
        "another microbatch": replace(true, birth=other, forward=replace(true.forward, microbatch_id=MicrobatchId(5))),
        "another birth": replace(true, birth=replace(true.birth, step=Step(1))),
        "another target": replace(true, forward=replace(true.forward, consumer=OTHER)),
    }


@pytest.mark.parametrize("kind", sorted(forgeries(sent(World().exhibits[0]))))
def test_nothing_follows_from_what_nobody_signed_or_what_is_of_something_else(world: World, kind: str) -> None:
    true = sent(world.exhibits[0])
    forged, target = forgeries(true)[kind], world.run.peers[1][0].peer_id
    line = Line({BEFORE: message_of([forged, true]), OTHER: message_of([forged])})
    beside = world.beside(1, line)

    async def main() -> None:
        assert await beside.exchanges(BEFORE, DUE, target, MicrobatchId(0)) == (true,)
        assert await beside.exchanges(OTHER, DUE, target, MicrobatchId(0)) == ()

    asyncio.run(main())
    assert beside.show_nothing == {OTHER}


def test_an_entry_is_put_together_though_one_of_its_neighbours_forges(world: World) -> None:
    true = sent(world.exhibits[0])
    forged = forgeries(true)["another body"]
    answers = {BEFORE: message_of([forged]), OTHER: message_of([true])}
    assert world.put_together(1, world.neighbours(1) | answers).papers == world.exhibits[1].papers


def test_a_microbatch_is_audited_whatever_another_neighbour_forges(world: World) -> None:
    before, after = sent(world.exhibits[0]), received(world.exhibits[2])
    fakes = [*forgeries(after).values()]
    line = Line({BEFORE: message_of([before]), OTHER: message_of([*forgeries(before).values()])})
    line.answers[AFTER] = message_of([after])
    line.answers[LIAR] = message_of([*fakes, replace(fakes[0], forward=replace(fakes[0].forward, consumer=LIAR))])
    beside = world.beside(1, line)
    audits, target = HopAudits(beside._inquiry, beside), world.run.peers[1][0].peer_id
    due = StepDue(before.birth.step, (target,), (), DUE.reveal)
    compared: list[HopClaim] = []

    def same(claim: HopClaim) -> Comparison:
        compared.append(claim)
        return compare(np.float32([1.0]), np.float32([1.0]), Bounds(floor=0.1, fraud=0.5))

    audits._compare = same  # type: ignore[method-assign]
    holders = [(BEFORE, -1), (OTHER, -1), (LIAR, 1), (AFTER, 1)]
    asyncio.run(audits._audit(due, target, MicrobatchId(0), holders))
    assert sorted(claim.header.direction for claim in compared) == ["forward", "gradient"]
    assert beside._inquiry.counters.hops == 1


def test_who_lists_what_never_was_displaces_nothing_of_others() -> None:
    a, b, target = (BEFORE, -1), (AFTER, 1), PeerId("target")
    fakes, true = [[(target, MicrobatchId(start + n)) for n in range(3)] for start in (0, 10)]
    holders = {hit: [a] for hit in fakes} | {hit: [b] for hit in true}
    assert in_turns(holders, last=set()) == [true[0], fakes[0], true[1], fakes[1], true[2], fakes[2]]
    assert in_turns(holders, last={BEFORE}) == [*true, *fakes]
    holders[true[2]] = [a, b]
    assert in_turns(holders, last=set())[0] == true[2]
    assert sorted(in_turns(holders, last={AFTER})) == sorted(holders)
