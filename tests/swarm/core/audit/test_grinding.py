"""A member that fills in what it may choose until chance favours it: by the rule of before, and by the present one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from swarm.core.audit.beacon import Beacon
from swarm.core.canonical import digest
from swarm.core.cohorts import committee
from swarm.core.errors import TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.ranking import rank
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Charge, Contribution, ReducedPart, Result, Roster, Work
from swarm.core.state.stage_chain import Genesis, StageChain
from tests.swarm.core.audit.chances import HOST_CHAIN, UNSAID, chance_of, said_by
from tests.swarm.core.state.test_stage_chain import SETTINGS
from verification.audit.probation import exam_of
from verification.audit.verdicts import jurors

MEMBERS = tuple(PeerId(f"member {number:02}") for number in range(12))
LIARS = MEMBERS[3:6]
ACCUSER, ACCUSED, NEWCOMER = MEMBERS[0], MEMBERS[9], PeerId("newcomer")
TRIES = 1 << 12
"""In a second; a peer has minutes."""


def _chain() -> StageChain:
    facts = "run", StageIndex(1), Version(4), bytes(32), MEMBERS, LeaseTable(), PeerId("host"), PeerId("run key")
    return StageChain.begin(Genesis(*facts, (), HOST_CHAIN.end), SETTINGS)


def _result(chain: StageChain, *charges: Charge, without: tuple[PeerId, ...] = ()) -> Result:
    """Of the version's round, led by the first liar, who knows everything in it before anybody else does."""
    made = []
    for number, peer in enumerate(chain.members):
        work = (Work(MicrobatchId(number), 0, Version(0), 8, bytes(32), bytes(32)),)
        facts = chain.run_id, chain.stage, Step(chain.version), chain.name, peer, work, (bytes(32),)
        one = Contribution(*facts, chance_of(peer, int(chain.version)))
        if peer not in without:
            made.append(replace(one, charges=charges) if peer == LIARS[0] else one)
    named = chain.run_id, chain.stage, Step(chain.version), 0, 0, LIARS[0], chain.name, chain.members
    roster = Roster(*named, tuple(made), (LIARS[0],), (), (), "full")
    return Result(roster, (ReducedPart(0, b"0" * 32, tuple(one.peer_id for one in made)),), LIARS[0])


CHAIN = _chain()


def _ground() -> Iterator[Result]:
    """What the liar can make of the round by what it says it brings before a jury."""
    return (_result(CHAIN, Charge(ACCUSED, digest("nothing", [number]))) for number in range(TRIES))


def _next_name(result: Result) -> bytes:
    return result.basis_after(CHAIN.basis, CHAIN.basis.work).name


# -- by the name of the version, as it was ---------------------------------------------------------------------


def _led_by_name(result: Result) -> tuple[PeerId, ...]:
    return rank(MEMBERS, "leader", _next_name(result), 1, int(CHAIN.version) + 2)[:3]


def _judged_by_name(result: Result) -> tuple[PeerId, ...]:
    return rank(set(MEMBERS) - {ACCUSER, ACCUSED}, "juror", bytes(32), ACCUSED, _next_name(result))[:3]


@pytest.mark.parametrize("drawn", [_led_by_name, _judged_by_name])
def test_who_is_drawn_by_a_name_is_whom_the_last_writer_likes(drawn: Callable[[Result], tuple[PeerId, ...]]) -> None:
    assert any(set(drawn(result)) == set(LIARS) for result in _ground())


# -- by the beacon ------------------------------------------------------------------------------------------------


CROWD = tuple(sorted([*MEMBERS, *(PeerId(f"other {number:02}") for number in range(28))]))
"""Of a stage so large that its jurors are drawn."""


def _jurors(beacon: Beacon, accused: PeerId = ACCUSED) -> tuple[PeerId, ...]:
    work = (8,) * len(CROWD)
    basis = RoundBasis(bytes(32), bytes(32), CROWD, work, CROWD, work, (), (None,) * len(CROWD), UNSAID)
    drawn = jurors(basis, accuser=ACCUSER, accused=accused, beacon=lambda: beacon)
    assert drawn is not None
    return tuple(drawn.weights)


def _drawn(result: Result) -> tuple[object, ...]:
    """Everything that is drawn after the round, once the host has spoken of it."""
    after = CHAIN.advance(result, SETTINGS)
    beacon = Beacon.of(result.roster, said_by(HOST_CHAIN, int(after.version)))
    exam = exam_of(result.roster, CHAIN.basis, beacon, NEWCOMER)
    assert exam is not None
    return (
        after.leaders(Step(after.version)),
        after.leaders(Step(after.version + 1)),
        _jurors(beacon),
        (exam.examiner, exam.work),
        tuple(committee({PeerId(f"peer {number}"): 8 for number in range(200)}, after.basis.said.value)),
    )


def test_whatever_a_member_writes_nothing_is_drawn_otherwise() -> None:
    honest = _drawn(_result(CHAIN))
    results = [_result(CHAIN, Charge(ACCUSED, digest("nothing", [number]))) for number in range(64)]
    assert len({_next_name(result) for result in results}) == 64
    assert {_drawn(result) for result in results} == {honest}


def test_nobody_knows_a_draw_before_the_host_has_spoken_of_the_round() -> None:
    roster = _result(CHAIN).roster
    for num_versions in range(int(CHAIN.version) + 1):
        with pytest.raises(TransientError, match="has not spoken of step 4"):
            Beacon.of(roster, said_by(HOST_CHAIN, num_versions))
    spoken = [Beacon.of(roster, said_by(HOST_CHAIN, num_versions)) for num_versions in (5, 6, 60)]
    assert len(set(spoken)) == 1, "a later word tells it too"


def test_who_withholds_itself_draws_anew_and_no_better() -> None:
    """Each of the liars' eight choices is as good as any, and must be made before the host speaks."""
    sets = [without for size in range(len(LIARS) + 1) for without in combinations(LIARS, size)]
    found = [Beacon.of(_result(CHAIN, without=without).roster, said_by(HOST_CHAIN, 5)) for without in sets]
    assert len(set(found)) == len(sets) == 8
    shares = []
    for beacon in found:
        drawn = [_jurors(beacon, PeerId(f"accused {n}")) for n in range(200)]
        shares.append(sum(len(set(LIARS) & set(fifteen)) for fifteen in drawn) / 3000)
    # Of 39 who may be drawn three lie; 3000 draws of 3/39 deviate by 0.0049 (less, without replacement).
    assert all(abs(share - 3 / 39) < 0.02 for share in shares), shares


def test_several_charges_against_one_peer_are_no_several_draws() -> None:
    beacon = Beacon.of(_result(CHAIN).roster, said_by(HOST_CHAIN, 5))
    assert _jurors(beacon) == _jurors(beacon)
    assert len({_jurors(beacon, peer) for peer in MEMBERS[1:]}) > 5
