"""A stage is cut, the run key names who goes on, and the line is mended before they have: the round ends all the same.

Whoever was left out does not know of it: its promises are of the voters before, and it asks for theirs.
"""

from dataclasses import replace
from functools import partial

import pytest

from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import AskPromise, SendClose, SendCommit
from swarm.core.round.voting import Promise, Proof, Reconfiguration
from tests.swarm.core.round.round_members import facts_and_rounds, has, only, witnesses_of
from tests.swarm.core.round.round_world import (
    PHASE_S,
    PREVIOUS_NAME,
    STAGE,
    STEP,
    World,
    contribution,
    identity_of,
    run_key,
)


def reconfiguration(voters: tuple[PeerId, ...], *, first_view: int) -> Reconfiguration:
    unsigned = Reconfiguration(STAGE, STEP, PREVIOUS_NAME, first_view, tuple(sorted(voters)))
    return replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))


@pytest.mark.parametrize("healed_after_s", [0.0, 0.3, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("slowest_s", [0.3, 0.6])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_round_ends_when_whoever_was_left_out_comes_back(
    seed: int, kept: int, healed_after_s: float, slowest_s: float
) -> None:
    """Two members and three witnesses; one member and one witness are named, the others reach each other only."""
    world = World(seed, 2, witnesses=3, slowest_s=slowest_s)
    named = (world.leader(kept).peer_id, min(world.outsiders))
    one_half = set(named)

    def mend() -> None:
        world.cut = lambda one, other: False

    def name_voters() -> None:
        member = world.members[named[0]]
        first_view = 64
        while world.facts.leader_of(first_view) != member.peer_id:
            first_view += 1
        changed = reconfiguration(named, first_view=first_view)
        world._do(member, member.round.reconfigure(changed, now=world.now))
        world.call_later(healed_after_s, mend)

    world.cut = lambda one, other: (one in one_half) != (other in one_half)
    world.call_later(10 * PHASE_S, name_voters)
    world.run(until_s=120.0)
    assert len(world.roots()) == 1, world.explain("the round has two outcomes")
    assert not [e for _, e in world.errors if e.kind == "equivocation"], world.explain("somebody is blamed")


@pytest.mark.parametrize("seed", range(10))
def test_members_that_were_started_again_promise_and_vote_once_they_are_named(seed: int) -> None:
    """Three of six voters are silent and four are a quorum: under new voters the same six decide, and nobody leaves."""
    world = World(seed, 5, witnesses=1, slowest_s=0.1)
    for view in range(seed % 2, seed % 2 + 3):
        world.restart(world.leader(view), after_s=0.5 * PHASE_S, down_s=0.1, is_noticed=bool(seed % 3))

    def name_voters() -> None:
        assert not world.roots(), "three votes are no quorum"
        first_view = 64
        changed = reconfiguration((*world.members, *world.outsiders), first_view=first_view)
        for member in world.members.values():
            world._do(member, member.round.reconfigure(changed, now=world.now))

    world.call_later(20 * PHASE_S, name_voters)
    world.run(until_s=60 * PHASE_S)
    assert len(world.roots()) == 1, world.explain("the round has two outcomes")
    (roster,) = {m.finished.roster.facts_digest(): m.finished.roster for m in world.survivors if m.finished}.values()
    assert not roster.leaves
    assert world.errors == []


@pytest.mark.parametrize("seed", range(10))
def test_members_that_were_started_again_under_new_voters_are_silent_until_others_are_named(seed: int) -> None:
    """Three of six voters have signed under the run key's word and lost what they signed: it takes another word."""
    world = World(seed, 5, witnesses=1, slowest_s=0.1)
    everyone = (*world.members, *world.outsiders)
    for view in range(3):
        world.restart(world.leader(view), after_s=0.5 * PHASE_S, down_s=0.1, is_noticed=bool(seed % 2))

    def name_voters(first_view: int, *, then_restart: bool = False) -> None:
        assert not world.roots(), f"before view {first_view}"
        changed = reconfiguration(everyone, first_view=first_view)
        for member in [*world.members.values()]:
            world._do(member, member.round.reconfigure(changed, now=world.now))
            if then_restart and member.started_again:
                world.restart(member, after_s=0.0, down_s=0.1, is_noticed=bool(seed % 2))

    world.call_later(20 * PHASE_S, partial(name_voters, 64, then_restart=True))
    world.call_later(25 * PHASE_S, partial(name_voters, 64))
    world.call_later(50 * PHASE_S, partial(name_voters, 128))
    world.run(until_s=100 * PHASE_S)
    assert len(world.roots()) == 1, world.explain("the round has two outcomes")
    assert not [e for _, e in world.errors if e.kind == "equivocation"], world.explain("somebody is blamed")


def test_a_leader_that_asks_again_and_again_for_a_commitment_it_has_is_given_up() -> None:
    _, (first, second, third) = facts_and_rounds(3)
    third.on_close(first.me, 0, Proof(), now=0.0)
    assert only(third.contributed(contribution(third.me), now=0.0), SendCommit).to == first.me
    deadline = third.deadline
    assert deadline is not None
    assert third.on_close(first.me, 0, Proof(), now=0.0) == [], "a commitment may be long, and what asks for it is not"
    for half in range(1, 2 * int(deadline / PHASE_S)):
        now = 0.5 * half * PHASE_S
        assert only(third.on_close(first.me, 0, Proof(), now=now), SendCommit).to == first.me
        assert third.on_close(first.me, 0, Proof(), now=now + 0.4 * PHASE_S) == []
        assert third.tick(now=now) == []
    assert third.deadline == deadline
    assert only(third.tick(now=deadline), SendCommit).to == second.me


def test_a_member_that_the_run_key_left_out_may_still_lead() -> None:
    facts, (first, second) = facts_and_rounds(2, witnesses=3)
    named = (first.me, witnesses_of(facts)[0])
    view = next(view for view in range(64, 66) if facts.leader_of(view) == first.me)
    second.reconfigure(reconfiguration(named, first_view=view), now=0.0)
    assert only(second.contributed(contribution(second.me), now=0.0), SendCommit).to == first.me
    assert second.deadline is not None
    assert not second.tick(now=second.deadline), "alone it goes no further"
    assert second.on_turned(first.me, view, now=second.deadline) == []
    out = second.tick(now=second.deadline)
    assert second.leads
    assert has(out, SendClose)
    assert not has(out, AskPromise)
    unsigned = Promise(first.me, second.view, None, None)
    promised = facts.election.promised(unsigned, second.changed)
    promise = replace(unsigned, signature=identity_of(first.me).sign(promised))
    out = second.on_commit(first.me, second.view, contribution(first.me), promise, None, None, now=second.deadline or 0)
    assert only(out, AskPromise).to == (named[1],)
