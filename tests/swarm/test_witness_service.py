"""A witness opens rounds for those who may lead them, so many for each; and votes once in each, forgotten or not."""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import swarm.witness_service
from bootstrap.state.run_folder import PreparedRun
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.ballots import Proposal
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Contribution, Work
from swarm.core.round.facts import RoundFacts
from swarm.core.round.instructions import AskPromise, SendBallot
from swarm.core.round.proposal import fresh_roster
from swarm.core.round.voting import Certificate, Promise, Proof, Vote
from swarm.drawn_papers import DISTRUSTED_SHARE, DrawnPapers
from swarm.left_without import LEFT_WITHOUT, is_outsiders_to_ask
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message, Transport
from swarm.witness_service import (
    LONGEST_HOLD_S,
    MAX_ROUNDS_OF_ONE,
    AreThere,
    VoteLog,
    WitnessService,
    ask_witness,
)
from tests.peer.round.test_joiners import Clock
from tests.swarm.core.audit.chances import HOST_CHAIN, UNSAID, chance_of, link_of, said_by
from tests.swarm_in_process import identity_of

STAGE = StageIndex(0)
WITNESS, HOST, RUN_KEY = map(identity_of, (90, 91, 92))
KEYS = {identity.peer_id: identity for identity in map(identity_of, range(5))}
MEMBERS, BESIDE = tuple(sorted(list(KEYS)[:3])), tuple(sorted((*list(KEYS)[3:], WITNESS.peer_id)))
"""All but the witness and the host are in one hand, and are a quorum: whoever makes a basis up names whom it likes."""


def basis_of(number: int) -> RoundBasis:
    """One of as many as anybody likes."""
    work, links = (8,) * len(MEMBERS), (None,) * len(MEMBERS)
    return RoundBasis(bytes(32), number.to_bytes(32, "big"), MEMBERS, work, MEMBERS, work, BESIDE, links, UNSAID)


def facts_of(basis: RoundBasis, step: int) -> RoundFacts:
    names = {"run_id": "run", "host": HOST.peer_id, "run_key": RUN_KEY.peer_id}
    return RoundFacts.of_basis(basis, stage=STAGE, step=Step(step), num_parts=1, phase_s=1.0, **names)


def commit_of(facts: RoundFacts) -> SendBallot:
    """The last ballot of a round of which the witness saw no other: it gives no vote."""
    value, votes = bytes(32), []
    for peer in sorted(KEYS):
        votes.append(Vote(peer, KEYS[peer].sign(facts.election.ballot("result", 0, value))))
    return SendBallot((WITNESS.peer_id,), Proposal.of_commit(Certificate("result", 0, value, tuple(votes))))


class World:
    """A witness, and whom it takes for leaders."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork(random.Random(0))
        transport = self.network.transport(WITNESS)
        self.lines = {peer: self.network.transport(key) for peer, key in KEYS.items()}
        self.may_lead: set[PeerId] = {*MEMBERS}
        self.lowest = 0
        """Step that the stage is at, as far as the witness knows."""
        self.path = folder / "voted.log"
        self.service = WitnessService(
            *("run", WITNESS, HOST.peer_id, RUN_KEY.peer_id, VoteLog(self.path)),
            lambda peer, stage: True,
            lambda peer: True,
            lambda peer, stage, step, name: peer in self.may_lead and step >= self.lowest,
            num_parts=[1],
            papers=DrawnPapers(transport, lambda made, entry, value: None, random.Random(0)),
        )
        self.service.serve(transport)

    async def commit(self, number: int, step: int) -> None:
        """A round of the step is brought with its last ballot, by who leads it."""
        basis = basis_of(number)
        facts = facts_of(basis, step)
        line = self.lines[facts.leader_of(0)]
        found = await ask_witness(line, WITNESS.peer_id, facts, basis, commit_of(facts), timeout_s=5.0)
        assert found is None, "it voted"

    async def forget_the_first(self) -> None:
        """The witness' round of step 7, for those of later steps."""
        first = next(iter(self.service._rounds))
        for step in range(8, 16):
            self.lowest = step
            await self.commit(step, step)
        assert first not in self.service._rounds
        self.lowest = 7

    async def commits(self, numbers: Iterable[int], step: int) -> None:
        for number in numbers:
            await self.commit(number, step)

    async def promise(self, number: int, step: int, view: int) -> Promise | None:
        """For the leader of a view, which all members have turned to."""
        basis = basis_of(number)
        facts, made = facts_of(basis, step), []
        for member in MEMBERS:
            unsigned = Promise(member, view, None, None)
            made.append(replace(unsigned, signature=KEYS[member].sign(facts.election.promised(unsigned))))
        line, asked = self.lines[facts.leader_of(view)], AskPromise((WITNESS.peer_id,), view)
        found = await ask_witness(line, WITNESS.peer_id, facts, basis, asked, shown=Proof(tuple(made)), timeout_s=5.0)
        return found[0] if isinstance(found, tuple) else None

    def num_logged(self) -> int:
        return len(self.path.read_text().splitlines())


async def open_round(line: Transport, voter: PeerId, run: PreparedRun, *, stage: int, step: int) -> None:
    """Ask the voter about a round in which whoever asks is all there is. Raises what the voter does."""
    basis = RoundBasis(
        *(bytes(32), b"m" * 32, (line.peer_id,), (1,), (line.peer_id,), (1,), (voter,)), links=(None,), said=UNSAID
    )
    facts = RoundFacts.of_basis(
        basis,
        run_id=run.run_id,
        stage=StageIndex(stage),
        step=Step(step),
        host=run.host_key.peer_id,
        run_key=run.run_key.peer_id,
        num_parts=1,
        phase_s=1.0,
    )
    await ask_witness(line, voter, facts, basis, AskPromise((voter,), 0), timeout_s=5.0)


def leader_of(step: int) -> PeerId:
    return facts_of(basis_of(0), step).leader_of(0)


class AllShown(DrawnPapers):
    async def fetch(
        self, made: Contribution, entries: Sequence[int], *, of: PeerId, within_s: float
    ) -> tuple[Value, ...]:
        return ()


class PuttingOff(World):
    """A leader proposes a roster without so many; those say what a test has them say."""

    def __init__(self, folder: Path, *, num: int = 2, members: tuple[PeerId, ...] = MEMBERS) -> None:
        super().__init__(folder)
        transport = self.service._transport
        assert transport is not None
        self.service._papers = AllShown(transport, lambda *_: None, random.Random(0))
        work, step = (8,) * len(members), 7
        links = tuple(link_of(peer, step - 1) for peer in members)
        said = said_by(HOST_CHAIN, step)
        self._basis = RoundBasis(bytes(32), bytes(32), members, work, members, work, BESIDE, links, said)
        self.facts = facts_of(self._basis, step)
        self.leader = self.facts.leader_of(0)
        self.put_off = [peer for peer in members if peer != self.leader][:num]
        fresh = fresh_roster(
            self.facts,
            view=0,
            leader=self.leader,
            committed={peer: self.working(peer) for peer in members if peer not in self.put_off},
            silent=dict.fromkeys(self.put_off, "no commitment"),
            joins=(),
            neighbours=(),
            reason="full",
        )
        fresh = replace(fresh, reducers=tuple(made.peer_id for made in fresh.contributions))
        roster = replace(fresh, signature=KEYS[self.leader].sign(fresh.signed_bytes()))
        self.asked = SendBallot((WITNESS.peer_id,), Proposal.of_roster(roster, Proof()))

    def working(self, peer: PeerId) -> Contribution | None:
        """A member's, of one microbatch; None of the leader."""
        work = (Work(MicrobatchId(sorted(KEYS).index(peer)), 0, Version(7), 64, bytes(32), bytes(32)),)
        names = ("run", STAGE, self.facts.step, self.facts.previous_name, peer)
        unsigned = Contribution(*names, work, (bytes(32),), chance_of(peer, int(self.facts.step)))
        return replace(unsigned, signature=KEYS[peer].sign(unsigned.signed_bytes())) if peer != self.leader else None

    def contribution(self, peer: PeerId, *, of: PeerId | None = None) -> Contribution:
        """A member's, that brings nothing; signed by another where one is named."""
        names = ("run", STAGE, self.facts.step, self.facts.previous_name, peer)
        unsigned = Contribution(*names, (), (), chance_of(peer, int(self.facts.step)))
        return replace(unsigned, signature=KEYS[of or peer].sign(unsigned.signed_bytes()))

    def answers(self, peer: PeerId, said: dict[str, Value]) -> None:
        async def on_put_off(sender: PeerId, request: Message) -> Message:
            fields = Fields("roster", request.meta)
            shown = Proposal.from_value(fields.message("proposal"))
            assert (fields.integer("stage"), fields.integer("step"), sender) == (0, 7, WITNESS.peer_id)
            assert shown == self.asked.proposal
            return Message(said)

        self.lines[peer].serve(LEFT_WITHOUT, on_put_off, max_body_bytes=0)

    async def ask(self) -> Vote | AreThere | None:
        line = self.lines[self.leader]
        found = await ask_witness(line, WITNESS.peer_id, self.facts, self._basis, self.asked, timeout_s=5.0)
        assert not isinstance(found, tuple)
        return found


def test_whom_a_roster_puts_off_and_who_answers_with_its_contribution_is_named_and_gets_no_vote_cast(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        world = PuttingOff(tmp_path)
        first, second = world.put_off
        world.answers(first, {"brings_nothing": False, "made": world.contribution(first).packed})
        world.answers(second, {"brings_nothing": False, "made": None})
        assert await world.ask() == AreThere((world.contribution(first),))

    asyncio.run(scenario())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(swarm.witness_service, "time", clock)
    return clock


def test_who_answers_and_brings_nothing_yet_is_waited_for_and_not_for_ever(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        world = PuttingOff(tmp_path)
        world.answers(world.put_off[0], {"brings_nothing": False, "made": None})
        for _ in range(2):  # one that answers "not now", as who knows nothing of the step yet, is there too
            with pytest.raises(TransientError, match="is there"):
                await world.ask()
            await world.lines[world.put_off[0]].close()
        clock.now += LONGEST_HOLD_S
        assert isinstance(await world.ask(), Vote)

    asyncio.run(scenario())


def test_who_shows_voters_what_it_never_commits_to_holds_them_up_for_so_long(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        world = PuttingOff(tmp_path)
        first, second = world.put_off
        await world.lines[second].close()
        world.answers(first, {"brings_nothing": False, "made": world.contribution(first).packed})
        for _ in range(2):
            assert await world.ask() == AreThere((world.contribution(first),))
        clock.now += LONGEST_HOLD_S
        assert isinstance(await world.ask(), Vote)
        assert world.service._let_run_out.steps == {first: 7}, "the other never answered"
        world.service._held_until.clear()
        assert await world.ask() == AreThere((world.contribution(first),)), "in the next round it has less"
        clock.now += LONGEST_HOLD_S / DISTRUSTED_SHARE
        for _ in range(2):
            assert isinstance(await world.ask(), Vote)

    asyncio.run(scenario())


def test_one_of_three_is_asked_too_for_leader_host_and_neighbours_are_a_quorum(tmp_path: Path, clock: Clock) -> None:
    """It is named at once, and not waited for: its leader may have had good reasons to."""

    async def scenario() -> None:
        world = PuttingOff(tmp_path, num=1)
        [one] = world.put_off
        world.answers(one, {"brings_nothing": False, "made": world.contribution(one).packed})
        assert await world.ask() == AreThere((world.contribution(one),))
        clock.now += LONGEST_HOLD_S / DISTRUSTED_SHARE
        assert isinstance(await world.ask(), Vote), "it does not bring what it shows, as it seems"

    asyncio.run(scenario())


def test_one_of_three_that_has_yet_to_contribute_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = PuttingOff(tmp_path, num=1)
        world.answers(world.put_off[0], {"brings_nothing": False, "made": None})
        assert isinstance(await world.ask(), Vote)

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_members", "num", "is_asked"), [(2, 1, True), (3, 1, True), (4, 1, False), (4, 2, True)])
def test_who_is_asked_by_voters_outside(num_members: int, num: int, is_asked: bool, tmp_path: Path) -> None:
    """Where the leader needs another member's vote, that one asks."""
    world = PuttingOff(tmp_path, num=num, members=tuple(sorted(KEYS)[:num_members]))
    assert is_outsiders_to_ask(world.facts, world.asked.proposal) == is_asked


@pytest.mark.parametrize("says", ["nothing", "another's word", "nonsense", "over"])
def test_who_does_not_answer_or_with_nothing_of_its_own_is_put_off(tmp_path: Path, says: str) -> None:
    async def scenario() -> None:
        world = PuttingOff(tmp_path)
        first, second = world.put_off
        said: dict[str, dict[str, Value]] = {
            "another's word": {"brings_nothing": False, "made": world.contribution(first, of=second).packed},
            "nonsense": {"brings_nothing": False, "made": b"x"},
            "over": {"brings_nothing": True, "made": None},
        }
        await world.lines[second].close()
        if says != "nothing":
            world.answers(first, said[says])
        else:
            await world.lines[first].close()
        assert isinstance(await world.ask(), Vote)

    asyncio.run(scenario())


def test_strangers_open_nothing_and_nothing_of_theirs_is_written_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.may_lead.clear()
        for number in range(3):
            with pytest.raises(TransientError, match="not known here to lead"):
                await world.commit(number, 7)
        assert world.num_logged() == 0
        world.may_lead = {*MEMBERS}
        await world.commit(0, 7)
        assert world.num_logged() == 0, "nothing was signed"
        assert await world.promise(0, 7, 1) is not None
        assert world.num_logged() == 1

    asyncio.run(scenario())


def test_a_last_ballot_on_which_no_vote_was_given_ends_no_round_of_its_leader_s_share(tmp_path: Path) -> None:
    """Its quorum is of the leader's own making: with one key it could go on until the log has lost the real names."""

    async def scenario() -> None:
        world = World(tmp_path)
        await world.commits(range(MAX_ROUNDS_OF_ONE), 7)
        with pytest.raises(TransientError, match=f"{MAX_ROUNDS_OF_ONE} rounds open"):
            await world.commit(MAX_ROUNDS_OF_ONE, 7)
        assert world.num_logged() == 0, "nothing was signed"

    asyncio.run(scenario())


def test_a_leader_whose_last_ballots_never_come_is_not_locked_out(tmp_path: Path) -> None:
    """An honest one asks no more once it has votes enough."""

    async def scenario() -> None:
        world = World(tmp_path)
        leader = leader_of(0)
        led = [step for step in range(10 * MAX_ROUNDS_OF_ONE) if leader_of(step) == leader]
        assert len(led) > 2 * MAX_ROUNDS_OF_ONE
        for step in led:
            await world.commit(step, step)

    asyncio.run(scenario())


def test_rounds_that_the_stage_is_past_are_nobody_s_share(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        leader, other = leader_of(7), next(peer for peer in MEMBERS if peer != leader_of(7))
        await world.commits(range(MAX_ROUNDS_OF_ONE), 7)
        assert {opened.opener for opened in world.service._opened_by.values()} == {leader}
        world.lowest = 8
        later = next(step for step in range(8, 64) if leader_of(step) == other)
        await world.commit(0, later)
        assert {opened.opener for opened in world.service._opened_by.values()} == {other}

    asyncio.run(scenario())


def test_in_a_round_that_was_forgotten_nothing_is_signed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.witness_service, "KEPT_ENDED", 2)

    async def scenario() -> None:
        world = World(tmp_path)
        assert await world.promise(0, 7, 1) is not None
        await world.forget_the_first()
        assert await world.promise(0, 7, 2) is None

    asyncio.run(scenario())


def test_a_true_basis_shown_for_another_step_silences_no_round(tmp_path: Path) -> None:
    """A version's name says no step: whoever knows it could have a process vote in a round that there is not."""

    async def scenario() -> None:
        world = World(tmp_path)
        await world.commit(0, 12)
        assert await world.promise(0, 7, 1) is not None

    asyncio.run(scenario())


def test_a_member_is_asked_for_its_vote_as_a_member_alone(tmp_path: Path) -> None:
    """As a witness of its own round it would vote twice, or no more as a member."""

    async def scenario() -> None:
        world = World(tmp_path)
        members = tuple(sorted((WITNESS.peer_id, *MEMBERS[:2])))
        work, links = (8,) * len(members), (None,) * len(members)
        basis = RoundBasis(*(bytes(32), bytes(32), members, work, members, work, BESIDE[:1]), links, UNSAID)
        facts = facts_of(basis, 7)
        line = world.lines[next(peer for peer in members if peer != WITNESS.peer_id)]
        with pytest.raises(RemoteError, match="as a member"):
            await ask_witness(line, WITNESS.peer_id, facts, basis, commit_of(facts), timeout_s=5.0)
        assert world.num_logged() == 0

    asyncio.run(scenario())


def test_of_what_is_certified_a_witness_keeps_the_highest(tmp_path: Path) -> None:
    """Whoever makes up a basis certifies as many rosters of megabytes as it likes."""

    async def scenario() -> None:
        world = PuttingOff(tmp_path)
        await world.promise(0, 7, 1)
        (witness,) = world.service._rounds.values()
        roster = world.asked.proposal.roster
        assert roster is not None
        witness.voter.rosters |= {view: replace(roster, view=view) for view in range(8)}
        await world.promise(0, 7, 2)
        assert [*witness.voter.rosters] == [7]

    asyncio.run(scenario())


def test_a_round_that_was_forgotten_before_anything_was_signed_in_it_has_its_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks first in the true round, and then for others, would else silence a voter in it."""
    monkeypatch.setattr(swarm.witness_service, "KEPT_ENDED", 2)

    async def scenario() -> None:
        world = World(tmp_path)
        await world.commit(0, 7)
        await world.forget_the_first()
        assert await world.promise(0, 7, 1) is not None

    asyncio.run(scenario())


def test_a_log_says_that_a_round_has_begun_before_the_disk_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = VoteLog(tmp_path / "voted.log")
        beginning = asyncio.ensure_future(log.begin(bytes(32)))
        await asyncio.sleep(0)
        assert not log.may_vote(bytes(32))
        await beginning
        assert not log.may_vote(bytes(32))

    asyncio.run(scenario())
