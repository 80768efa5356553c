"""A round whose leader is given up: what the next one must propose, and when members turn to it."""

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import (
    MOST_REVISIONS,
    AggregatePart,
    AskPromise,
    AveragingRound,
    FetchPart,
    Finish,
    Instruction,
    MakeContribution,
    SendBallot,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
    SendTurned,
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.facts import MOST_OWN_TURNS, MOST_VIEWS_AHEAD, RoundFacts
from swarm.core.round.patience import LONGEST_PATIENCE, Waits
from swarm.core.round.voter import MOST_ALONE, RoundVoter, Witness
from swarm.core.round.voting import MOST_VIEWS, Proof
from tests.swarm.core.round.round_members import (
    asked_commit,
    asked_result,
    certified,
    closed,
    facts_and_rounds,
    fetched,
    has,
    led_roster,
    only,
    others,
    promise_by,
    proof_by,
    reduced,
    result_of,
    roster_of,
    signed,
    vote,
    witnesses_of,
)
from tests.swarm.core.round.round_world import (
    PHASE_S,
    Member,
    World,
    cached_verify,
    contribution,
    facts_of,
    identity_of,
    reduced_part,
    round_of,
    witnesses_for,
)

TURN_S = 4 * PHASE_S
"""So long members wait for their first leader."""
LONGEST_TURNED_S = 100 * PHASE_S
ROUND_S = 8 * PHASE_S
"""A round in which one member is silent: its leader waits 3 phases for it, and 2 for its vote."""


def test_a_view_change_proposes_the_certified_facts_again() -> None:
    """The first leader's roster is known to one member only; parts that moved need not move again."""
    facts, (first, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    third.on_close(first.me, 0, Proof(), now=0.9)
    third.contributed(contribution(third.me), now=0.9)
    moved = [i.part for i in third.on_roster(first.me, roster, now=1.0) if isinstance(i, SendPart)]
    assert moved == [part for part, reducer in enumerate(roster.reducers) if reducer != third.me]
    out = third.unreachable(first.me, now=1.1)
    commit = only(out, SendCommit)
    assert only(out, SendTurned).view == commit.view
    assert (commit.to, commit.view, commit.roster, commit.result) == (second.me, 1, roster, None)
    assert commit.promise is not None
    assert commit.promise.roster == (0, roster.facts_digest())

    assert second.unreachable(first.me, now=1.2) == []
    shown = (commit.contribution, commit.promise, commit.roster, commit.result)
    out = second.on_commit(third.me, 1, *shown, now=1.3)
    assert out == [SendClose(others(second), 1, "the leader is gone"), MakeContribution()]
    assert second.contributed(contribution(second.me), now=1.4) == []  # the first leader is asked again
    asked = only(second.unreachable(first.me, now=1.4), SendBallot).proposal
    assert asked.roster is not None
    assert asked.value == roster.facts_digest()
    assert asked.proof.certificate == roster.certificate
    stay = [part for part, reducer in enumerate(roster.reducers) if reducer != first.me]
    assert all(asked.roster.reducers[part] == roster.reducers[part] for part in stay)
    cast = only(third.on_ballot(second.me, asked, now=1.5), SendVote)
    again = only(second.on_vote(third.me, 1, "roster", asked.value, cast.vote, now=1.6), SendRoster).roster
    assert (again.view, again.facts_digest()) == (1, roster.facts_digest())
    resent = [i.part for i in third.on_roster(second.me, again, now=1.7) if isinstance(i, SendPart)]
    assert set(resent) == {p for p, r in enumerate(again.reducers) if r == second.me and roster.reducers[p] == first.me}


def test_of_the_rosters_that_promises_name_the_one_of_the_highest_view_is_proposed_again() -> None:
    """The second leader did not hear of the first one's roster and had another certified."""
    facts, (first, second, third, fourth) = facts_and_rounds(4)
    lower = roster_of(facts)
    higher = roster_of(facts, view=1, commits={p: contribution(p) for p in facts.members if p != first.me})
    third.close(reason="full", joins=(), view=2, now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    asked: Proposal | None = None
    for peer, roster in ((second.me, higher), (first.me, lower), (fourth.me, lower)):
        assert asked is None
        promise = promise_by(facts, peer, 2, roster=roster.certificate)
        out = third.on_commit(peer, 2, contribution(peer), promise, roster, None, now=0.1)
        asked = only(out, SendBallot).proposal if has(out, SendBallot) else None
    assert asked is not None
    assert (asked.value, asked.proof.certificate) == (higher.facts_digest(), higher.certificate)
    assert only(fourth.on_ballot(third.me, asked, now=0.2), SendVote).vote.voter == fourth.me


def test_a_result_that_may_have_been_decided_is_proposed_again() -> None:
    """One survivor voted to commit to it, and so can show it. The dead leader may have applied it."""
    facts, (first, second, third) = facts_and_rounds(3)
    result = result_of(facts, roster_of(facts))
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    fetched(third, result)
    assert has(third.on_ballot(first.me, asked_result(facts, result), now=0.1), SendVote)
    assert has(third.on_ballot(first.me, asked_commit(facts, result), now=0.2), SendVote)

    second.close(reason="the leader is gone", joins=[], view=1, now=0.3)
    second.contributed(contribution(second.me), now=0.3)
    (commit,) = third.on_close(second.me, 1, proof_by(facts, 1), now=0.4)
    assert isinstance(commit, SendCommit)
    assert commit.promise is not None
    assert commit.promise.result == (0, result.root())
    assert commit.result == certified(facts, result, phase="result")
    second.unreachable(first.me, now=0.4)
    shown = (commit.contribution, commit.promise, commit.roster, commit.result)
    out = second.on_commit(third.me, 1, *shown, now=0.5)
    asked = only(out, SendBallot).proposal
    assert (asked.phase, asked.view, asked.value) == ("result", 1, result.root())
    assert {i.part for i in out if isinstance(i, FetchPart)} == {0, 1, 2}
    cast = only(third.on_ballot(second.me, asked, now=0.6), SendVote)
    assert second.on_vote(third.me, 1, "result", asked.value, cast.vote, now=0.7) == []  # its bytes are not here yet
    last = only(fetched(second, result), SendBallot).proposal
    assert last.phase == "commit"
    cast = only(third.on_ballot(second.me, last, now=0.8), SendVote)
    out = second.on_vote(third.me, 1, "commit", last.value, cast.vote, now=0.9)
    assert only(out, Finish).result.root() == result.root()


def test_an_outcome_that_one_survivor_applied_is_taken_by_the_next_leader() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    result = certified(facts, result_of(facts, roster_of(facts)))
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.on_result(result, now=0.1)
    assert fetched(third, result) == [Finish(result)]
    second.close(reason="the leader is gone", joins=[], view=1, now=0.2)
    (sent,) = third.on_close(second.me, 1, proof_by(facts, 1), now=0.3)
    assert sent == SendResult((second.me,), result)
    fetches = second.on_result(result, now=0.4)
    assert all(third.me in i.holders for i in fetches if isinstance(i, FetchPart))
    assert fetched(second, result) == [Finish(result)]


def test_a_commitment_may_bring_the_outcome_with_it() -> None:
    facts, (first, second, _) = facts_and_rounds(3)
    result = certified(facts, result_of(facts, roster_of(facts)))
    first.close(reason="full", joins=[], view=0, now=0.0)
    out = first.on_commit(second.me, 0, contribution(second.me), None, result.roster, result, now=0.1)
    assert first.result == result
    assert only([i for i in out if isinstance(i, SendResult) and i.to == (second.me,)], SendResult).result == result


@pytest.mark.parametrize("view", [0, 1])
def test_the_outcome_counts_whatever_view_was_promised_since(view: int) -> None:
    facts, (first, _, third) = facts_and_rounds(3)
    result = certified(facts, result_of(facts, roster_of(facts)))
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    if view:
        third.unreachable(first.me, now=0.1)
    assert third.view == view
    fetches = third.on_result(result, now=0.2)
    assert [i.part for i in fetches if isinstance(i, FetchPart)] == [0, 1, 2]
    assert third.result == result


def test_a_leader_without_promises_keeps_asking_and_goes_on_when_voters_return() -> None:
    facts, (first, second, third, fourth) = facts_and_rounds(4, witnesses=1)
    out: list[Instruction] = second.close(reason="the leader is gone", joins=[], view=1, now=0.0)
    assert not has(out, AskPromise)
    second.contributed(contribution(second.me), now=0.0)
    out = second.on_commit(third.me, 1, contribution(third.me), promise_by(facts, third.me, 1), None, None, now=0.0)
    assert AskPromise(witnesses_of(facts), 1) in out, "two of four have turned"
    silent = tuple(sorted([first.me, fourth.me]))
    now = 0.0
    for _ in range(6):
        now = second.deadline or 0.0
        assert 0 < now <= 60 * PHASE_S
        out = second.tick(now=now)
        assert out == [AskPromise(witnesses_of(facts), 1), SendClose(silent, 1, "the leader is gone")]
    (witness,) = witnesses_of(facts)
    assert second.on_promise(witness, promise_by(facts, witness, 1), None, None, now=now) == []
    promise = promise_by(facts, fourth.me, 1)
    out = second.on_commit(fourth.me, 1, contribution(fourth.me), promise, None, None, now=now)
    assert out == []  # the promises suffice; the first leader gets until the deadline
    asked = only(second.tick(now=second.deadline or 0.0), SendBallot).proposal
    assert [promise.voter for promise in asked.proof.promises] == sorted([second.me, third.me, fourth.me, witness])
    assert asked.roster is not None
    assert [departure.peer_id for departure in asked.roster.leaves] == [first.me]


def test_a_promise_that_names_what_nobody_shows_does_not_count() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    second.close(reason="the leader is gone", joins=[], view=1, now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    second.unreachable(first.me, now=0.0)
    promise = promise_by(facts, third.me, 1, roster=roster.certificate)
    assert second.on_commit(third.me, 1, contribution(third.me), promise, None, None, now=0.1) == []
    out = second.on_commit(third.me, 1, contribution(third.me), promise, roster, None, now=0.2)
    assert only(out, SendBallot).proposal.value == roster.facts_digest()


def test_a_leader_that_asks_for_what_it_cannot_get_is_given_up() -> None:
    """It was started again, say, and proposes other facts than those that were voted for in the view."""
    facts, (first, second, third) = facts_and_rounds(3)
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    smaller = roster_of(facts, commits={p: contribution(p) for p in facts.members if p != second.me})
    asked = [Proposal.of_roster(replace(made, certificate=None), Proof()) for made in (roster_of(facts), smaller)]
    assert has(third.on_ballot(first.me, asked[0], now=0.0), SendVote)
    deadline = third.deadline
    assert deadline is not None
    for half in range(2 * int(deadline)):
        assert third.on_ballot(first.me, asked[1], now=0.5 * half) == []
        assert third.tick(now=0.5 * half) == []
    assert third.deadline == deadline
    assert only(third.tick(now=deadline), SendCommit).to == second.me


def test_nobody_turns_from_a_leader_that_waits_for_votes_as_long_as_the_run_allows() -> None:
    """Two members say nothing more, and all others have the result: else each view ends before its leader has done."""
    facts, (first, second, *_) = facts_and_rounds(7)
    waits = Waits(opened_at=-200.0, straggler_share=0.1)
    leader, member = (round_of(facts, peer, waits=waits) for peer in (first.me, second.me))
    roster = led_roster(leader)
    asked = reduced(leader)
    member.on_roster(leader.me, roster, now=0.0)
    assert asked.result is not None
    for made, reducer in zip(asked.result.parts, roster.reducers, strict=True):
        member.on_reduced(reducer, made, now=0.0)
    assert has(member.on_ballot(leader.me, asked, now=0.0), SendVote)
    assert vote(leader, asked, *facts.members[1:-2]) == [], "two of seven are waited for"
    assert leader.deadline == 20.0
    member.moved(facts.members[3], now=1.0)  # the last bytes of a part: they end no wait sooner
    assert member._patience.due is not None
    assert member._patience.due > leader.deadline
    while (due := member.deadline) is not None and due <= leader.deadline:
        assert member.tick(now=due) == []
    assert only(leader.tick(now=leader.deadline), SendBallot).proposal.phase == "commit"


def test_for_votes_on_a_result_that_a_quorum_has_nobody_is_waited_for_as_long_again() -> None:
    """A member that never votes held each view up for longer, until the host named other voters; and so on for ever."""
    facts, (_, second, third, *_) = facts_and_rounds(7)
    waits = Waits(opened_at=-200.0, straggler_share=0.5)
    leader, member = (round_of(facts, peer, waits=waits) for peer in (second.me, third.me))
    likely = certified(facts, result_of(facts, roster_of(facts)), phase="result")
    out = leader.close(reason="the leader is gone", joins=(), view=1, now=0.0)
    out += leader.contributed(contribution(leader.me), now=0.0)
    for peer in others(leader):
        promise = promise_by(facts, peer, 1, result=likely.certificate)
        out += leader.on_commit(peer, 1, contribution(peer), promise, likely.roster, likely, now=0.0)
    asked = only(out, SendBallot).proposal
    fetched(leader, likely)
    assert vote(leader, asked, *others(leader)[:-1]) == [], "one may still fetch the bytes"
    assert leader.deadline == 2 * PHASE_S
    assert not has(member.on_ballot(leader.me, asked, now=0.0), SendVote), "it has no bytes yet"
    assert member._patience.due == 4 * PHASE_S
    assert only(leader.tick(now=leader.deadline), SendBallot).proposal.phase == "commit"


def test_a_member_that_missed_the_close_gives_up_a_leader_it_cannot_vote_for() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    result = result_of(facts, roster_of(facts))
    assert third.on_ballot(first.me, asked_commit(facts, result), now=0.0) == []
    assert third.deadline == 4 * PHASE_S
    third.tick(now=4 * PHASE_S)
    assert third.leader == second.me


def test_a_member_waits_longer_for_each_leader_that_stays_silent() -> None:
    """Views must not run away from a stage that is cut in two."""
    facts, rounds = facts_and_rounds(16)
    last = rounds[-1]
    last.on_close(rounds[0].me, 0, Proof(), now=0.0)
    last.contributed(contribution(last.me), now=0.0)
    now, waited = 0.0, []
    while not last.leads:
        assert last.deadline is not None
        waited.append((last.deadline - now) / PHASE_S)
        now = last.deadline
        for one in rounds[:6]:  # alone it would go no further
            last.on_turned(one.me, last.view, now=now)
        last.tick(now=now)
    assert waited[:4] == [4.0, 4.0, 8.0, 8.0]
    assert waited == sorted(waited)
    assert max(waited) <= 4 * LONGEST_PATIENCE
    assert len(waited) == len(facts.members) - 1


def test_a_leader_that_stood_still_first_hears_what_has_come() -> None:
    _, (leader, second) = facts_and_rounds(2)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    assert leader.tick(now=30 * PHASE_S) == []
    out = leader.on_commit(second.me, 0, contribution(second.me), None, None, None, now=30 * PHASE_S)
    asked = only(out, SendBallot).proposal
    assert asked.roster is not None
    assert asked.roster.leaves == ()


def test_unreachable_of_strangers_and_of_oneself_changes_nothing() -> None:
    _, (first, second) = facts_and_rounds(2)
    for peer in (first.me, PeerId("stranger")):
        assert first.unreachable(peer, now=0.0) == []
    assert (first.view, first._gone) == (0, {})
    assert second.unreachable(first.me, now=0.0) == []
    assert second.leads  # nothing was asked yet: only whom to report to changes
    assert second.on_close(first.me, 0, Proof(), now=0.1) == [MakeContribution()]  # it lives after all
    assert not second.leads


def test_whoever_left_since_the_order_was_drawn_is_passed_over() -> None:
    facts = facts_of(3, outsiders=2)
    assert facts.leaders[0] not in facts.members
    assert facts.first_view == 2
    machine = round_of(facts, facts.members[0])
    assert machine.leader == facts.leaders[2]
    with pytest.raises(RemoteError) as caught:
        machine.on_close(facts.leaders[0], 0, Proof(), now=0.0)
    assert caught.value.kind == "standing"


def test_the_first_view_that_a_member_leads_needs_no_promises() -> None:
    facts = facts_of(3, outsiders=2)
    leader = round_of(facts, facts.leaders[2])
    asked = closed(leader, view=2)
    assert asked.proof == Proof()
    member = round_of(facts, others(leader)[0])
    assert has(member.on_ballot(leader.me, asked, now=0.0), SendVote)


def test_the_scenery_is_consistent() -> None:
    facts, rounds = facts_and_rounds(4)
    result = certified(facts, result_of(facts, roster_of(facts)))
    rounds[1].check_result(result)
    assert signed(result.roster) == result.roster
    assert facts.election.bound(1, proof_by(facts, 1, bound=result.roster.certificate), cached_verify) is not None


def test_a_leader_that_was_started_again_goes_on_with_the_roster_it_had_certified() -> None:
    """A second roster of the view, with other reducers say, would be taken for equivocation."""
    facts, (first, second, third) = facts_and_rounds(3)
    roster = led_roster(first)
    again = round_of(facts, first.me, votes=False)
    again.close(reason="again", joins=[], view=0, now=0.0)
    again.contributed(contribution(again.me), now=0.0)
    again.unreachable(third.me, now=0.1)
    out = again.on_commit(second.me, 0, contribution(second.me), None, roster, None, now=0.2)
    assert only(out, SendRoster).roster == again.roster == roster
    assert not has(out, SendBallot)
    asked = reduced(again)
    assert (asked.phase, asked.proof.certificate) == ("result", roster.certificate)


def test_a_part_left_empty_in_one_view_may_be_brought_in_the_next() -> None:
    """The leader gave up parts that nobody brought it, but its result was not certified before it was given up."""
    facts, (first, second, third) = facts_and_rounds(3)
    idle = {peer: contribution(peer, num_work=0) for peer in (first.me, second.me)}
    vote(first, closed(first, commits=idle), second.me, third.me)
    out: list[Instruction] = [*first.unreachable(third.me, now=0.0)]
    for _ in range(20):
        out += first.tick(now=first.deadline or 0.0)
        if has(out, SendBallot):
            break
    proposal = only(out, SendBallot).proposal
    assert proposal.result is not None
    assert all(made.is_empty for made in proposal.result.parts)
    again = roster_of(facts, view=1, commits={third.me: contribution(third.me), **idle}, reducers=(first.me,) * 3)
    out = [*first.on_roster(second.me, again, now=99.0)]
    assert not has(out, SendReduced)
    assert only(first.on_part(third.me, 0), AggregatePart).contributors == (third.me,)


def test_a_leader_that_asks_and_asks_for_a_result_that_its_reducers_did_not_sign_buys_no_time() -> None:
    facts, (first, second, _) = facts_and_rounds(3)
    result = result_of(facts, roster_of(facts))
    second.on_ballot(first.me, asked_result(facts, result), now=0.0)
    due = second._patience.due
    assert due is not None
    for asked in range(1, 4):
        second.on_ballot(first.me, asked_result(facts, result), now=asked * PHASE_S)
        assert second._patience.due == due
    second.part_fetched(result.parts[0], now=3 * PHASE_S)
    assert second._patience.due is not None
    assert second._patience.due > due, "what comes does"


def others_turned(world: World, liar: Member, lie: str) -> None:
    """The liar calls for its own view after each of the others', or tells each next leader that its view is due."""
    honest = [member for member in world.members.values() if member is not liar]
    view = 1 + max(member.round.view for member in honest)
    while (world.facts.leader_of(view) == liar.peer_id) != (lie == "close"):
        view += 1
    promise = promise_by(world.facts, liar.peer_id, view)
    told = honest if lie == "close" else [world.members[world.facts.leader_of(view)]]
    for member in told:
        if lie == "close":
            out = member.round.on_close(liar.peer_id, view, Proof((promise,)), now=world.now)
        else:
            made = contribution(liar.peer_id)
            out = member.round.on_commit(liar.peer_id, view, made, promise, None, None, now=world.now)
        world._do(member, out)
    for outsider in world.outsiders.values() if lie == "close" else ():
        with suppress(TransientError):
            outsider.witness.on_ask(liar.peer_id, view, Proof((promise,)), now=world.now)
    if not all(member.finished for member in honest):
        world.call_later(0.1, lambda: others_turned(world, liar, lie))


@pytest.mark.parametrize("turn", [0, 1, -1])
@pytest.mark.parametrize("lie", ["close", "commit"])
@pytest.mark.parametrize("num_members", [4, 8])
def test_one_member_turns_no_other_from_a_leader_that_does_its_work(num_members: int, lie: str, turn: int) -> None:
    """It does nothing else in the round but begin it, if it leads the first view."""
    world = World(num_members, num_members)
    liar, second = world.leader(turn), world.leader(1)
    honest = [member for member in world.members.values() if member is not liar]
    liar.frozen = True
    for member in honest if turn == 0 else ():
        world._do(member, member.round.on_close(liar.peer_id, 0, Proof(), now=0.0))
    world.call_later(0.05, partial(others_turned, world, liar, lie))
    world.run(until_s=60.0, wait_for=lambda member: member is not liar)
    ended_at = max(member.finished_at for member in honest)
    led_by = {member.finished.roster.leader for member in honest if member.finished}
    assert led_by == {second.peer_id if turn == 0 else world.leader().peer_id}
    assert ended_at < ROUND_S + (TURN_S if turn == 0 else 0), world.explain(f"{ended_at:.1f} s")


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("lie", ["close", "commit"])
def test_of_two_members_that_are_there_one_keeps_the_other_from_ending_no_round(
    lie: str, turn: int, num_members: int
) -> None:
    """Its word was enough to turn the other, and voters outside, from each view that the other led."""
    world = World(2, num_members, witnesses=witnesses_for(num_members, num_members - 1))
    liar, other = world.leader(turn), world.leader(1 - turn)
    liar.frozen = liar.answers = True
    for member in world.members.values():
        if member not in (liar, other):
            world.kill(member)
    if turn == 0:
        world._do(other, other.round.on_close(liar.peer_id, 0, Proof(), now=0.0))
    world.call_later(0.05, partial(others_turned, world, liar, lie))
    world.run(until_s=200.0, wait_for=lambda member: member is not liar)
    assert other.finished is not None
    assert other.finished.roster.leader == other.peer_id
    assert other.finished_at < LONGEST_TURNED_S, world.explain(f"{other.finished_at:.1f} s")


def test_a_leader_follows_the_one_other_member_of_which_it_hears() -> None:
    """A third was fetching the result before, and answered: two members waited for each other in two views until their
    patience was over, for minutes on slow lines."""
    _, (first, second, third) = led_by_two(third_votes=False)
    first.on_turned(second.me, 1, now=0.1)
    assert first.view == 1
    _, (first, second, third) = led_by_two(third_votes=True)
    first.on_turned(second.me, 1, now=0.1)
    assert first.view == 0, "the third is there, and its vote is enough"
    first.on_turned(third.me, 1, now=0.2)
    assert first.view == 1


def test_so_does_one_that_waits_for_votes_on_its_roster() -> None:
    """The other turned before it had voted, and a third is at another step: votes were asked for, for ever."""
    _, (first, second, _) = facts_and_rounds(3, witnesses=2)
    first.close(reason="full", joins=(), view=0, now=0.0)
    first.contributed(contribution(first.me), now=0.0)
    first.on_commit(second.me, 0, contribution(second.me), None, None, None, now=0.0)
    now = 0.0
    while not first._lead.asks("roster"):
        now += 1.0
        first.tick(now=now)
    first.on_turned(second.me, 1, now=now)
    assert first.view == 0, "the third may vote in time"
    while first.view == 0 and now < 40.0:
        now += 1.0
        first.tick(now=now)
    assert first.view == 1


@pytest.mark.parametrize("far", [1, 20, 2000])
def test_one_liar_keeps_no_leader_from_members_that_stood_still(far: int) -> None:
    """While they did, it led the leader away time after time, or once so far that they never came there."""
    world = World(2, 4, calls_time_out=False)
    leader, liar = world.leader(0), world.leader(2)
    liar.frozen = True
    honest = [member for member in world.members.values() if member is not liar]
    for member in honest:
        if member is not leader:
            world.freeze(member, after_s=0.0, for_s=9 * world.facts.phase_s)

    def lead_away() -> None:
        view = leader.round._promised + far
        while world.facts.leader_of(view) != liar.peer_id:
            view += 1
        world._do(leader, leader.round.on_turned(liar.peer_id, view, now=world.now))
        if not all(member.finished for member in honest):
            world.call_later(0.1, lead_away)

    def once_votes_are_late() -> None:
        if leader.round._lead._votes_are_late:
            lead_away()
        elif not leader.finished:
            world.call_later(0.1, once_votes_are_late)

    world.call_later(0.05, once_votes_are_late)
    world.run(until_s=120.0, wait_for=lambda member: member is not liar)
    assert all(member.finished for member in honest), world.explain("two minutes")
    assert max(member.finished_at for member in honest) < 60.0 * world.facts.phase_s


def led_by_two(*, third_votes: bool) -> tuple[RoundFacts, list[AveragingRound]]:
    """The first of three leads, with a roster to which the third brings nothing."""
    facts, rounds = facts_and_rounds(3, witnesses=2)
    first, second, third = rounds
    asked = closed(first, [second.me])
    vote(first, asked, *([third.me] if third_votes else []), second.me, *witnesses_of(facts))
    assert first.roster is not None
    assert third.me not in {made.peer_id for made in first.roster.contributions}
    return facts, rounds


def test_a_far_view_of_one_alone_hides_none_to_which_others_have_turned() -> None:
    _, (first, second, third) = led_by_two(third_votes=False)
    first._num_led_away = MOST_ALONE
    first.on_turned(second.me, 40, now=0.1)
    assert first.view == 0
    first.on_turned(third.me, 4, now=0.2)
    assert first.view == 4


class Withholding(World):
    """Some members contribute and vote for rosters, and for nothing else; all the time they tell every leader that they
    have turned to the next view that they lead."""

    liars: tuple[Member, ...] = ()

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        if member in self.liars:
            is_vote = isinstance(instruction, SendVote) and instruction.proposal.phase != "roster"
            if is_vote or isinstance(instruction, SendClose | SendBallot | SendRoster | AskPromise | SendTurned):
                return
        super()._carry_out(member, instruction)

    def lead_away(self) -> None:
        honest = [member for member in self.members.values() if member not in self.liars]
        for liar, member in itertools.product(self.liars, honest):
            if not member.finished and member.round._lead.has_roster:
                view = member.round._promised + 1
                while self.facts.leader_of(view) != liar.peer_id:
                    view += 1
                self._do(member, member.round.on_turned(liar.peer_id, view, now=self.now))
        if not all(member.finished for member in honest):
            self.call_later(0.1, self.lead_away)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("num_members", "num_liars", "num_with_work", "witnesses"), [(8, 2, 4, 0), (8, 1, 2, 0), (4, 1, 2, 0), (3, 1, 2, 2)]
)
def test_who_has_nothing_to_bring_and_votes_is_there(
    num_members: int, num_liars: int, num_with_work: int, witnesses: int, seed: int
) -> None:
    """Else few liars on a roster of few lead its leader away for as long as they like."""
    world = Withholding(seed, num_members, witnesses=witnesses)
    order = [world.leader(turn) for turn in range(num_members)]
    world.liars = tuple(order[-num_liars:])
    working = (*order[: num_with_work - num_liars], *world.liars)
    for member in order:
        member.num_work = int(member in working)
    world.call_later(0.05, world.lead_away)
    world.run(until_s=60.0, wait_for=lambda member: member not in world.liars)
    assert max(member.finished_at for member in order if member not in world.liars) < 2 * ROUND_S


def test_members_follow_to_a_view_that_so_many_voters_have_promised_that_no_lower_one_can_end() -> None:
    """Two voters outside did not hear the members of a first view within seconds, and promised a third one's: no view
    had a quorum, for ten minutes."""
    facts, (first, second, third) = facts_and_rounds(3, witnesses=2)
    outside = witnesses_of(facts)
    first.close(reason="full", joins=(), view=0, now=0.0)
    second.on_close(first.me, 0, Proof(), now=0.0)
    for member in (first, second):
        member.contributed(contribution(member.me), now=0.0)

    def shown(*peers: PeerId) -> Proof:
        return Proof(tuple(promise_by(facts, peer, 2) for peer in sorted(peers)))

    for member in (first, second):
        assert not has(member.on_close(third.me, 2, shown(third.me), now=0.1), SendCommit)
        assert not has(member.on_close(third.me, 2, shown(outside[0]), now=0.1), SendCommit)
        assert member.view == 0
        out = member.on_close(third.me, 2, shown(*outside), now=0.1)
        assert only(out, SendCommit).view == 2


def test_a_leader_shows_the_promises_of_voters_outside_too() -> None:
    facts, (_, second, third) = facts_and_rounds(3, witnesses=2)
    second.close(reason="the leader is gone", joins=(), view=1, now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    second.on_commit(third.me, 1, contribution(third.me), promise_by(facts, third.me, 1), None, None, now=0.1)
    for voter in witnesses_of(facts):
        second.on_promise(voter, promise_by(facts, voter, 1), None, None, now=0.2)
    assert {one.voter for one in second.turned.promises} == {second.me, third.me, *witnesses_of(facts)}


def test_in_a_stage_of_two_one_members_word_uses_up_no_views() -> None:
    """One of two is more than a third: its word turns the other, but not to where views end."""
    facts, (first, second) = facts_and_rounds(2, witnesses=2)
    second.on_close(first.me, 0, Proof(), now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    far = MOST_VIEWS - MOST_VIEWS % 2
    step = MOST_VIEWS_AHEAD // 2
    for view in (step, 2 * step, 3 * step, far):  # it is brought on once, and no further before its own time
        second.on_turned(first.me, view, now=0.1)
        assert second.view <= step
    second = round_of(facts, second.me)
    second.on_close(first.me, 0, Proof(), now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    second.on_close(first.me, far, Proof((promise_by(facts, first.me, far),)), now=0.1)
    assert second.view == 0
    outside = witnesses_of(facts)[0]
    witness = Witness(RoundVoter(facts, outside, identity_of(outside).sign, cached_verify))
    with pytest.raises(TransientError, match="further from"):
        witness.on_ask(first.me, far, Proof((promise_by(facts, first.me, far),)), now=0.0)
    assert witness.on_ask(first.me, 4, Proof((promise_by(facts, first.me, 4),)), now=0.0) is not None
    second.on_close(first.me, 4, Proof((promise_by(facts, first.me, 4),)), now=0.2)
    assert second.view == 4


def test_a_leader_has_few_later_views_of_its_own_and_none_of_them_buys_time() -> None:
    _, (first, second, *_) = facts_and_rounds(4)
    second.on_close(first.me, 0, Proof(), now=0.0)
    second.contributed(contribution(second.me), now=0.0)
    due = second.deadline
    for view in range(4, 40, 4):
        second.on_close(first.me, view, Proof(), now=0.1)
    assert second.view == 4 * MOST_OWN_TURNS
    assert second.deadline == due
    assert second.tick(now=due or 0.0)
    assert second.leader != first.me


def test_who_begins_its_turn_anew_takes_nobody_to_the_views_in_between() -> None:
    """It may vote in none of them: where some lie, they may have no quorum without it."""
    facts, (first, second, third, fourth) = facts_and_rounds(4)
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    assert third.on_turned(second.me, 1, now=0.1) == [], "one is impatient"
    again = Proof((promise_by(facts, first.me, 4),))
    commit = only(third.on_close(first.me, 4, again, now=0.2), SendCommit)
    assert (commit.to, commit.view) == (first.me, 4)
    fourth.on_close(first.me, 0, Proof(), now=0.0)
    fourth.contributed(contribution(fourth.me), now=0.0)
    fourth.on_turned(second.me, 1, now=0.1)
    commit = only(fourth.on_turned(third.me, 1, now=0.2), SendCommit)
    assert (commit.to, commit.view) == (second.me, 1), "two have found the leader gone"


@pytest.mark.parametrize("num_views", [0, 1, MOST_OWN_TURNS])
@pytest.mark.parametrize("num_members", [4, 6, 8])
def test_a_leader_that_calls_to_later_views_of_its_own_and_is_silent_is_given_up(
    num_members: int, num_views: int
) -> None:
    """It lives, so nobody thinks it gone; who follows it sees nobody else there, yet that view is of the same turn."""
    world = World(num_members, num_members, calls_time_out=False)
    liar = world.leader()
    honest = [member for member in world.members.values() if member is not liar]
    liar.frozen = True
    for turn in range(1 + num_views):
        for member in honest:
            out = member.round.on_close(liar.peer_id, turn * num_members, Proof(), now=0.0)
            world._do(member, out)
    world.run(until_s=60.0, wait_for=lambda member: member is not liar)
    led_by = {member.finished.roster.leader for member in honest if member.finished}
    assert led_by
    assert liar.peer_id not in led_by


def test_nobody_turns_from_a_roster_before_its_reducers_could_say_who_is_silent() -> None:
    """A view that ends sooner begins their waits anew, and one follows the other for ever."""
    facts, (leader, _, third, fourth) = facts_and_rounds(4)
    silence_s = 20 * PHASE_S
    for one in (third, fourth):
        one.waits = replace(one.waits, silence_s=silence_s)
        one.contributed(contribution(one.me), now=0.0)
        one.on_roster(leader.me, roster_of(facts), now=1.0)
        assert one._patience.due == 1.0 + silence_s + 2 * PHASE_S
    again = roster_of(facts, revision=1)
    third.on_roster(leader.me, again, now=10.0)
    assert third._patience.due == 1.0 + silence_s + 2 * PHASE_S, "a later roster of the view buys no time"
    everyone = tuple(made.peer_id for made in again.contributions)
    for part, reducer in enumerate(roster_of(facts).reducers):
        if reducer == fourth.me:
            for peer in everyone:
                fourth.on_part(peer, part)
            fourth.aggregated(reduced_part(part, everyone), now=2.0)
        else:
            fourth.on_reduced(reducer, reduced_part(part, everyone), now=2.0)
    assert fourth._patience.due == 2.0 + TURN_S, "nothing is awaited but the leader"


def test_who_has_turned_brings_its_parts_to_those_who_have_not() -> None:
    """Otherwise a quorum that stays with a slow leader would leave out a member that is merely ahead of it."""
    facts, (leader, second, third, fourth) = facts_and_rounds(4)
    third.on_close(leader.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    assert has(third.tick(now=third.deadline or 0.0), SendTurned)
    assert (third.view, third.leader) == (1, second.me)
    due = third._patience.due
    roster = roster_of(facts)
    out = third.on_roster(leader.me, roster, now=5.0)
    wanted = {(reducer, part) for part, reducer in enumerate(roster.reducers) if reducer != third.me}
    assert wanted
    assert {(one.to, one.part) for one in out if isinstance(one, SendPart)} == wanted
    assert (third.view, third._patience.due) == (1, due), "it has turned, and waits for its own leader as before"
    everyone = tuple(made.peer_id for made in roster.contributions)
    assert third.expected_digest(0, fourth.me)
    result = result_of(facts, roster)
    assert not has(third.on_ballot(leader.me, asked_result(facts, result), now=5.0), SendVote)
    for part, reducer in enumerate(roster.reducers):
        if reducer != third.me:
            third.on_reduced(reducer, reduced_part(part, everyone), now=5.0)
    assert not has(third.on_roster(leader.me, roster, now=5.0), SendPart), "once"
    later = roster_of(facts, view=1)
    third.on_roster(second.me, later, now=5.0)
    assert third.roster == later
    assert not has(third.on_roster(leader.me, roster_of(facts, revision=1), now=5.0), SendPart), (
        "it follows a later one"
    )


def test_a_leader_that_revises_its_roster_again_and_again_is_given_up() -> None:
    facts, (leader, second, third, _) = facts_and_rounds(4)
    third.contributed(contribution(third.me), now=0.0)
    revision, now = 0, 0.0
    while third.leader == leader.me:
        reducer = (leader, second)[revision % 2].me
        roster = roster_of(facts, revision=revision, reducers=(reducer,) * facts.num_parts)
        third.on_roster(leader.me, roster, now=now)
        assert third.roster == roster, "it is followed all the same"
        revision += 1
        for _ in range(3):
            now += PHASE_S
            third.tick(now=now)
    assert MOST_REVISIONS < revision <= MOST_REVISIONS + 3


def test_who_looks_on_while_others_exchange_parts_waits_longer_for_their_leader() -> None:
    """It turned to the next view alone, and its vote was missing when the parts were there: 4 minutes on slow lines."""
    facts, (leader, second, idle) = facts_and_rounds(3)
    nothing = contribution(idle.me, num_work=0)
    working = {peer: contribution(peer) for peer in (leader.me, second.me)}
    roster = roster_of(facts, commits={**working, idle.me: nothing}, reducers=(leader.me, second.me, second.me))
    assert idle.me not in roster.reducers
    for member, made in ((second, contribution(second.me)), (idle, nothing)):
        member.on_close(leader.me, 0, Proof(), now=0.0)
        member.contributed(made, now=0.0)
        member.on_roster(leader.me, roster, now=0.0)
    assert idle._patience.due == 2 * (second._patience.due or 0.0)
