"""What voters ask to see: drawn by each for itself, asked for once, handed on by a leader to who was shown none."""

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution
from swarm.core.round.voting import Certificate, Proof
from swarm.drawn_papers import (
    DISTRUSTED_STEPS,
    DRAWN,
    PAPERS,
    DrawnPapers,
    WithheldError,
    drawn_entries,
    read_asked,
)
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message, Transport
from tests.swarm.core.round.round_members import certificate_by, roster_of
from tests.swarm.core.round.round_world import contribution, facts_of, identity_of

FACTS = facts_of(4)
LEADER, VOTER, MAKER, OTHER = FACTS.members
WITHIN_S = 2.0


def shown(made: Contribution, entry: int, value: Value) -> bool:
    """An entry's papers are its number."""
    if value != entry:
        raise RemoteError("papers", f"{value} is shown for entry {entry}", made.peer_id)
    return True


@dataclass
class Desk:
    """A member that shows papers, but to those from whom it withholds them."""

    transport: Transport
    withholds_from: set[PeerId] = field(default_factory=set)
    answers: bool = True
    slow_s: float = 0.0
    asked: list[tuple[PeerId, PeerId, tuple[int, ...]]] = field(default_factory=list)
    lies: bool = False
    has_none: bool = False
    """For its own contribution."""
    drawn: DrawnPapers | None = None
    made: Contribution | None = None
    """Where it leads: what it asks votes for."""

    async def on_papers(self, sender: PeerId, request: Message) -> Message:
        fields, entries = read_asked(request)
        of = fields.peer("of")
        self.asked.append((sender, of, entries))
        await asyncio.sleep(self.slow_s if self.answers else 60.0)
        if sender in self.withholds_from:
            raise TransientError("not here")
        if of != self.transport.peer_id:
            assert self.drawn is not None
            assert self.made is not None
            return Message({"papers": await self.drawn.fetch(self.made, entries, of=of, within_s=0.5)})
        return Message({"papers": [None if self.has_none else entry + self.lies for entry in entries]})


class Scene:
    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(0))
        self.desks = {peer: Desk(self.network.transport(identity_of(peer))) for peer in FACTS.members}
        for desk in self.desks.values():
            desk.transport.serve(PAPERS, desk.on_papers, max_body_bytes=0)
        self.made = contribution(MAKER, num_work=40)
        self.papers = {peer: self.voter(peer) for peer in FACTS.members}
        self.desks[LEADER].drawn, self.desks[LEADER].made = self.papers[LEADER], self.made

    def voter(self, peer: PeerId, seed: int = 0) -> DrawnPapers:
        return DrawnPapers(self.desks[peer].transport, shown, random.Random(f"{peer}/{seed}"))

    def proposal(self) -> Proposal:
        roster = roster_of(FACTS, commits={MAKER: self.made})
        return Proposal.of_roster(replace(roster, certificate=None), Proof())

    async def vote(self) -> None:
        await self.papers[VOTER].check(self.proposal(), LEADER, num_members=4, within_s=WITHIN_S)


def test_draws_are_the_voters_own_and_cover_a_share_that_goes_by_the_number_of_members() -> None:
    made = contribution(MAKER, num_work=64)
    for num_members, each in ((2, 32), (5, 8), (17, 2), (33, 1), (64, 1)):
        found = drawn_entries(made, num_members=num_members, rng=random.Random(1))
        assert len(found) == each
        assert list(found) == sorted(set(found))
        assert each * (num_members - 1) <= max(DRAWN, num_members)
    assert drawn_entries(made, num_members=5, rng=random.Random(1)) != drawn_entries(
        made, num_members=5, rng=random.Random(2)
    )
    assert drawn_entries(contribution(MAKER, num_work=3), num_members=5, rng=random.Random(1)) == (0, 1, 2)


def test_what_was_shown_is_not_asked_for_again() -> None:
    async def play() -> None:
        scene = Scene()
        await scene.vote()
        await scene.vote()
        assert len(scene.desks[MAKER].asked) == 1

    asyncio.run(play())


def test_who_is_not_shown_papers_gets_them_through_the_leader() -> None:
    """Else whoever withholds its papers from as many voters as may lie, and does not vote itself, stops the round."""

    async def play() -> None:
        scene = Scene()
        scene.desks[MAKER].withholds_from = {VOTER}
        await scene.vote()
        (first,) = [asked for asked in scene.desks[MAKER].asked if asked[0] == VOTER]
        assert (LEADER, MAKER, first[2]) in scene.desks[MAKER].asked, "what the voter has drawn, and nothing else"

    asyncio.run(play())


@pytest.mark.parametrize("lies", [True, False])
def test_without_papers_there_is_no_vote(lies: bool) -> None:
    async def play() -> None:
        scene = Scene()
        maker = scene.desks[MAKER]
        maker.withholds_from, maker.lies = (set(), True) if lies else ({VOTER, LEADER}, False)
        with pytest.raises((TransientError, RemoteError)):
            await scene.vote()
        assert [of for _, of, _ in scene.desks[LEADER].asked] == [MAKER]

    asyncio.run(play())


@pytest.mark.parametrize("leader", [MAKER, LEADER])
def test_a_leader_that_says_it_has_no_papers_is_told_from_one_that_does_not_answer(leader: PeerId) -> None:
    async def play() -> None:
        scene = Scene()
        scene.desks[MAKER].has_none = True
        with pytest.raises(TransientError) as raised:
            await scene.papers[VOTER].check(scene.proposal(), leader, num_members=4, within_s=WITHIN_S)
        assert isinstance(raised.value, WithheldError) == (leader == MAKER)
        scene.desks[MAKER].answers = False
        with pytest.raises(TransientError) as raised:
            await scene.papers[OTHER].check(scene.proposal(), MAKER, num_members=4, within_s=0.2)
        assert not isinstance(raised.value, WithheldError)

    asyncio.run(play())


def test_who_does_not_answer_is_waited_for_and_for_a_while_after_that_less() -> None:
    async def play() -> None:
        scene = Scene()
        scene.desks[MAKER].answers = False
        loop = asyncio.get_running_loop()
        waits = []
        for _ in range(2):
            before = loop.time()
            assert await scene.papers[VOTER].lack(scene.made, num_members=4, within_s=1.0) is not None
            waits.append(loop.time() - before)
        assert waits[0] >= 1.0 > 2 * waits[1]
        assert DISTRUSTED_STEPS > 0

    asyncio.run(play())


def test_who_was_late_once_has_its_whole_time_again_though_it_was_late_in_an_eighth_of_it() -> None:
    """Papers of a home's full line take more than that, in every step."""

    async def play() -> None:
        scene, number = Scene(), int(FACTS.step)
        maker, voter = scene.desks[MAKER], scene.papers[VOTER]
        maker.slow_s = 0.3
        for step, within_s, is_shown in ((0, 0.2, False), (4, 0.8, False), (8, 0.8, False), (9, 0.8, True)):
            made = replace(contribution(MAKER, num_work=40), step=Step(number + step))
            lack = await voter.lack(made, num_members=4, within_s=within_s)
            assert (lack is None) == is_shown, step

    asyncio.run(play())


def test_who_leads_has_its_whole_time_always() -> None:
    """A stage of one is led by nobody else, and it holds up no other's round."""

    async def play() -> None:
        scene = Scene()
        maker, voter = scene.desks[MAKER], scene.papers[VOTER]
        maker.answers = False
        assert await voter.lack(scene.made, num_members=4, within_s=0.1) is not None
        maker.answers, maker.slow_s = True, 0.3
        await voter.check(scene.proposal(), MAKER, num_members=4, within_s=0.8)
        assert [of for _, of, _ in scene.desks[LEADER].asked] == []

    asyncio.run(play())


def test_a_roster_that_was_certified_before_is_not_looked_at_again() -> None:
    async def play() -> None:
        scene = Scene()
        scene.desks[MAKER].answers = False
        again = replace(scene.proposal(), proof=Proof((), _any_certificate()))
        await scene.papers[VOTER].check(again, LEADER, num_members=4, within_s=WITHIN_S)

    asyncio.run(play())


def test_signers_who_are_not_known_yet_are_waited_for() -> None:
    async def play() -> None:
        scene = Scene()
        seen: list[int] = []

        def known_later(made: Contribution, entry: int, value: Value) -> bool:
            seen.append(entry)
            return len(seen) > 3

        voter = DrawnPapers(scene.desks[VOTER].transport, known_later, random.Random(0))
        assert await voter.lack(scene.made, num_members=4, within_s=WITHIN_S) is None
        stranger = DrawnPapers(scene.desks[VOTER].transport, lambda made, entry, value: False, random.Random(0))
        assert await stranger.lack(scene.made, num_members=4, within_s=0.2) is not None

    asyncio.run(play())


@pytest.mark.parametrize("entries", [[], [3, 3], [4, 3], list(range(DRAWN + 1)), [1 << 20], [-1], ["1"]])
def test_a_malformed_request_is_refused(entries: list[Value]) -> None:
    with pytest.raises(RemoteError):
        read_asked(Message({"stage": 0, "step": 0, "of": MAKER, "entries": entries}))
    fields, found = read_asked(Message({"entries": [1, 2]}))
    assert isinstance(fields, Fields)
    assert found == (1, 2)


def _any_certificate() -> Certificate:
    return certificate_by(FACTS, "roster", 0, bytes(32))
