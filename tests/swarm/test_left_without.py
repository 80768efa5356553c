"""Before a member votes for a roster without others it asks those: who is there is named, who only says so holds it up
for as long as an honest leader would wait, and once in a while."""

import asyncio
import random
from dataclasses import replace

import pytest

import swarm.left_without
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import AGAIN_PHASES, AveragingRound
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution
from swarm.core.round.instructions import SayThere, SendClose, SendVote
from swarm.core.round.voting import Proof
from swarm.drawn_papers import DISTRUSTED_STEPS, PAPERS, DrawnPapers
from swarm.left_without import LEFT_WITHOUT, TIME_PHASES, LeftWithout
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.peer.round.test_joiners import Clock
from tests.swarm.core.round.round_members import (
    certified,
    closed,
    facts_and_rounds,
    has,
    only,
    proof_by,
    result_of,
    roster_of,
    witnesses_of,
)
from tests.swarm.core.round.round_world import PHASE_S, contribution, identity_of
from tests.swarm.core.round.test_not_on_roster import proposed

PAPERS_S = 0.2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.1)
    monkeypatch.setattr(swarm.left_without, "time", clock)
    return clock


class Asking:
    """A member of four that was asked to contribute at 0 s, and the third, without which a roster is proposed."""

    def __init__(self) -> None:
        self.network = network = MemoryNetwork(random.Random(0))
        self.facts, (self.leader, self.me, self.third, self.fourth) = facts_and_rounds(4)
        transport = network.transport(identity_of(self.me.me))
        self.line = network.transport(identity_of(self.third.me))
        papers = DrawnPapers(transport, lambda made, entry, value: True, random.Random(0))
        self.may_join = {*self.facts.members}
        self.looks = LeftWithout(transport, papers, lambda peer: peer in self.may_join, call_s=1.0)
        self.num_asked = self.num_shown = 0
        committed(self.me, self.leader.me)
        others = [peer for peer in self.facts.members if peer != self.third.me]
        self.asked = proposed(roster_of(self.facts, commits={peer: contribution(peer) for peer in others}))

    def answers(self, made: Contribution | None, *, shows: bool = True, idle: bool = False) -> None:
        async def on_left_without(sender: PeerId, request: Message) -> Message:
            is_shown = request.meta["proposal"] is not None
            assert not is_shown or made is None, "the roster may be long, and nobody else needs it"
            self.num_asked += not is_shown
            self.num_shown += is_shown
            said: dict[str, Value] = {"brings_nothing": idle, "made": made.packed if made is not None else None}
            return Message(said)

        self.line.serve(LEFT_WITHOUT, on_left_without, max_body_bytes=0)
        self.line.serve(PAPERS, shown if shows else withheld, max_body_bytes=0)

    async def found(self, asked: Proposal | None = None) -> tuple[Contribution, ...]:
        return await self.looks.are_there(self.me, asked or self.asked, papers_s=PAPERS_S)


async def shown(sender: PeerId, request: Message) -> Message:
    return Message({"papers": [b""]})


async def withheld(sender: PeerId, request: Message) -> Message:
    return Message({"papers": [None]})


def committed(machine: AveragingRound, leader: PeerId) -> None:
    machine.on_close(leader, machine.facts.first_view, Proof(), now=0.0)
    machine.contributed(contribution(machine.me), now=0.0)


@pytest.mark.parametrize("num_work", [0, 1])
def test_who_is_there_is_named_with_its_contribution(num_work: int) -> None:
    async def scenario() -> None:
        world = Asking()
        made = contribution(world.third.me, num_work=num_work)
        world.answers(made)
        assert await world.found() == (made,)
        kept = proposed(roster_of(world.facts))
        assert await world.found(kept) == ()
        assert world.num_asked == 1, "nobody is asked who is on the roster"

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["gone", "no papers", "may not join", "forged"])
def test_who_cannot_be_on_the_roster_is_not_named(why: str, clock: Clock) -> None:
    async def scenario() -> None:
        world = Asking()
        made = contribution(world.third.me if why != "forged" else world.fourth.me)
        world.answers(made, shows=why != "no papers")
        if why == "gone":
            await world.line.close()
        if why == "may not join":
            world.may_join.remove(world.third.me)
        if why == "forged":  # it is there, and shows another's
            with pytest.raises(TransientError, match="is there"):
                await world.found()
        else:
            assert await world.found() == ()

    asyncio.run(scenario())


def test_who_has_yet_to_contribute_has_its_time_and_is_not_asked_for_a_while(
    clock: Clock,
) -> None:
    async def scenario() -> None:
        world = Asking()
        world.answers(None)
        for clock.now in (7.0, 6.99 + TIME_PHASES * PHASE_S):
            with pytest.raises(TransientError, match="is there"):
                await world.found()
        clock.now = 7.0 + TIME_PHASES * PHASE_S
        assert await world.found() == ()
        assert await world.found() == ()
        assert world.num_asked == world.num_shown == 3, "its leader may never have called it"
        world.looks._in_vain.steps[world.third.me] = int(world.facts.step) - DISTRUSTED_STEPS - 1
        assert await world.found() == ()
        assert world.num_asked == 4

    asyncio.run(scenario())


def test_who_says_itself_that_it_brings_nothing_is_asked_again(clock: Clock) -> None:
    """As one that was started again does: it may be put off by the next leader, and then be there."""

    async def scenario() -> None:
        world = Asking()
        world.answers(None, idle=True)
        assert await world.found() == ()
        world.answers(contribution(world.third.me))
        assert await world.found()

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["gone", "no papers"])
def test_who_does_not_answer_or_shows_no_papers_is_not_asked_for_a_while(why: str) -> None:
    async def scenario() -> None:
        world = Asking()
        world.answers(contribution(world.third.me), shows=False)
        if why == "gone":
            await world.line.close()
        assert await world.found() == ()
        assert world.looks._in_vain.names(world.third.me, world.facts.step)

    asyncio.run(scenario())


def test_who_has_yet_to_contribute_is_asked_again_though_another_is_there(clock: Clock) -> None:
    async def scenario() -> None:
        world = Asking()
        world.answers(None)
        world.me.on_contribution(world.fourth.me, contribution(world.fourth.me))
        world.network.transport(identity_of(world.fourth.me)).serve(PAPERS, shown, max_body_bytes=0)
        mine = {peer: contribution(peer) for peer in (world.leader.me, world.me.me)}
        asked = proposed(roster_of(world.facts, commits=mine))
        assert await world.found(asked) == (contribution(world.fourth.me),)
        world.answers(contribution(world.third.me))
        assert {made.peer_id for made in await world.found(asked)} == {world.third.me, world.fourth.me}

    asyncio.run(scenario())


def test_whose_contribution_is_known_is_not_asked_for_it() -> None:
    async def scenario() -> None:
        world = Asking()
        world.answers(None)
        world.me.on_contribution(world.third.me, contribution(world.third.me))
        assert await world.found() == (contribution(world.third.me),)
        assert world.num_asked == 0

    asyncio.run(scenario())


def test_for_whom_a_leader_has_no_papers_it_is_asked_for_the_same_and_once() -> None:
    async def scenario() -> None:
        world = Asking()
        made = contribution(world.third.me)
        world.answers(made)
        named = SayThere(world.leader.me, made, world.asked)
        assert await world.looks.shows(named, (0,), within_s=PAPERS_S)
        world.answers(made, shows=False)
        assert await world.looks.shows(named, (0,), within_s=PAPERS_S), "a leader that says so again asks for nothing"
        assert await world.looks.shows(replace(named, to=world.fourth.me), (1,), within_s=PAPERS_S), (
            "it has no such entry"
        )
        assert world.looks._papers.lacks(made) == ()
        assert not await world.looks.shows(replace(named, to=world.fourth.me), (0,), within_s=PAPERS_S)
        assert world.looks._papers.lacks(made) == (0,)
        assert await world.found() == ()

    asyncio.run(scenario())


def test_of_whom_leaders_are_told_in_vain_of_whom_one_is_honest_hides_from_them_and_is_not_asked_for_a_while() -> None:
    async def scenario() -> None:
        world = Asking()
        world.answers(contribution(world.third.me))
        step, facts = int(world.facts.step), world.facts
        leaders = (world.leader.me, world.fourth.me)
        world.me.told = {leader: {world.third.me: (0, 0.1)} for leader in leaders}
        for ends, is_named in ((world.leader.me, True), (world.me.me, False)):
            outcome = certified(facts, result_of(facts, roster_of(facts), leader=ends))
            world.looks.ended(world.me, replace(outcome, roster=replace(outcome.roster, leader=ends)))
            assert bool(await world.found()) == is_named
        world.looks._told_by[world.third.me].steps[world.fourth.me] = step - DISTRUSTED_STEPS - 1
        assert await world.found()

    asyncio.run(scenario())


# -- what the member does with it ------------------------------------------------------------------------------


def test_a_leader_is_told_once_and_if_it_goes_on_without_them_the_next_is_turned_to() -> None:
    world = Asking()
    third, facts, leader = contribution(world.third.me), world.facts, world.leader.me
    said = only(world.me.on_ballot(leader, world.asked, there=(third,), now=0.1), SayThere)
    assert said == SayThere(leader, third, world.asked)
    own = 4
    assert facts.leader_of(own) == leader
    mine = {peer: contribution(peer) for peer in (leader, world.me.me)}
    again = proposed(roster_of(facts, view=own, commits=mine), proof_by(facts, own))
    fourth, later = contribution(world.fourth.me), 0.1 + AGAIN_PHASES * PHASE_S
    assert has(world.me.on_ballot(leader, again, there=(third,), now=0.2), SayThere), "the first word is on its way"
    assert has(world.me.on_ballot(leader, again, there=(fourth,), now=later), SayThere), (
        "nobody has told it of that one"
    )
    turned = world.me.on_ballot(leader, again, there=(third, fourth), now=later)
    assert not has(turned, SendVote)
    assert world.me.view > own
    assert {*world.me.told} == {leader}


def test_once_an_honest_leader_was_told_of_a_member_it_is_voted_without_it() -> None:
    """One who shows itself to some and not to others must not undo all views."""
    world = Asking()
    there, facts = (contribution(world.third.me),), world.facts
    others = {peer: contribution(peer) for peer in facts.members if peer != world.third.me}
    told = []
    for view in range(12):
        leader = facts.leader_of(view)
        if leader in (world.me.me, world.third.me):
            continue
        asked = proposed(roster_of(facts, view=view, commits=others), proof_by(facts, view) if view else None)
        assert world.me.unheard(asked) == {world.third.me}, "one of four may lie"
        told += [one.to for one in world.me.on_ballot(leader, asked, there=there, now=0.1) if isinstance(one, SayThere)]
    assert {*told} == {world.leader.me, world.fourth.me}
    asked = proposed(roster_of(facts, view=14, commits=others), proof_by(facts, 14))
    assert facts.leader_of(14) == world.third.me
    assert world.me.unheard(replace(asked)) == set()


def test_a_leader_takes_whom_more_than_a_third_name_with_it_and_no_one_members_word() -> None:
    facts, (leader, *others) = facts_and_rounds(7, witnesses=1)
    missing, *there = (machine.me for machine in others)
    asked = closed(leader, there)
    assert asked.put_off == {missing}
    made = contribution(missing)
    assert leader.on_named(there[0], made, now=0.1) == []
    assert leader.on_named(there[0], made, now=0.1) == [], "it said so before"
    view = only(leader.on_named(there[1], made, now=0.1), SendClose).view
    assert facts.leader_of(view) == leader.me
    with pytest.raises(RemoteError, match="not signed"):
        leader.on_named(there[0], replace(made, signature=bytes(64)), now=0.1)
    with pytest.raises(RemoteError, match="no member"):
        leader.on_named(witnesses_of(facts)[0], made, now=0.1)


def test_who_is_gone_or_has_said_that_it_brings_nothing_is_not_asked() -> None:
    facts, (leader, me, third, _) = facts_and_rounds(4)
    committed(me, leader.me)
    idle = {peer: contribution(peer) for peer in facts.members} | {third.me: contribution(third.me, num_work=0)}
    asked = proposed(roster_of(facts, commits=idle))
    assert me.unheard(asked) == {third.me}
    me.on_contribution(third.me, idle[third.me])
    assert me.unheard(asked) == set()
    put_off = proposed(roster_of(facts, commits={peer: one for peer, one in idle.items() if peer != third.me}))
    assert me.unheard(put_off) == {third.me}
    me.unreachable(third.me, now=0.1)
    assert me.unheard(put_off) == set()
