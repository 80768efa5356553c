"""Rounds under deaths, freezes and false alarms in `round_world`; what a member refuses; what a view change keeps."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from swarm.core.averaging_round import (
    AggregatePart,
    AveragingRound,
    FetchPart,
    Finish,
    MakeContribution,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
)
from swarm.core.contribution import Contribution, Departure, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round_facts import RoundFacts
from tests.round_world import (
    PHASE_S,
    PREVIOUS_NAME,
    RUN_ID,
    STAGE,
    STEP,
    World,
    contribution,
    facts_of,
    identities,
    identity_of,
    reduced_part,
    round_of,
    witnesses_for,
)

T = TypeVar("T")

# -- whole rounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_members", range(1, 9))
def test_everyone_finishes_alike_when_nothing_fails(num_members: int) -> None:
    for seed in range(12):
        world = World(seed, num_members, workless=seed % 2 * (num_members // 2), outsiders=seed % 3, slowest_s=0.1)
        world.run(until_s=6 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}")
        assert world.errors == []
        with_work = tuple(sorted(m.peer_id for m in world.survivors if m.num_work))
        result = world.leader().finished
        assert result is not None
        assert tuple(made.peer_id for made in result.roster.contributions) == with_work
        assert result.roster.leaves == ()
        assert all(reduced.contributors == with_work for reduced in result.parts)
        assert all(
            not member.round.left and member.round.view == world.leader().round.view for member in world.survivors
        )


def test_a_round_without_work_has_no_parts() -> None:
    world = World(3, 4, workless=4, slowest_s=0.1)
    world.run(until_s=4 * PHASE_S)
    (root,) = world.roots()
    assert all(m.finished is not None and m.finished.parts == () for m in world.survivors)
    assert all(m.finished is not None and m.finished.root() == root for m in world.survivors)


@pytest.mark.parametrize("block", range(4))
def test_survivors_agree_when_members_die(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        num_members = 2 + seed % 7
        num_dead = rng.randint(1, num_members - 1)
        world = World(
            seed,
            num_members,
            workless=rng.randrange(num_members + 1) if rng.random() < 0.3 else 0,
            outsiders=rng.randrange(2),
            witnesses=witnesses_for(num_members, num_dead),
            keeps_rounds=rng.random() < 0.5,
            slowest_s=rng.choice([0.05, 0.3, 0.6]),
        )
        by_rank = [world.leader(view) for view in range(num_members)]
        for member in by_rank[:num_dead] if rng.random() < 0.5 else rng.sample(by_rank, num_dead):
            if rng.random() < 0.7:
                member.dies_after = rng.randrange(40)
            else:
                world.call_later(rng.random() * 4 * PHASE_S, lambda world=world, member=member: world.kill(member))
        world.run(until_s=60 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}: two outcomes")
        assert all(m.finished for m in world.survivors), world.explain(f"seed {seed}")
        assert world.errors == [], world.explain(f"seed {seed}: an honest member was blamed")


@pytest.mark.parametrize("num_actions", range(0, 30))
def test_survivors_agree_when_the_leader_dies_after_any_action(num_actions: int) -> None:
    """Three members and one part: before and after close, roster, each reduced part and each copy of the result."""
    for seed in range(4):
        world = World(seed, 3, num_parts=1, witnesses=1, slowest_s=0.1)
        world.leader().dies_after = num_actions
        world.run(until_s=25 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}")
        assert len([m for m in world.survivors if m.finished]) == len(world.survivors)
        assert world.errors == []


@pytest.mark.parametrize("block", range(2))
def test_others_go_on_when_members_freeze_and_a_late_one_disturbs_nobody(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        num_members = 2 + seed % 7
        num_frozen = rng.randint(1, max(1, num_members // 2))
        world = World(
            seed,
            num_members,
            witnesses=witnesses_for(num_members, num_frozen),
            keeps_rounds=rng.random() < 0.5,
            calls_time_out=rng.random() < 0.5,
            slowest_s=rng.choice([0.05, 0.1, 0.2]),
        )
        by_rank = [world.leader(view) for view in range(num_members)]
        frozen = by_rank[:num_frozen] if rng.random() < 0.5 else rng.sample(by_rank, num_frozen)
        for member in frozen:
            for_s = None if rng.random() < 0.4 else rng.choice([0.5, 1.5, 3.0, 5.0, 8.0]) * PHASE_S
            world.freeze(member, after_s=rng.random() * 2 * PHASE_S, for_s=for_s)
        world.run(until_s=40 * PHASE_S, wait_for=lambda member, frozen=frozen: member not in frozen)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}: two outcomes")
        assert world.errors == [], world.explain(f"seed {seed}")
        assert all(m.finished for m in world.survivors if m not in frozen)


def test_no_fork_when_one_broken_stream_makes_two_leaders() -> None:
    """The suspected leader is alive and may even have finished: the next one asks it before it goes on."""
    for seed in range(150):
        rng = random.Random(seed)
        num_members = 2 + seed % 5
        world = World(seed, num_members, keeps_rounds=rng.random() < 0.5, slowest_s=0.1)
        leader = world.leader()
        member = rng.choice([m for m in world.survivors if m is not leader])
        world.call_later(
            rng.random() * 1.5, lambda world=world, member=member, leader=leader: world.suspect(member, leader.peer_id)
        )
        world.run(until_s=15 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}")
        assert all(m.finished for m in world.survivors)
        assert world.errors == []


@pytest.mark.parametrize("num_members", [2, 3, 4, 6])
def test_two_halves_of_a_partition_never_both_finish_and_end_alike_when_it_heals(num_members: int) -> None:
    """Whichever side has a quorum goes on; with an equal split nobody does until the halves meet again."""
    for seed in range(40):
        rng = random.Random(seed)
        world = World(seed, num_members, witnesses=rng.randrange(4), slowest_s=0.1)
        everyone = [*world.facts.voters]
        rng.shuffle(everyone)
        half = set(everyone[: len(everyone) // 2 if rng.random() < 0.5 else rng.randrange(len(everyone) + 1)])
        starts_s = rng.random() * PHASE_S

        def is_cut(one: PeerId, other: PeerId, half: set[PeerId] = half) -> bool:
            return (one in half) != (other in half)

        world.call_later(starts_s, partial(setattr, world, "cut", is_cut))
        world.call_later(starts_s + rng.choice([3.0, 10.0, 40.0]), partial(setattr, world, "cut", lambda a, b: False))
        world.run(until_s=160 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}: two outcomes")
        assert all(m.finished for m in world.survivors)
        assert world.errors == [], world.explain(f"seed {seed}: an honest member was blamed")


def test_without_a_quorum_nobody_finishes() -> None:
    for seed in range(10):
        world = World(seed, 4, slowest_s=0.1)
        for view in (1, 2):
            world.kill(world.leader(view))
        with pytest.raises(AssertionError, match="not over"):
            world.run(until_s=50 * PHASE_S)
        assert world.roots() == set()


# -- one member's decisions -------------------------------------------------------------------------------


def test_a_leader_proposes_at_once_when_all_are_in_or_gone() -> None:
    _, (leader, second, third) = _facts_and_rounds(3)
    assert leader.close(reason="full", joins=[], view=0, now=0.0) == [
        SendClose(_others(leader), 0, "full"),
        MakeContribution(),
    ]
    assert leader.contributed(contribution(leader.me), now=0.1) == []
    assert leader.on_commit(second.me, 0, contribution(second.me), None, None, now=0.2) == []
    out = leader.unreachable(third.me, now=0.3)
    roster = _only(out, SendRoster).roster
    assert [made.peer_id for made in roster.contributions] == sorted([leader.me, second.me])
    assert [departure.peer_id for departure in roster.leaves] == [third.me]
    assert set(roster.reducers) <= {leader.me, second.me}


def test_a_silent_member_is_asked_twice_and_then_put_off() -> None:
    _, (leader, second, third) = _facts_and_rounds(3)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    leader.on_commit(second.me, 0, contribution(second.me), None, None, now=0.0)
    assert leader.deadline == 2 * PHASE_S
    assert leader.tick(now=2 * PHASE_S) == [SendClose((third.me,), 0, "full")]
    roster = _only(leader.tick(now=3 * PHASE_S), SendRoster).roster
    assert [departure.peer_id for departure in roster.leaves] == [third.me]
    late = leader.on_commit(third.me, 0, contribution(third.me), None, None, now=3.1)
    assert late == [SendRoster((third.me,), roster)]
    third.on_roster(leader.me, roster, now=3.2)
    assert third.left


def test_joins_and_reason_are_on_the_roster() -> None:
    _, (leader,) = _facts_and_rounds(1)
    joiners = [identity.peer_id for identity in identities(3)[1:]]
    leader.close(reason="full", joins=[*joiners, leader.me, joiners[0]], view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    assert leader.roster is not None
    assert leader.roster.joins == tuple(sorted(joiners))
    assert leader.roster.reason == "full"


def test_a_view_change_proposes_the_same_facts_again() -> None:
    """The first leader's roster is known to one member only; parts that moved need not move again."""
    _, (first, second, third) = _facts_and_rounds(3)
    roster = _roster_of(first, [second, third])
    third.on_close(first.me, 0, now=0.9)
    third.contributed(contribution(third.me), now=0.9)
    moved = [i.part for i in third.on_roster(first.me, roster, now=1.0) if isinstance(i, SendPart)]
    assert moved == [part for part, reducer in enumerate(roster.reducers) if reducer != third.me]
    (commit,) = third.unreachable(first.me, now=1.1)
    assert isinstance(commit, SendCommit)
    assert (commit.to, commit.view, commit.roster, commit.result) == (second.me, 1, roster, None)

    assert second.unreachable(first.me, now=1.2) == []
    out = second.on_commit(third.me, 1, commit.contribution, commit.roster, commit.result, now=1.3)
    assert out == [SendClose(_others(second), 1, "the leader is gone"), MakeContribution()]
    assert second.contributed(contribution(second.me), now=1.4) == []  # the first leader is asked again
    again = _only(second.unreachable(first.me, now=1.4), SendRoster).roster
    assert again.view == 1
    assert again.facts_digest() == roster.facts_digest()
    stay = [part for part, reducer in enumerate(roster.reducers) if reducer != first.me]
    assert all(again.reducers[part] == roster.reducers[part] for part in stay)
    resent = [i.part for i in third.on_roster(second.me, again, now=1.5) if isinstance(i, SendPart)]
    assert set(resent) == {p for p, r in enumerate(again.reducers) if r == second.me and roster.reducers[p] == first.me}


def test_facts_are_not_proposed_again_when_nobody_has_their_parts() -> None:
    _, (first, second) = _facts_and_rounds(2)
    idle = contribution(second.me, num_work=0)
    roster = _roster_of(first, [second], {second.me: idle})
    second.on_close(first.me, 0, now=0.0)
    second.contributed(idle, now=0.0)
    second.on_roster(first.me, roster, now=0.1)
    second.unreachable(first.me, now=0.2)
    out = second.unreachable(first.me, now=0.3)  # asked again in the new view, and still gone
    result = _only(out, Finish).result
    assert result.roster.contributions == ()
    assert [departure.peer_id for departure in result.roster.leaves] == [first.me]


def test_a_result_applied_by_one_survivor_is_taken_by_the_next_leader() -> None:
    _, rounds = _facts_and_rounds(3)
    first, second, third = rounds
    result = _result_of(first, [second, third])
    third.on_close(first.me, 0, now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    fetches = third.on_result(result, now=0.1, sender=first.me)
    assert [i.part for i in fetches if isinstance(i, FetchPart)] == [0, 1, 2]
    assert _only(_fetch_all(third, result), Finish).result == result

    (close, _) = second.close(reason="the leader is gone", joins=[], view=1, now=0.2)
    assert isinstance(close, SendClose)
    (commit,) = third.on_close(second.me, 1, now=0.3)
    assert isinstance(commit, SendCommit)
    out = second.on_commit(third.me, 1, commit.contribution, commit.roster, commit.result, now=0.4)
    assert _only(out, SendResult).result == result
    assert {third.me} <= set(next(i for i in out if isinstance(i, FetchPart)).holders)
    assert _only(_fetch_all(second, result), Finish).result.root() == result.root()


def test_a_result_that_nobody_has_applied_is_given_up_when_its_bytes_are_lost() -> None:
    _, (first, second) = _facts_and_rounds(2)
    result = _result_of(first, [second])
    second.on_close(first.me, 0, now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    second.on_result(result, now=0.1, sender=first.me)
    assert second.result is not None
    assert not second.finished
    out = second.unreachable(first.me, now=0.2)
    assert isinstance(out[0], SendClose)
    assert second.result is None
    roster = _only_roster(second, second.unreachable(first.me, now=0.3))
    assert roster.facts_digest() == result.roster.facts_digest()
    assert roster.view == 1


def test_a_dead_leaders_late_result_is_void_once_a_higher_view_is_promised() -> None:
    """The new leader may have asked everyone and found no result: the survivors would disagree."""
    _, (first, second, third) = _facts_and_rounds(3)
    result = _result_of(first, [second, third])
    third.on_close(first.me, 0, now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.unreachable(first.me, now=0.1)
    assert third.on_result(result, now=0.2, sender=first.me) == []
    assert third.result is None
    # From the leader it promised to, or from the store of a peer that lives and has applied it, it binds.
    assert third.on_result(result, now=0.3, sender=second.me) != []
    other = _member_again(third)
    other.on_close(second.me, 1, now=0.0)
    assert other.on_result(result, now=0.3) != []


def test_a_roster_of_a_lower_view_than_promised_is_not_followed() -> None:
    _, (first, second, third) = _facts_and_rounds(3)
    stale, newer = _roster_of(first, [second, third]), _roster_of(second, [third], view=1)
    third.on_roster(second.me, newer, now=0.0)
    assert third.on_roster(first.me, stale, now=0.1) == [SendRoster((first.me,), newer)]
    assert third.roster == newer
    first.on_roster(third.me, newer, now=0.2)
    assert first.roster == newer


def test_a_reduced_part_that_overtakes_its_roster_is_used() -> None:
    _, (first, second, third) = _facts_and_rounds(3)
    contributors = tuple(sorted([first.me, second.me, third.me]))
    roster = _roster_of(first, [second, third])
    moved_to = replace(roster, revision=1, reducers=(second.me,) * 3)
    moved_to = replace(moved_to, signature=identity_of(first.me).sign(moved_to.signed_bytes()))
    third.on_roster(first.me, replace_reducers(roster, (third.me,) * 3, first.me), now=0.0)
    assert third.on_reduced(second.me, reduced_part(0, contributors), now=0.1) == []
    third.on_roster(first.me, moved_to, now=0.2)
    assert third._parts.reduced == {0: reduced_part(0, contributors)}


def test_a_change_of_facts_keeps_only_what_fits() -> None:
    _, (first, second, third) = _facts_and_rounds(3)
    all_three = tuple(sorted([first.me, second.me, third.me]))
    roster = replace_reducers(_roster_of(first, [second, third]), (third.me,) * 3, first.me)
    third.on_close(first.me, 0, now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.on_roster(first.me, roster, now=0.1)
    for part in (0, 1):
        for peer in (first.me, second.me):
            third.on_part(peer, part, now=0.2)
    third.aggregated(reduced_part(0, all_three), now=0.3)
    fresh = _roster_of(second, [third], view=1)
    fresh = replace_reducers(fresh, (third.me,) * 3, second.me)
    out = third.on_roster(second.me, fresh, now=0.4)
    two = tuple(sorted([second.me, third.me]))
    assert [i for i in out if isinstance(i, AggregatePart)] == [AggregatePart(0, two), AggregatePart(1, two)]
    assert third.aggregated(reduced_part(1, all_three), now=0.5) == [AggregatePart(1, two)]
    assert _only(third.aggregated(reduced_part(1, two), now=0.6), SendReduced).reduced == reduced_part(1, two)


def test_a_relieved_reducer_offers_what_it_made_when_the_part_comes_back() -> None:
    _, (first, second, third) = _facts_and_rounds(3)
    contributors = tuple(sorted([first.me, second.me, third.me]))
    roster = _roster_of(first, [second, third])
    third.on_close(first.me, 0, now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.on_roster(first.me, replace_reducers(roster, (third.me,) * 3, first.me), now=0.1)
    third.on_part(first.me, 0, now=0.2)
    assert third.on_part(second.me, 0, now=0.2) == [AggregatePart(0, contributors)]
    elsewhere = replace_reducers(replace(roster, revision=1), (first.me,) * 3, first.me)
    third.on_roster(first.me, elsewhere, now=0.3)
    assert third.aggregated(reduced_part(0, contributors), now=0.4) == []
    back = replace_reducers(replace(roster, revision=2), (third.me,) * 3, first.me)
    out = third.on_roster(first.me, back, now=0.5)
    assert _only(out, SendReduced).reduced == reduced_part(0, contributors)


def test_a_leader_that_stood_still_asks_again_before_it_concludes() -> None:
    _, (first, second) = _facts_and_rounds(2)
    roster = _roster_of(first, [second])
    both = tuple(sorted([first.me, second.me]))
    for part, reducer in enumerate(roster.reducers):
        if reducer == first.me:
            first.on_part(second.me, part, now=0.1)
            first.aggregated(reduced_part(part, both), now=0.1)
    theirs = [part for part, reducer in enumerate(roster.reducers) if reducer == second.me]
    assert theirs
    out = [i for part in theirs for i in first.on_reduced(second.me, reduced_part(part, both), now=9.0)]
    assert isinstance(out[0], SendClose)
    assert out[0].view > 0
    assert first.result is None


def test_unreachable_of_strangers_and_of_oneself_changes_nothing() -> None:
    _, (first, second) = _facts_and_rounds(2)
    for peer in (first.me, PeerId("stranger")):
        assert first.unreachable(peer, now=0.0) == []
    assert (first.view, first._gone) == (0, {})
    assert second.unreachable(first.me, now=0.0) == []
    assert second.leads  # nothing was asked yet: only whom to report to changes
    assert second.on_close(first.me, 0, now=0.1) == [MakeContribution()]  # it lives after all
    assert not second.leads


def test_whoever_left_since_the_order_was_drawn_is_passed_over() -> None:
    facts = facts_of(3, outsiders=2)
    assert facts.leaders[0] not in facts.members
    machine = round_of(facts, facts.members[0])
    assert machine.leader == facts.leaders[2]
    with pytest.raises(RemoteError) as caught:
        machine.on_close(facts.leaders[0], 0, now=0.0)
    assert caught.value.kind == "standing"


# -- what is refused --------------------------------------------------------------------------------------


def test_bad_commits_are_refused_and_change_nothing() -> None:
    facts, (leader, second, third) = _facts_and_rounds(3)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    good = contribution(second.me)
    leader.on_commit(second.me, 0, good, None, None, now=0.1)
    stranger = identities(5)[4].peer_id
    assert stranger not in facts.members
    theirs = contribution(third.me)
    cases = [
        ("equivocation", second.me, 0, contribution(second.me, num_work=2)),
        ("signature", third.me, 0, replace(theirs, signature=bytes(64))),
        ("signature", third.me, 0, replace(theirs, part_digests=theirs.part_digests[::-1])),
        ("protocol", third.me, 0, good),
        ("protocol", third.me, 1, theirs),
        ("protocol", third.me, 3 << 40, theirs),
        ("protocol", third.me, 0, _resigned(replace(theirs, run_id="other"))),
        ("protocol", third.me, 0, _resigned(replace(theirs, stage=StageIndex(2)))),
        ("protocol", third.me, 0, _resigned(replace(theirs, step=Step(8)))),
        ("protocol", third.me, 0, _resigned(replace(theirs, part_digests=theirs.part_digests[1:]))),
        ("protocol", third.me, 0, _resigned(replace(theirs, work=()))),
        ("standing", stranger, 0, contribution(stranger)),
    ]
    before = repr(leader)
    for kind, sender, view, made in cases:
        with pytest.raises(RemoteError) as caught:
            leader.on_commit(sender, view, made, None, None, now=0.2)
        assert caught.value.kind == kind, (kind, str(caught.value))
        assert repr(leader) == before


def test_bad_rosters_are_refused_and_change_nothing() -> None:
    facts, (leader, second, third) = _facts_and_rounds(3)
    good = _roster_of(leader, [second, third])
    stranger = identities(5)[4].peer_id
    forged = tuple(replace(made, signature=bytes(64)) for made in good.contributions)
    no_work = tuple(contribution(made.peer_id, num_work=0) for made in good.contributions)
    crowd = tuple(PeerId(f"joiner {number}") for number in range(64))
    cases: list[tuple[str, Roster]] = [
        ("signature", replace(good, reason="other")),
        ("protocol", _signed(replace(good, run_id="other"), leader.me)),
        ("protocol", _signed(replace(good, stage=StageIndex(0)), leader.me)),
        ("protocol", _signed(replace(good, step=Step(8)), leader.me)),
        ("fork", _signed(replace(good, previous_name=bytes(32)), leader.me)),
        ("protocol", _signed(replace(good, view=1), leader.me)),
        ("protocol", _signed(replace(good, view=3 << 40), leader.me)),
        ("protocol", _signed(replace(good, leader=second.me), second.me)),
        ("protocol", _signed(replace(good, reducers=good.reducers[1:]), leader.me)),
        ("protocol", _signed(replace(good, reducers=(*good.reducers, leader.me)), leader.me)),
        ("standing", _signed(replace(good, reducers=(stranger,) * 3), leader.me)),
        ("signature", _signed(replace(good, contributions=forged), leader.me)),
        ("protocol", _signed(replace(good, contributions=no_work), leader.me)),
        ("standing", _signed(replace(good, contributions=(contribution(stranger),)), leader.me)),
        ("protocol", _signed(replace(good, leaves=(Departure(stranger, ""),)), leader.me)),
        ("protocol", _signed(replace(good, leaves=(Departure(leader.me, ""),), reducers=(second.me,) * 3), leader.me)),
        ("protocol", _signed(replace(good, leaves=(Departure(third.me, ""),), reducers=(second.me,) * 3), leader.me)),
        ("protocol", _signed(replace(good, joins=(second.me,)), leader.me)),
        ("protocol", _signed(replace(good, joins=(stranger, stranger)), leader.me)),
        ("protocol", _signed(replace(good, joins=crowd), leader.me)),
    ]
    before = repr(second)
    for kind, roster in cases:
        with pytest.raises(RemoteError) as caught:
            second.on_roster(leader.me, roster, now=0.0)
        assert caught.value.kind == kind, (kind, str(caught.value))
        assert repr(second) == before
    second.on_roster(leader.me, good, now=0.0)
    with pytest.raises(RemoteError) as caught:
        second.on_roster(leader.me, _signed(replace(good, reason="other"), leader.me), now=0.1)
    assert caught.value.kind == "equivocation"
    assert second.roster == good
    assert facts.members == tuple(sorted(facts.members))


def test_bad_parts_are_refused() -> None:
    _, (leader, second, third) = _facts_and_rounds(3)
    contributors = tuple(sorted([leader.me, second.me, third.me]))
    stranger = identities(5)[4].peer_id
    with pytest.raises(RemoteError):
        second.on_part(leader.me, 0, now=0.0)  # before any roster: the driver holds it back
    second.on_roster(leader.me, _roster_of(leader, [second, third]), now=0.0)
    before = repr(second)
    for sender, part in ((stranger, 0), (leader.me, 3), (leader.me, -1), (leader.me, 1 << 40)):
        with pytest.raises(RemoteError):
            second.on_part(sender, part, now=0.1)
    for kind, sender, reduced in (
        ("standing", stranger, reduced_part(0, contributors)),
        ("protocol", third.me, reduced_part(3, contributors)),
        ("protocol", third.me, reduced_part(-1, contributors)),
        ("protocol", third.me, reduced_part(0, ())),
        ("protocol", third.me, reduced_part(0, (stranger,))),
    ):
        with pytest.raises(RemoteError) as caught:
            second.on_reduced(sender, reduced, now=0.1)
        assert caught.value.kind == kind
    assert repr(second) == before


def test_a_reducer_cannot_fill_memory_with_versions_of_a_part() -> None:
    _, (leader, second, third) = _facts_and_rounds(3)
    second.on_roster(leader.me, _roster_of(leader, [second, third]), now=0.0)
    refused = 0
    for number in range(100):
        made = replace(reduced_part(0, (leader.me,)), digest=number.to_bytes(32, "big"))
        try:
            second.on_reduced(third.me, made, now=0.1)
        except RemoteError:
            refused += 1
    assert len(second._parts.held) + refused == 100
    assert len(second._parts.held) <= 4


def test_bad_results_are_refused_and_change_nothing() -> None:
    _, (leader, second, third) = _facts_and_rounds(3)
    good = _result_of(leader, [second, third])
    stranger = identities(5)[4].peer_id
    swapped = (replace(good.parts[0], digest=bytes(32)), *good.parts[1:])
    cases = [
        ("signature", replace(good, parts=swapped)),
        ("signature", replace(good, signature=bytes(64))),
        ("protocol", _result(replace(good, parts=good.parts[1:]))),
        ("protocol", _result(replace(good, parts=(replace(good.parts[0], contributors=()), *good.parts[1:])))),
        ("protocol", _result(replace(good, parts=(reduced_part(0, (stranger,)), *good.parts[1:])))),
        ("protocol", _result(replace(good, leader=second.me))),
        ("fork", _result(replace(good, roster=_signed(replace(good.roster, previous_name=bytes(32)), leader.me)))),
        ("signature", _result(replace(good, roster=replace(good.roster, reason="other")))),
    ]
    before = repr(second)
    for kind, result in cases:
        with pytest.raises(RemoteError) as caught:
            second.on_result(result, now=0.0, sender=leader.me)
        assert caught.value.kind == kind, (kind, str(caught.value))
        assert repr(second) == before
    second.on_result(good, now=0.0, sender=leader.me)
    _fetch_all(second, good)
    before = repr(second)
    assert second.on_result(good, now=0.1, sender=third.me) == []
    with pytest.raises(RemoteError) as caught:
        second.on_result(_result(replace(good, parts=swapped)), now=0.1, sender=leader.me)
    assert caught.value.kind == "equivocation"
    assert repr(second) == before


# -- scenery ----------------------------------------------------------------------------------------------


def _facts_and_rounds(num_members: int) -> tuple[RoundFacts, list[AveragingRound]]:
    """The facts, and the members' rounds in the order in which they lead."""
    facts = facts_of(num_members)
    return facts, [round_of(facts, peer) for peer in facts.leaders]


def _member_again(machine: AveragingRound) -> AveragingRound:
    return round_of(machine.facts, machine.me)


def _others(machine: AveragingRound) -> tuple[PeerId, ...]:
    return tuple(peer for peer in machine.facts.members if peer != machine.me)


def _only(out: Sequence[object], kind: type[T]) -> T:
    (found,) = [instruction for instruction in out if isinstance(instruction, kind)]
    return found


def _only_roster(machine: AveragingRound, out: Sequence[object]) -> Roster:
    assert out
    assert machine.roster is not None
    return machine.roster


def _roster_of(
    leader: AveragingRound, others: list[AveragingRound], commits: object = None, *, view: int = 0
) -> Roster:
    """The roster that `leader` proposes when these others commit (by default with one microbatch each)."""
    made = dict(commits) if isinstance(commits, dict) else {}
    leader.close(reason="full", joins=[], view=view, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    for peer in _others(leader):
        if peer in [other.me for other in others]:
            leader.on_commit(peer, view, made.get(peer, contribution(peer)), None, None, now=0.0)
        else:
            leader.unreachable(peer, now=0.0)
    assert leader.roster is not None
    return leader.roster


def _result_of(leader: AveragingRound, others: list[AveragingRound]) -> Result:
    """The result that `leader` concludes when every reducer answers."""
    roster = _roster_of(leader, others)
    contributors = tuple(made.peer_id for made in roster.contributions)
    for part, reducer in enumerate(roster.reducers):
        if reducer == leader.me:
            for peer in contributors:
                leader.on_part(peer, part, now=0.0)
            leader.aggregated(reduced_part(part, contributors), now=0.0)
        else:
            leader.on_reduced(reducer, reduced_part(part, contributors), now=0.0)
    assert leader.result is not None
    return leader.result


def _run_alone(machine: AveragingRound) -> Result:
    """The result of a member that reaches nobody."""
    out: list[object] = []
    if not machine.leads:
        for peer in _others(machine):
            machine.unreachable(peer, now=0.0)
    out += machine.close(reason="alone", joins=[], view=machine.view, now=0.0)
    machine.contributed(contribution(machine.me), now=0.0)
    for peer in _others(machine):
        out += machine.unreachable(peer, now=0.0)
    for instruction in out:
        if isinstance(instruction, AggregatePart):
            machine.aggregated(reduced_part(instruction.part, instruction.contributors), now=0.0)
    assert machine.result is not None
    return machine.result


def _fetch_all(machine: AveragingRound, result: Result) -> list[object]:
    return [i for reduced in result.parts for i in machine.part_fetched(reduced.part, reduced.digest)]


def replace_reducers(roster: Roster, reducers: tuple[PeerId, ...], leader: PeerId) -> Roster:
    return _signed(replace(roster, reducers=reducers), leader)


def _signed(roster: Roster, peer: PeerId) -> Roster:
    return replace(roster, signature=identity_of(peer).sign(roster.signed_bytes()))


def _result(result: Result) -> Result:
    return result.signed_by(identity_of(result.leader).sign(result.signed_bytes()))


def _resigned(made: Contribution) -> Contribution:
    return replace(made, signature=identity_of(made.peer_id).sign(made.signed_bytes()))


def test_the_scenery_is_consistent() -> None:
    facts, rounds = _facts_and_rounds(4)
    assert (facts.run_id, facts.stage, facts.step, facts.previous_name) == (RUN_ID, STAGE, STEP, PREVIOUS_NAME)
    rounds[1].check_result(_result_of(rounds[0], rounds[1:]))
