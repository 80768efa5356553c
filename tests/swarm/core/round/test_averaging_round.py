"""Whole rounds under deaths, freezes, false alarms and partitions in `round_world`: one outcome, and it is reached."""

import random
from functools import partial
from typing import Any

import pytest

from swarm.core.ids import PeerId
from tests.swarm.core.round.round_world import PHASE_S, Member, World, witnesses_for


def _is_awaited(frozen: list[Member], member: Member) -> bool:
    return member not in frozen


def first_of(num_blocks: int) -> list[Any]:
    """Blocks of seeds: the first in every test run, the others in soaks."""
    return [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, num_blocks))]


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


@pytest.mark.parametrize("block", first_of(4))
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
                world.call_later(rng.random() * 4 * PHASE_S, partial(world.kill, member))
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


@pytest.mark.parametrize("block", first_of(2))
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
        world.run(until_s=40 * PHASE_S, wait_for=partial(_is_awaited, frozen))
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
        world.call_later(rng.random() * 1.5, partial(world.suspect, member, leader.peer_id))
        world.run(until_s=15 * PHASE_S)
        assert len(world.roots()) == 1, world.explain(f"seed {seed}")
        assert all(m.finished for m in world.survivors)
        assert world.errors == []


@pytest.mark.parametrize("num_members", [2, 4, *(pytest.param(number, marks=pytest.mark.soak) for number in (3, 6))])
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


@pytest.mark.parametrize("block", first_of(2))
def test_members_that_are_started_again_take_part_without_a_vote(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        rng = random.Random(seed)
        num_members = 2 + seed % 5
        num_restarted = rng.randint(1, max(1, num_members // 2))
        world = World(
            seed,
            num_members,
            witnesses=witnesses_for(num_members, num_restarted),
            keeps_rounds=rng.random() < 0.5,
            slowest_s=rng.choice([0.05, 0.1, 0.3]),
        )
        by_rank = [world.leader(view) for view in range(num_members)]
        for member in by_rank[:num_restarted] if rng.random() < 0.5 else rng.sample(by_rank, num_restarted):
            down_s = rng.choice([0.01, 0.05, 0.5, 5.0])
            world.restart(member, after_s=rng.random() * 3 * PHASE_S, down_s=down_s, is_noticed=rng.random() < 0.5)
        world.run(until_s=80 * PHASE_S)
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
