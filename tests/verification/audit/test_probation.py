"""Probation: what a newcomer draws is nobody's choice, and agreements promote a few at a time."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.ballots import Proposal
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Contribution, Roster, Work
from swarm.identity.key import Identity
from swarm.witness_service import check_joins
from tests.swarm.core.audit.chances import NO_CHANCE, UNSAID, beacon_of
from verification.audit.probation import AGREEMENT_VERSIONS, Agreement, Probation, exam_of

RUN_ID = "ab" * 32
EXAMINERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 9)]
NEWCOMER = PeerId("newcomer")
TICKET = Ticket(RUN_ID, NEWCOMER, StageIndex(1), bytes(32))


def basis(step: int) -> RoundBasis:
    """Of the version that the step starts from: all have done the same, but for one who did three times as much, and
    one who did nothing."""
    members = tuple(sorted(identity.peer_id for identity in EXAMINERS))
    work = (48, 0, *[16] * 6)
    return RoundBasis(bytes([step]) * 32, bytes(32), members, work, members, work, (), (None,) * 8, UNSAID)


def roster(step: int, *, rates: int = 0) -> Roster:
    made = tuple(
        Contribution(
            RUN_ID,
            StageIndex(1),
            Step(step),
            basis(step).name,
            identity.peer_id,
            tuple(Work(MicrobatchId(8 * step + n), 0, Version(step), 32, bytes(32), bytes(32)) for n in range(4)),
            (bytes([rates]) * 32,),
            NO_CHANCE,
        )
        for identity in EXAMINERS
    )
    members = tuple(sorted(identity.peer_id for identity in EXAMINERS))
    names = SimpleNamespace(stage=StageIndex(1), step=Step(step), previous_name=basis(step).name, members=members)
    return cast(Roster, SimpleNamespace(**vars(names), contributions=made))


def agreement(step: int, /, **changed: Any) -> Agreement:
    exam = exam_of(roster(step), basis(step), beacon_of(step), NEWCOMER)
    assert exam is not None
    examiner = next(one for one in EXAMINERS if one.peer_id == exam.examiner)
    made = Agreement(
        run_id=RUN_ID,
        stage=StageIndex(1),
        step=Step(step),
        newcomer=NEWCOMER,
        examiner=examiner.peer_id,
    )
    return replace(made, **changed).signed_by(examiner)


# -- the draw -----------------------------------------------------------------------------------------------


def test_examiners_take_turns_by_chance_and_none_makes_himself_one() -> None:
    drawn = []
    for step in range(60):
        exam, other = (exam_of(roster(step, rates=rates), basis(step), beacon_of(step), NEWCOMER) for rates in (0, 1))
        assert exam is not None
        assert other is not None
        assert (other.examiner, other.work) == (exam.examiner, exam.work), "another contribution is no other exam"
        assert exam.work in exam.contribution.work
        drawn.append(exam.examiner)
    heavy, idle = basis(0).members[:2]
    counts = Counter(drawn)
    assert len(counts) == 7
    assert idle not in counts, "who does nothing examines nobody"
    assert 12 <= counts.pop(heavy) <= 32, "a third of the work"
    assert max(counts.values()) < 14


def test_nobody_is_drawn_where_nobody_has_worked() -> None:
    def rostered(contributions: tuple[Contribution, ...]) -> Roster:
        names = SimpleNamespace(contributions=contributions, step=Step(1), previous_name=basis(1).name)
        return cast(Roster, names)

    idle = basis(1).members[1]
    alone = tuple(one for one in roster(1).contributions if one.peer_id == idle)
    for made in ((), alone):
        assert exam_of(rostered(made), basis(1), beacon_of(1), NEWCOMER) is None
    with pytest.raises(RemoteError, match="does not start from"):
        exam_of(roster(1), basis(2), beacon_of(1), NEWCOMER)


# -- agreements -----------------------------------------------------------------------------------------------


def test_an_agreement_counts_when_the_drawn_examiner_signed_it() -> None:
    made = agreement(7)
    made.check(run_id=RUN_ID, ticket=TICKET, roster=roster(7), basis=basis(7), beacon=beacon_of(7))
    assert Agreement.from_value(made.to_value()) == made


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (agreement(7, run_id="cd" * 32), "protocol"),
        (agreement(7, stage=StageIndex(0)), "ticket"),
        (agreement(7, newcomer=PeerId("other")), "ticket"),
        (agreement(7, step=Step(8)), "draw"),
        (replace(agreement(7), signature=agreement(9).signature), "signature"),
        (
            agreement(7, examiner=next(e.peer_id for e in EXAMINERS if e.peer_id != agreement(7).examiner)),
            "draw",
        ),
    ],
)
def test_other_agreements_do_not_count(made: Agreement, kind: str) -> None:
    with pytest.raises(RemoteError) as caught:
        made.check(run_id=RUN_ID, ticket=TICKET, roster=roster(7), basis=basis(7), beacon=beacon_of(7))
    assert caught.value.kind == kind


def test_malformed_agreements_are_refused() -> None:
    value = agreement(7).to_value()
    assert isinstance(value, dict)
    inner = value["value"]
    assert isinstance(inner, dict)
    wrong: list[Value] = [None, [], {}, {**value, "more": 1}, {**value, "signature": b""}, {**value, "value": {}}]
    wrong += [{**value, "value": {**inner, name: None}} for name in inner]
    for one in wrong:
        with pytest.raises(RemoteError) as caught:
            Agreement.from_value(one)
        assert caught.value.kind == "malformed"


# -- rosters -----------------------------------------------------------------------------------------------


def test_voters_look_at_who_joins_unless_it_was_certified_before() -> None:
    def proposal(*joins: str, certified: bool = False) -> Proposal:
        roster = SimpleNamespace(joins=joins)
        return cast(Proposal, SimpleNamespace(roster=roster, new_roster=None if certified else roster))

    def may_join(peer: PeerId) -> bool:
        return peer == "known"

    check_joins(proposal("known"), may_join)
    check_joins(proposal(), may_join)
    check_joins(proposal("unknown", certified=True), may_join)
    with pytest.raises(TransientError, match="probation"):
        check_joins(proposal("known", "unknown"), may_join)


# -- the fold -----------------------------------------------------------------------------------------------


def folded(steps: dict[str, list[int]], version: int, *, seed: int = 0) -> Probation:
    events = [(peer, step) for peer, of in steps.items() for step in of]
    random.Random(seed).shuffle(events)
    table = Probation(10)
    for peer, step in events:
        made = cast(Agreement, SimpleNamespace(newcomer=PeerId(peer), step=Step(step)))
        table = table.after(made, version)
    return table


def test_ten_agreements_of_the_last_versions_promote() -> None:
    may = {"since": -1, "num_members": 8, "num_left": 0}
    assert not folded({"a": list(range(9))}, 16).may_promote(PeerId("a"), 16, **may)
    assert not folded({"a": [*range(9), 8, 8]}, 16).may_promote(PeerId("a"), 16, **may)  # the same one, told again
    assert folded({"a": list(range(10))}, 16).may_promote(PeerId("a"), 16, **may)
    assert not folded({"a": list(range(10))}, 17).may_promote(PeerId("a"), 17, **may)  # the first is too old
    assert not folded({"a": list(range(10))}, 16).may_promote(PeerId("a"), 16, since=0, num_members=8, num_left=0)
    assert folded({"a": list(range(10))}, 16) == folded({"a": list(range(10))}, 16, seed=1)


@pytest.mark.parametrize(
    ("num_members", "num_left", "each"),
    [(1, 0, 1), (8, 0, 1), (15, 0, 1), (16, 0, 2), (64, 0, 8), (1, 1, 2), (16, 3, 5)],
)
def test_one_is_promoted_for_eight_members_a_version_and_one_for_each_who_left(
    num_members: int, num_left: int, each: int
) -> None:
    peers = [PeerId(f"peer {number}") for number in range(20)]
    table = folded({peer: list(range(10)) for peer in peers}, 12)
    taken = {12: 0, 13: 0}
    for version in taken:
        for peer in peers:
            if table.may_promote(peer, version, since=-1, num_members=num_members, num_left=num_left):
                table = table.promoted(peer, version)
                taken[version] += 1
    assert taken == {12: each, 13: each}


def test_what_is_kept_of_newcomers_is_bounded() -> None:
    table = folded({"a": list(range(200)), "b": [3]}, 200)
    assert table.steps == {"a": tuple(range(200 - AGREEMENT_VERSIONS, 200))}
