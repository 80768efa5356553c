"""A contribution whose papers are not shown: it does not count, its maker stays, and the round goes on."""

from dataclasses import dataclass, field

import pytest

from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import Instruction, SendBallot, SendClose, SendCommit
from swarm.core.round.proposal import left_by
from swarm.core.round.voting import Proof
from tests.swarm.core.round.round_members import facts_and_rounds, has, only
from tests.swarm.core.round.round_world import Member, World, contribution


@dataclass
class Withheld:
    """Whose papers do not come, and to whom."""

    of: PeerId
    lacks: set[PeerId]
    """Voters who draw what is not shown to them."""
    complained: set[tuple[PeerId, int]] = field(default_factory=set)


class LookingWorld(World):
    """Voters do not vote on a new roster while they lack papers, and tell its leader."""

    withheld: Withheld

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        held = self.withheld
        if not isinstance(instruction, SendBallot) or instruction.proposal.proof.certificate is not None:
            return super()._carry_out(member, instruction)
        roster = instruction.proposal.roster
        if roster is None or roster.contribution_of(held.of) is None:
            return super()._carry_out(member, instruction)
        lacking = set(instruction.to) & held.lacks
        super()._carry_out(member, SendBallot(tuple(sorted(set(instruction.to) - lacking)), instruction.proposal))
        if member.peer_id == held.of:
            return None
        for voter in sorted(lacking):
            if (voter, instruction.proposal.view) not in held.complained:
                held.complained.add((voter, instruction.proposal.view))
                self.call_later(
                    self.rng.random() * 0.2,
                    lambda: self._do(member, member.round.leave_out(held.of, now=self.now)) if member.is_up else None,
                )
        return None


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_lacking", [1, 2, 4])
def test_what_a_voter_lacks_does_not_count_and_stalls_nobody(seed: int, num_lacking: int) -> None:
    world = LookingWorld(seed, 5)
    liar = sorted(world.members)[seed % 5]
    others = [peer for peer in sorted(world.members) if peer != liar]
    world.withheld = Withheld(liar, set(world.rng.sample(others, num_lacking)))
    world.run(until_s=90.0)
    assert len(world.roots()) == 1
    result = next(member.finished for member in world.members.values() if member.finished is not None)
    made = {one.peer_id for one in result.roster.contributions}
    assert set(others) <= made | left_by(result.roster), world.explain("an honest contribution is missing")
    if num_lacking > 1:  # of five, whose votes alone would not have certified it
        assert liar not in made
    assert not left_by(result.roster) & set(others)


def test_a_leader_proposes_no_contribution_whose_papers_it_lacks() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    first.close(reason="full", joins=(), view=facts.first_view, now=0.0)
    first.contributed(contribution(first.me), now=0.0)
    assert first.leave_out(third.me, now=0.0) == []
    for machine in (second, third):
        made = contribution(machine.me)
        proposed = first.on_commit(machine.me, facts.first_view, made, None, None, None, now=0.2)
    roster = only(proposed, SendBallot).proposal.roster
    assert roster is not None
    assert [one.peer_id for one in roster.contributions] == sorted([first.me, second.me])
    assert not roster.leaves


def test_a_leader_that_learns_of_it_late_begins_a_view_of_its_own_and_does_so_once() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    first.close(reason="full", joins=(), view=facts.first_view, now=0.0)
    first.contributed(contribution(first.me), now=0.0)
    for machine in (second, third):
        first.on_commit(machine.me, facts.first_view, contribution(machine.me), None, None, None, now=0.2)
    assert first.asks_votes_for(third.me) is not None
    again = first.leave_out(third.me, now=0.3)
    view = only(again, SendClose).view
    assert view > facts.first_view
    assert facts.leader_of(view) == first.me
    assert not has(first.leave_out(third.me, now=0.4), SendClose)
    assert first.leave_out(first.me, now=0.4) == []


def test_a_leader_with_nothing_to_show_for_its_own_contribution_is_passed_over_at_once() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    view = facts.first_view
    for machine in (second, third):
        assert machine.pass_over(first.me, view, now=0.0) == [], "it has not begun"
        machine.on_close(first.me, view, Proof(), now=0.0)
        machine.contributed(contribution(machine.me), now=0.0)
    assert has(second.pass_over(first.me, view, now=0.1), SendClose)
    told = only(third.pass_over(first.me, view, now=0.1), SendCommit)
    assert (told.to, told.view) == (second.me, view + 1)
    for machine in (second, third):
        assert machine.view == view + 1
        assert machine.pass_over(first.me, view, now=0.2) == [], "what is said of a view that is over"
    assert second.pass_over(second.me, view + 1, now=0.2) == []
