"""Which version a run goes on from, and under which number: pure decisions over what is held."""

from swarm.core.ids import PeerId
from swarm.core.state.coming_back import Era, Holding, Point, StageSeen, goes_on_as, newest_common, point_of, points_of

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
ERAS = [Era(0, 16, (A, A)), Era(22, None, (B, B))]
"""The run went back from 21 to 16, and went on as 22."""


def newest(*held: list[Holding], certified: int = 40) -> Point | None:
    return newest_common([points_of(one, ERAS, stage, newest=certified) for stage, one in enumerate(held)])


def test_the_newest_version_that_every_stage_holds_is_taken() -> None:
    assert newest([Holding(B, 24, 31)], [Holding(B, 22, 30)]) == Point(1, 30)
    assert newest([Holding(B, 24, 31)], [Holding(B, 22, 30)], certified=29) == Point(1, 29), "what is only said"
    assert newest([Holding(B, 24, 31)], [Holding(B, 22, 23)]) is None
    assert newest([Holding(B, 24, 31), Holding(A, 8, 16)], [Holding(A, 0, 12)]) == Point(0, 12)


def test_what_was_abandoned_does_not_count_nor_what_is_of_another_run() -> None:
    assert newest([Holding(A, 8, 21)], [Holding(A, 8, 21)]) == Point(0, 16)
    assert newest([Holding(C, 0, 40)], [Holding(B, 22, 40)]) is None
    assert [point_of(version, ERAS) for version in (0, 16, 17, 21, 22, 23)] == [
        Point(0, 0), Point(0, 16), None, None, Point(0, 16), Point(1, 23)
    ]  # fmt: skip


def test_where_an_era_begins_is_where_the_one_before_ends() -> None:
    """One peer has taken up the new era and no step, the other was killed before it heard of it."""
    assert newest([Holding(B, 22, 22)], [Holding(A, 8, 18)]) == Point(0, 16)
    given = points_of([Holding(B, 22, 23)], ERAS, 0, newest=40)
    assert given == {Point(0, 16): Holding(B, 22, 22), Point(1, 23): Holding(B, 23, 23)}


def test_no_number_is_used_for_two_versions() -> None:
    assert goes_on_as(21, highest=21, is_complete=True, last=1000) == 21, "it is the same version"
    assert goes_on_as(20, highest=21, is_complete=True, last=1000) == 22
    assert goes_on_as(21, highest=21, is_complete=False, last=1000) == 29, "who is not here may have made more"
    assert goes_on_as(1000, highest=1000, is_complete=False, last=1000) == 1000
    assert goes_on_as(995, highest=996, is_complete=False, last=1000) == 999


def seen(members: str, **there: str) -> StageSeen:
    groups = {name: frozenset(PeerId(one) for one in there.get(name, "")) for name in StageSeen.__annotations__}
    return StageSeen(**{**groups, "members": frozenset(PeerId(one) for one in members)})


def test_a_stage_is_lost_when_no_member_goes_on_by_himself() -> None:
    assert not seen("abc", waiting="ab").is_lost, "c may be training"
    assert not seen("abc", waiting="ab", training="c").is_lost
    assert seen("abc", waiting="ab", silent="c").is_lost
    assert not seen("abc", waiting="ab", silent="c").is_complete, "c may hold more"
    assert seen("abc", waiting="ab", left="c").is_complete
    assert seen("a", waiting="a", training="x").is_lost, "x is no member: it can finish no round"


def test_as_many_are_waited_for_as_the_run_wants_but_no_more_than_there_were() -> None:
    assert seen("abc", waiting="a", silent="bc").missing(2) == 1
    assert seen("abc", waiting="ax", silent="bc").missing(2) == 0
    assert seen("a", waiting="a").missing(2) == 0
    assert seen("abc", left="abc").missing(2) == 2
