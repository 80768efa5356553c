"""Who is not on a roster: who shows no papers for its contribution stays and does not count; who is there is not put
off, and its work is not left out, where its leader needs its vote or a voter outside has heard it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import (
    Accuse,
    AveragingRound,
    Instruction,
    MakeContribution,
    SendBallot,
    SendClose,
    SendCommit,
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Roster
from swarm.core.round.facts import MOST_OWN_TURNS, RoundFacts
from swarm.core.round.proposal import left_by
from swarm.core.round.voting import Certificate, Proof
from tests.swarm.core.round.round_members import (
    certificate_by,
    closed,
    facts_and_rounds,
    has,
    only,
    proof_by,
    roster_of,
    vote,
)
from tests.swarm.core.round.round_world import HOLD_S, PHASE_S, Member, World, contribution

# -- without papers ---------------------------------------------------------------------------------------


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

    def shows(self, peer: PeerId, voter: Member) -> bool:
        return peer != self.withheld.of or voter.peer_id not in self.withheld.lacks

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        held = self.withheld
        if not isinstance(instruction, SendBallot):
            return super()._carry_out(member, instruction)
        roster = instruction.proposal.new_roster
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


# -- put off ----------------------------------------------------------------------------------------------


def proposed(roster: Roster, proof: Proof | None = None) -> Proposal:
    return Proposal.of_roster(replace(roster, certificate=None), proof or Proof())


def roster_without(machine: AveragingRound, *, keeps: bool, view: int = 0) -> Roster:
    """Of all others' commitments; `keeps`: the member stays, as if it had none to bring."""
    facts = machine.facts
    made = {peer: contribution(peer) for peer in facts.members if keeps or peer != machine.me}
    if keeps:
        made[machine.me] = contribution(machine.me, num_work=0)
    return roster_of(facts, view=view, commits=made)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_member_votes_for_no_new_roster_without_it_and_says_that_it_is_there(keeps: bool) -> None:
    facts, (leader, member, *_) = facts_and_rounds(4)
    member.on_close(leader.me, 0, Proof(), now=0.0)
    member.contributed(contribution(member.me), now=0.0)
    due = member.deadline
    asked = proposed(roster_without(member, keeps=keeps))
    out = member.on_ballot(leader.me, asked, now=0.1)
    assert not has(out, SendVote)
    said = only(out, SendCommit)
    assert (said.to, said.contribution) == (leader.me, contribution(member.me))
    assert member.on_ballot(leader.me, asked, now=0.2) == [], "a leader that answers with the ballot gets no other word"
    assert due is not None
    assert member.deadline is not None
    assert member.deadline <= due + 0.1 * PHASE_S, "asked twice, it waits no longer"
    everyone = proposed(roster_of(facts))
    assert has(member.on_ballot(leader.me, everyone, now=0.3), SendVote)


def test_who_has_nothing_to_bring_votes_for_a_roster_that_keeps_it() -> None:
    _, (leader, member, *_) = facts_and_rounds(4)
    member.on_close(leader.me, 0, Proof(), now=0.0)
    member.contributed(None, now=0.0)
    assert has(member.on_ballot(leader.me, proposed(roster_without(member, keeps=True)), now=0.1), SendVote)


def test_what_a_quorum_has_certified_is_voted_for_by_whom_it_puts_off() -> None:
    facts, (_, second, member, *_) = facts_and_rounds(4)
    member.on_close(facts.leader_of(0), 0, Proof(), now=0.0)
    member.contributed(contribution(member.me), now=0.0)
    first = roster_without(member, keeps=False)
    bound = certificate_by(
        facts, "roster", 0, first.facts_digest(), [peer for peer in facts.voters if peer != member.me]
    )
    again = roster_without(member, keeps=False, view=1)
    assert again.facts_digest() == first.facts_digest()
    out = member.on_ballot(second.me, proposed(again, proof_by(facts, 1, bound=bound)), now=0.1)
    assert has(out, SendVote)


def test_a_leader_begins_again_for_a_late_member_without_whose_vote_it_has_no_quorum() -> None:
    _, (leader, second, third, fourth) = facts_and_rounds(4)
    asked = closed(leader, [second.me])
    assert asked.put_off == {third.me, fourth.me}
    out = leader.on_commit(third.me, 0, contribution(third.me), None, None, None, now=0.2)
    view = only(out, SendClose).view
    assert view > 0
    assert leader.facts.leader_of(view) == leader.me


def test_who_comes_late_and_is_not_needed_is_put_off_unless_the_votes_do_not_come_either() -> None:
    _, (leader, second, third, fourth) = facts_and_rounds(4)
    asked = closed(leader, [second.me, third.me])
    out = leader.on_commit(fourth.me, 0, contribution(fourth.me), None, None, None, now=0.2)
    assert only(out, SendBallot).proposal == asked
    vote(leader, asked, second.me, now=0.3)
    assert leader.deadline is not None
    assert only(leader.tick(now=leader.deadline), SendClose).view > 0


def test_whom_a_voter_outside_has_heard_is_on_the_next_roster_though_the_leader_never_hears_it() -> None:
    facts, (leader, second) = facts_and_rounds(2, witnesses=3)
    asked = closed(leader, [])
    assert asked.put_off == {second.me}
    forged = replace(contribution(second.me), signature=bytes(64))
    assert leader.on_there([forged], now=0.1) == []
    out = leader.on_there([forged, contribution(second.me)], now=0.1)
    view = only(out, SendClose).view
    assert facts.leader_of(view) == leader.me
    assert only(leader.on_there([contribution(second.me, first_id=7)], now=0.1), Accuse)
    assert leader.on_there([contribution(second.me)], now=0.2) == []


def test_whom_a_voter_outside_names_and_who_shows_the_leader_no_papers_all_the_same_undoes_one_view() -> None:
    """A neighbour and a member could else undo each view of each leader: one names it, and it shows nothing."""
    _, (leader, second, third, fourth) = facts_and_rounds(4)
    closed(leader, [second.me, fourth.me])
    assert has(leader.on_there([contribution(third.me)], now=0.1), SendClose)
    leader.leave_out(third.me, now=0.2)
    view = leader.view
    for _ in range(3):
        assert not has(leader.on_there([contribution(third.me)], now=0.3), SendClose)
    assert leader.view == view


def test_whom_another_voter_has_heard_before_votes_are_asked_for_is_on_that_roster() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    leader.close(reason="full", joins=(), view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    leader.on_commit(second.me, 0, contribution(second.me), None, None, None, now=0.1)
    roster = only(leader.on_there([contribution(third.me)], now=0.2), SendBallot).proposal.roster
    assert roster is not None
    assert {made.peer_id for made in roster.contributions} == {*facts.members}


def test_a_leader_begins_no_more_views_of_its_own_than_others_follow_it_to() -> None:
    facts, (leader, second, third, _) = facts_and_rounds(4)
    closed(leader, [second.me])
    for _ in range(MOST_OWN_TURNS):
        leader._lead.ballots.ask(replace(closed_proposal(facts, leader), view=leader.view))
        assert has(leader.on_there([contribution(third.me)], now=0.2), SendClose)
        assert leader.leads
    leader._lead.ballots.ask(replace(closed_proposal(facts, leader), view=leader.view))
    leader.on_there([contribution(third.me)], now=0.3)
    assert not leader.leads


def closed_proposal(facts: RoundFacts, leader: AveragingRound) -> Proposal:
    """A roster with nobody but its leader."""
    return proposed(roster_of(facts, commits={leader.me: contribution(leader.me)}))


def test_a_needless_certificate_makes_no_new_roster_an_old_one() -> None:
    """Whoever looks at papers, at who joins, and at who is missing, looks at new rosters alone."""
    _, (leader, second, *_) = facts_and_rounds(4)
    second.on_close(leader.me, 0, Proof(), now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    shown = Proof((), Certificate("roster", 0, bytes(32), ()))
    with pytest.raises(RemoteError, match="do not allow"):
        second.on_ballot(leader.me, proposed(roster_without(second, keeps=False), shown), now=0.1)


def test_who_was_not_asked_yet_votes_for_no_roster_on_which_it_brings_nothing() -> None:
    _, (leader, second, *_) = facts_and_rounds(4)
    asked = proposed(roster_without(second, keeps=True))
    out = second.on_ballot(leader.me, asked, now=0.0)
    assert has(out, MakeContribution)
    assert not has(out, SendVote)
    assert only(second.contributed(contribution(second.me), now=0.1), SendCommit).to == leader.me


def test_who_is_shown_a_roster_of_a_later_view_gives_its_leader_up_like_any_other() -> None:
    """It leads itself, and waits for nobody: of two members one is more than a third, and turns the voters outside."""
    facts, (first, second) = facts_and_rounds(2, witnesses=4)
    first.close(reason="full", joins=(), view=0, now=0.0)
    first.contributed(contribution(first.me), now=0.0)
    made = roster_of(facts, view=1, commits={second.me: contribution(second.me)})
    voters = [peer for peer in facts.voters if peer != first.me]
    first.on_left_without(proposed(made, proof_by(facts, 1, voters=voters)), now=0.1)
    assert (first.view, first.leads) == (1, False)
    assert first.deadline is not None
    first.tick(now=first.deadline)
    assert first.view > 1


def test_who_is_shown_a_roster_without_it_contributes_though_its_leader_never_called() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    asked = proposed(roster_of(facts, commits={leader.me: contribution(leader.me)}))
    assert asked.roster is not None
    forged = replace(asked, roster=replace(asked.roster, signature=bytes(64)))
    with pytest.raises(RemoteError, match="not signed"):
        second.on_left_without(forged, now=0.1)
    assert has(second.on_left_without(asked, now=0.1), MakeContribution)
    said = only(second.contributed(contribution(second.me), now=0.2), SendCommit)
    assert (said.to, said.view) == (leader.me, 0)
    assert third.on_left_without(proposed(roster_of(facts)), now=0.1) == [], "it is on that one"


class OmittingWorld(World):
    """Its first leader calls nobody and hears nobody: it proposes what it has itself."""

    liar: PeerId

    def _heard_of(self, leader: Member, found: list[Contribution]) -> list[Instruction]:
        return [] if leader.peer_id == self.liar else super()._heard_of(leader, found)

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        to_liar = isinstance(instruction, SendCommit) and instruction.to == self.liar
        if (member.peer_id == self.liar and isinstance(instruction, SendClose)) or to_liar:
            return
        super()._carry_out(member, instruction)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_members", "witnesses"), [(2, 4), (3, 4), (4, 1), (7, 1)])
def test_a_leader_that_asks_nobody_puts_nobody_off(seed: int, num_members: int, witnesses: int) -> None:
    world = OmittingWorld(seed, num_members, witnesses=witnesses)
    world.liar = world.leader().peer_id
    world.run(until_s=90.0)
    assert len(world.roots()) == 1
    result = next(member.finished for member in world.members.values() if member.finished is not None)
    others = {*world.members} - {world.liar}
    assert not left_by(result.roster) & others, world.explain("an honest member is put off")
    assert others <= _of(result.roster.contributions), world.explain("an honest contribution is missing")


class PickingWorld(World):
    """Liars that lead do not hear some, nor of them."""

    liars: set[PeerId]
    victims: set[PeerId]
    calls_them: bool
    """Whether they call their victims to their views."""
    waits: bool
    """Whether they wait as long as for who is late, or for no moment."""

    def _named(self, leader: Member, sender: PeerId, made: Contribution) -> list[Instruction]:
        is_unheard = leader.peer_id in self.liars and made.peer_id in self.victims
        return [] if is_unheard else super()._named(leader, sender, made)

    def _heard_of(self, leader: Member, found: list[Contribution]) -> list[Instruction]:
        if leader.peer_id in self.liars:
            found = [made for made in found if made.peer_id not in self.victims]
        return super()._heard_of(leader, found) if found else []

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        if member.peer_id in self.liars and not self.waits:
            member.round._gone.update(dict.fromkeys(self.victims, "as it says"))
        match instruction:
            case SendCommit(to) if to in self.liars and member.peer_id in self.victims:
                pass
            case SendClose(to, view, reason) if member.peer_id in self.liars and not self.calls_them:
                called = tuple(peer for peer in to if peer not in self.victims)
                super()._carry_out(member, SendClose(called, view, reason))
            case _:
                super()._carry_out(member, instruction)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("calls_them", "waits"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("num_members", "num_liars", "num_victims"), [(4, 1, 1), (5, 1, 1), (7, 1, 2), (7, 2, 2)])
def test_leaders_put_off_nobody_that_is_there_though_its_vote_is_not_needed(
    seed: int, calls_them: bool, waits: bool, num_members: int, num_liars: int, num_victims: int
) -> None:
    world = PickingWorld(seed, num_members, witnesses=1)
    world.liars = {world.leader(view).peer_id for view in range(num_liars)}
    world.victims = {world.leader(num_members - 1 - at).peer_id for at in range(num_victims)}
    world.calls_them, world.waits = calls_them, waits
    world.run(until_s=90.0)
    assert len(world.roots()) == 1
    result = next(member.finished for member in world.members.values() if member.finished is not None)
    assert not left_by(result.roster) & world.victims, world.explain("an honest member is put off")
    assert {*world.members} - world.liars <= _of(result.roster.contributions), world.explain("work is missing")
    ended_at = max(member.finished_at for member in world.members.values())
    assert ended_at < (8 + 8 * num_liars) * PHASE_S, world.explain(f"{ended_at:.1f} s")


class HangingWorld(World):
    """One member is there and never has a contribution."""

    hangs: PeerId

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        if member.peer_id != self.hangs or not isinstance(instruction, MakeContribution):
            super()._carry_out(member, instruction)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num_members", "witnesses", "within_s"), [(2, 4, HOLD_S), (3, 4, 0.0), (4, 1, 0.0), (5, 1, 0.0)]
)
def test_who_is_there_and_brings_nothing_holds_others_up_where_it_is_half_of_all_and_else_not_at_all(
    seed: int, num_members: int, witnesses: int, within_s: float
) -> None:
    world = HangingWorld(seed, num_members, witnesses=witnesses)
    world.hangs = world.leader(1).peer_id
    world.run(until_s=120.0, wait_for=lambda member: member.peer_id != world.hangs)
    ended_at = max(member.finished_at for member in world.members.values() if member.peer_id != world.hangs)
    assert ended_at < within_s + 16 * PHASE_S, world.explain(f"{ended_at:.1f} s")


def _of(made: Iterable[Contribution]) -> set[PeerId]:
    return {one.peer_id for one in made}
