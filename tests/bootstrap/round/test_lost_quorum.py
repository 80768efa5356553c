"""A stage is silent: the host asks who votes, and names who goes on once too few do."""

import asyncio
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from bootstrap.round.lost_quorum import PATIENCE, Follow, LostQuorum, Place
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.basis import RoundBasis, round_name
from swarm.core.round.voting import Reconfiguration
from swarm.drawn_papers import DrawnPapers
from swarm.host_protocol import RECONFIGURE, STANDING
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from swarm.witness_service import VoteLog, WitnessService
from tests.swarm.core.audit.chances import UNSAID
from tests.swarm_in_process import identity_of

HOST, RUN_KEY = identity_of(90), identity_of(91)
MEMBERS = [identity_of(number) for number in range(6)]
NAMES = tuple(sorted(member.peer_id for member in MEMBERS))
ALIKE, NOTHING = (8,) * len(NAMES), (None,) * len(NAMES)
BASIS = RoundBasis(bytes(32), bytes(32), NAMES, ALIKE, NAMES, ALIKE, (), NOTHING, UNSAID)
LEASE_S, CALL_S = 100.0, 3.0
TRUE = Place(7, BASIS)
ROUND = round_name(StageIndex(0), Step(7), BASIS.name)
MADE_UP = Place(1 << 40, RoundBasis(bytes(32), b"l" * 32, NAMES[:1], (1,), NAMES[:1], (1,), (), (None,), UNSAID))


async def certified(claims: Sequence[tuple[int, PeerId]]) -> Place | None:
    return TRUE


async def not_certified(claims: Sequence[tuple[int, PeerId]]) -> Place | None:
    """The last results are gone."""
    return Place(5, RoundBasis(bytes(32), b"5" * 32, NAMES, ALIKE, NAMES, ALIKE, (), NOTHING, UNSAID))


class SilentStage:
    """Six members in a round that has begun, and the host that watches it: seven voters, of whom five decide."""

    def __init__(
        self,
        folder: Path,
        *,
        dead: Collection[int] = (),
        started_again: Collection[int] = (),
        liars: Collection[int] = (),
        follow: Follow = certified,
    ) -> None:
        self._folder, self._liars = folder, liars
        self._network = MemoryNetwork(random.Random(0), delay_s=0.0, loss=0.0)
        self.told: dict[PeerId, Reconfiguration] = {}
        self.num_asked = 0
        for number, member in enumerate(MEMBERS):
            if number not in dead:
                self._serve(member, started_again=number in started_again)
        log = self._voted(HOST, started_again=False)
        transport = self._network.transport(HOST)
        self._watched = LostQuorum(StageIndex(0), transport, HOST.peer_id, RUN_KEY, LEASE_S, CALL_S, 0.0, log, follow)

    def _voted(self, voter: Identity, *, started_again: bool) -> VoteLog:
        """The voter's log after it has begun the round, in this process or in one before it."""
        path = self._folder / voter.peer_id
        log = VoteLog(path)
        asyncio.run(log.begin(ROUND))
        return VoteLog(path) if started_again else log

    def _serve(self, member: Identity, *, started_again: bool) -> None:
        transport, log = self._network.transport(member), self._voted(member, started_again=started_again)
        papers = DrawnPapers(transport, lambda made, entry, value: None, random.Random(0))
        anybody = (lambda peer, stage: True, lambda peer: True, lambda peer, stage, step, name: True)
        names = ("run", member, HOST.peer_id, RUN_KEY.peer_id)
        WitnessService(*names, log, *anybody, num_parts=[1], papers=papers).serve(transport)

        async def on_standing(sender: PeerId, request: Message) -> Message:
            self.num_asked += 1
            version, basis = MADE_UP if MEMBERS.index(member) in self._liars else TRUE
            view = 1 << 20 if MEMBERS.index(member) in self._liars else 3
            return Message({"version": version, "view": view, "closing": True, "basis": basis.to_value()})

        async def on_reconfigure(sender: PeerId, request: Message) -> Message:
            self.told[member.peer_id] = Reconfiguration.from_value(request.meta["reconfiguration"])
            return Message()

        transport.serve(STANDING, on_standing, max_body_bytes=0)
        transport.serve(RECONFIGURE, on_reconfigure, max_body_bytes=0)

    def die(self, *numbers: int) -> None:
        for number in numbers:
            self._network.kill(MEMBERS[number].peer_id)

    def forget_answers_before(self, *, leases: float) -> None:
        """So much more time has passed since those who answered did."""
        self._watched._looked_at -= leases * LEASE_S
        held = self._watched._answers
        self._watched._answers = {peer: (at - leases * LEASE_S, vote) for peer, (at, vote) in held.items()}

    def mended_after(self, *, leases: float) -> Reconfiguration | None:
        """What the host does when so much time has passed without a result."""
        self._watched._quiet_since -= leases * LEASE_S
        self._watched._looked_at -= leases * LEASE_S
        if self._watched._closing_since is not None:
            version, since = self._watched._closing_since
            self._watched._closing_since = version, since - leases * LEASE_S
        return asyncio.run(self._watched.mend(list(NAMES)))


def test_nobody_is_named_while_a_quorum_votes(tmp_path: Path) -> None:
    stage = SilentStage(tmp_path, dead=[0], started_again=[1])
    assert stage.mended_after(leases=1.1) is None
    assert not stage.told


@pytest.mark.parametrize(("dead", "started_again"), [([0, 1, 2], []), ([0], [1, 2]), ([], [1, 2, 3])])
def test_those_who_answer_go_on_after_one_lease_if_too_few_vote(
    tmp_path: Path, dead: list[int], started_again: list[int]
) -> None:
    stage = SilentStage(tmp_path, dead=dead, started_again=started_again)
    assert stage.mended_after(leases=0.9) is None
    named = stage.mended_after(leases=0.2)
    assert named is not None
    living = {member.peer_id for number, member in enumerate(MEMBERS) if number not in dead}
    assert {*named.voters} == living | {HOST.peer_id}, "who was started again votes under other voters"
    assert stage.told == dict.fromkeys(living, named)
    assert BASIS.leaders(named.step)[named.first_view % len(NAMES)] in living


def test_who_answered_within_a_lease_is_not_lost_for_one_answer_that_is_late(tmp_path: Path) -> None:
    """On lines of 1 Mbit/s two of five voters were heard within 3 s, and decided alone."""
    stage = SilentStage(tmp_path)
    assert stage.mended_after(leases=1.1) is None
    stage.die(0, 1, 2)
    assert stage.mended_after(leases=0.4) is None
    stage.forget_answers_before(leases=1.1)
    named = stage.mended_after(leases=0.1)
    assert named is not None
    assert {*named.voters} == {*(member.peer_id for member in MEMBERS[3:]), HOST.peer_id}


def test_members_are_asked_once_in_a_third_of_a_lease(tmp_path: Path) -> None:
    """Their lines are full of the round."""
    stage = SilentStage(tmp_path)
    for leases, times in ((1.1, 1), (0.1, 1), (0.4, 2)):
        stage.mended_after(leases=leases)
        assert stage.num_asked == times * len(MEMBERS)


def test_those_who_were_named_are_given_time(tmp_path: Path) -> None:
    stage = SilentStage(tmp_path, dead=[0], started_again=[1, 2])
    first = stage.mended_after(leases=1.1)
    assert first is not None
    assert stage.mended_after(leases=1.1) is None, "they vote now, and have not had time yet"
    again = stage.mended_after(leases=PATIENCE - 1.0)
    assert again is not None
    assert again.voters == first.voters


def test_a_stage_that_computes_for_long_and_votes_is_left_alone_until_its_round_takes_long(tmp_path: Path) -> None:
    stage = SilentStage(tmp_path)
    assert stage.mended_after(leases=10 * PATIENCE) is None, "a window of local steps may last as long as it will"
    assert stage.mended_after(leases=PATIENCE - 0.1) is None
    assert stage.mended_after(leases=0.4) is not None


@pytest.mark.parametrize("follow", [certified, not_certified])
@pytest.mark.parametrize("dead", [[2, 3, 4], [3, 4]])
def test_a_member_that_makes_up_where_the_stage_stands_changes_nothing(
    tmp_path: Path, dead: list[int], follow: Follow
) -> None:
    """Neither by a version of its own, nor by a view so far ahead that nobody would take it."""
    stage = SilentStage(tmp_path, dead=dead, started_again=[5], liars=[0], follow=follow)
    named = stage.mended_after(leases=1.1)
    if follow is not_certified and len(dead) == 3:
        assert named is None, "two of six say so: a third may lie"
        return
    assert named is not None
    assert (named.step, named.previous_name) == (TRUE.version, BASIS.name)
    assert named.first_view < 1024


def test_a_host_that_was_started_again_names_nobody_by_views_under_which_it_has_signed(tmp_path: Path) -> None:
    stage = SilentStage(tmp_path, dead=[0, 1, 2])
    before = Reconfiguration(StageIndex(0), Step(7), BASIS.name, 640, NAMES)
    asyncio.run(stage._watched._own_log.begin(ROUND, before))
    stage._watched._own_log = VoteLog(tmp_path / HOST.peer_id)
    named = stage.mended_after(leases=1.1)
    assert named is not None
    assert named.first_view > before.first_view
