"""Rounds of more than 64 members: every part by way of its cohort's reducer, one outcome, equal bytes everywhere."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from swarm.core.cohorts import COHORT_MEMBERS, COMMITTEE, cohorts, committee
from swarm.core.ids import PeerId
from swarm.core.round.facts import is_of
from tests.swarm.core.round.round_world import PHASE_S, Member, World, cohorts_of, facts_of
from tests.swarm.core.round.round_world import PREVIOUS_NAME as SAID

NUM_PARTS = 4


def finished(world: World, *, until_s: float) -> None:
    """Run the world: all who live end alike, and nobody honest is blamed."""
    world.run(until_s=until_s)
    assert len(world.roots()) == 1, world.explain("two outcomes")
    assert all(member.finished for member in world.survivors)
    assert world.errors == [], world.explain("an honest member was blamed")


def when_the_leader_has_a_roster(world: World, act: Callable[[], None]) -> None:
    if world.leader().round.roster is None:
        world.call_later(0.01, lambda: when_the_leader_has_a_roster(world, act))
    else:
        act()


def reducers_first_part(world: World) -> tuple[Member, Member]:
    """Who combines part 0, and who reduces it for the last cohort; neither leads."""
    roster = world.leader().round.roster
    assert roster is not None
    return world.members[roster.combiner_of(0)], world.members[roster.reducers_of(0)[-1]]


@pytest.mark.parametrize(("num_members", "num_cohorts"), [(1, 1), (64, 1), (65, 2), (128, 2), (130, 3), (256, 4)])
def test_cohorts_are_nearly_equal_and_depend_on_the_host_s_word_alone(num_members: int, num_cohorts: int) -> None:
    members = tuple(PeerId(f"peer {number:03}") for number in range(num_members))
    split = cohorts(members, SAID)
    assert len(split) == num_cohorts
    assert sorted(peer for cohort in split for peer in cohort) == list(members)
    sizes = [len(cohort) for cohort in split]
    assert max(sizes) <= COHORT_MEMBERS
    assert max(sizes) - min(sizes) <= 1
    assert split == cohorts(members, SAID)
    assert num_cohorts == 1 or split != cohorts(members, bytes(32))


def test_all_vote_until_a_committee_is_drawn() -> None:
    members = tuple(PeerId(f"peer {number:03}") for number in range(COMMITTEE + 1))
    work = dict.fromkeys(members, 40)
    assert committee(dict.fromkeys(members[:-1], 40), SAID) == dict.fromkeys(members[:-1], 40)
    drawn = committee(work, SAID)
    assert list(drawn.values()) == [1] * COMMITTEE
    assert list(drawn) == sorted(drawn)
    assert drawn.keys() < work.keys()
    assert drawn != committee(work, bytes(32))
    assert len(facts_of(130).voters) == COMMITTEE


def test_seats_of_a_committee_go_by_work() -> None:
    """Who has done a fifth has a fifth of the seats, whichever version it is; who has done nothing has none."""
    work = {PeerId(f"peer {number:03}"): 100 for number in range(200)}
    work |= {PeerId("heavy"): 5000} | dict.fromkeys((PeerId(f"idle {number}") for number in range(300)), 0)
    for name in (bytes([number]) * 32 for number in range(20)):
        seats = committee(work, name)
        assert sum(seats.values()) == COMMITTEE
        assert seats["heavy"] in (COMMITTEE // 5, COMMITTEE // 5 + 1)
        assert not any(peer.startswith("idle") for peer in seats)


@pytest.mark.parametrize("num_members", [65, pytest.param(130, marks=pytest.mark.soak)])
def test_everyone_finishes_alike_and_nobody_talks_to_more_than_a_cohort_about_a_part(num_members: int) -> None:
    world = World(num_members, num_members, num_parts=NUM_PARTS, slowest_s=0.1)
    finished(world, until_s=6 * PHASE_S)
    result = world.leader().finished
    assert result is not None
    assert len(result.roster.contributions) == num_members
    assert all(is_of(reduced, result.roster) for reduced in result.parts)
    num_cohorts = len(cohorts_of(world.facts))
    assert [len(reduced.shares) for reduced in result.parts] == [num_cohorts] * NUM_PARTS
    assert result.roster.view == world.facts.first_view

    # Every member sends each of its parts once, into its cohort; every member gets each whole part, most of them once.
    sent, cohort_of = world.sent, result.roster.cohort_of
    assert all(cohort_of[sender] == cohort_of[to] for sender, to in sent["part"])
    assert sent["part"].total() <= NUM_PARTS * num_members
    shares_and_announcements = NUM_PARTS * num_cohorts
    assert sent["made"].total() <= shares_and_announcements
    assert sent["reduced"].total() <= NUM_PARTS * (num_members + num_cohorts) + shares_and_announcements

    partners = defaultdict(set)
    for kind in ("part", "reduced", "made"):
        for sender, to in sent[kind]:
            partners[sender].add(to)
            partners[to].add(sender)
    per_part = COHORT_MEMBERS + num_cohorts + 1
    num_places = {peer: result.roster.reducers.count(peer) for peer in world.facts.members}
    for peer, others in partners.items():
        assert len(others) <= NUM_PARTS * (num_cohorts + 1) + per_part * num_places[peer]


@pytest.mark.parametrize(
    "whom", ["combiner", "several", *(pytest.param(one, marks=pytest.mark.soak) for one in ("reducer", "leader"))]
)
def test_a_round_goes_on_when_a_reducer_dies_before_its_part_is_made(whom: str) -> None:
    world = World(17, 65, num_parts=NUM_PARTS, slowest_s=0.1)
    dead: list[Member] = []

    def strike() -> None:
        combiner, reducer = reducers_first_part(world)
        victims = {"combiner": [combiner], "reducer": [reducer], "leader": [world.leader()]}
        dead.extend(victims.get(whom, [combiner, reducer, world.leader()]))
        for member in dead:
            world.kill(member)

    when_the_leader_has_a_roster(world, strike)
    finished(world, until_s=30 * PHASE_S)
    result = next(m.finished for m in world.survivors)
    assert result is not None
    assert all(not reduced.is_empty for reduced in result.parts)
    assert all(is_of(reduced, result.roster) for reduced in result.parts)
    assert result.roster.rank > (world.facts.first_view, 0), "parts went to others"
    makers = {share.reducer for reduced in result.parts for share in reduced.shares}
    assert makers.isdisjoint(member.peer_id for member in dead)


def test_a_late_member_is_left_out() -> None:
    world = World(5, 65, num_parts=1, slowest_s=0.1)
    late = world.leader(20)
    world.freeze(late, after_s=0.0, for_s=None)
    world.run(until_s=30 * PHASE_S, wait_for=lambda member: member is not late)
    assert len(world.roots()) == 1
    assert world.errors == []
    results = [member.finished for member in world.survivors if member is not late]
    assert all(
        result is not None and [one.peer_id for one in result.roster.leaves] == [late.peer_id] for result in results
    )


def test_the_other_cohorts_count_when_all_of_one_that_worked_are_dead() -> None:
    world = World(8, 65, num_parts=2, workless=58, slowest_s=0.1)
    silent = next(cohort for cohort in cohorts_of(world.facts) if world.leader().peer_id not in cohort)
    dead = [world.members[peer] for peer in silent if world.members[peer].num_work]
    names = {member.peer_id for member in dead}
    assert dead

    def strike() -> None:
        world.cut = lambda one, other: one in names  # what they have sent already is lost too
        for member in dead:
            world.kill(member)

    when_the_leader_has_a_roster(world, strike)
    finished(world, until_s=30 * PHASE_S)
    result = next(member.finished for member in world.survivors)
    assert result is not None
    for reduced in result.parts:
        assert not reduced.is_empty
        assert not reduced.excluded
        assert names.isdisjoint(reduced.contributors)
        assert {made.peer_id for made in result.roster.left_out} == names
        assert [cohorts_of(world.facts)[share.cohort] != silent for share in reduced.shares] == [True]


def test_a_reducer_that_says_its_share_is_made_and_sends_nothing_holds_up_no_part() -> None:
    """The leader first relieves who combines the shares, for all are said to be made; then everyone who reduces."""
    world = World(4, 65, num_parts=1, slowest_s=0.1)
    liar: list[PeerId] = []

    def strike() -> None:
        _, reducer = reducers_first_part(world)
        liar.append(reducer.peer_id)
        world.cut = lambda one, other: one in liar and other != world.leader().peer_id

    when_the_leader_has_a_roster(world, strike)
    finished(world, until_s=40 * PHASE_S)
    result = world.leader().finished
    assert result is not None
    assert result.roster.rank >= (world.facts.first_view, 2)
    assert not result.parts[0].is_empty
    assert liar[0] not in [share.reducer for share in result.parts[0].shares]
