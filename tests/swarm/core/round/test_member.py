"""One member of a round: what it does on each message, death and deadline, as leader, voter and reducer."""

from dataclasses import replace
from itertools import product

import pytest

from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import (
    AGAIN_PHASES,
    AggregatePart,
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
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Exclusion, Rate, ReducedPart
from swarm.core.round.lead import ABSENT_SHARE, MAX_RELIEFS
from swarm.core.round.patience import UNBROUGHT_PHASES
from swarm.core.round.voting import Proof, quorum
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
    cached_verify,
    contribution,
    identities,
    identity_of,
    reduced_part,
    round_of,
)

# -- the roster -------------------------------------------------------------------------------------------


def test_a_leader_proposes_at_once_when_all_are_in_or_gone() -> None:
    _, (leader, second, third) = facts_and_rounds(3)
    assert leader.close(reason="full", joins=[], view=0, now=0.0) == [
        SendClose(others(leader), 0, "full"),
        MakeContribution(),
    ]
    assert leader.contributed(contribution(leader.me), now=0.1) == []
    assert leader.on_commit(second.me, 0, contribution(second.me), None, None, None, now=0.2) == []
    (asked,) = leader.unreachable(third.me, now=0.3)
    assert isinstance(asked, SendBallot)
    assert asked.to == others(leader)  # whoever seems gone may vote all the same
    roster = asked.proposal.roster
    assert roster is not None
    assert [made.peer_id for made in roster.contributions] == sorted([leader.me, second.me])
    assert [departure.peer_id for departure in roster.leaves] == [third.me]
    assert set(roster.reducers) <= {leader.me, second.me}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_leader_waits_a_phase_for_a_late_member_once_all_others_are_there_and_less_if_it_is_not_at_the_step(
    is_there: bool,
) -> None:
    facts, _ = facts_and_rounds(4)
    first, second, third, slow = facts.leaders
    leader = round_of(replace(facts, late=(slow,)), first)
    leader.close(reason="full", joins=[], unheard=[third] if is_there else [third, slow], view=0, now=0.0)
    leader.contributed(contribution(first), now=0.0)
    assert leader.on_commit(second, 0, contribution(second), None, None, None, now=0.1) == []
    assert leader.deadline == 2 * facts.phase_s
    assert leader.on_commit(third, 0, contribution(third), None, None, None, now=0.2) == []
    assert leader.deadline == 0.2 + (1 if is_there else ABSENT_SHARE) * facts.phase_s
    asked = only(leader.tick(now=leader.deadline), SendBallot).proposal
    assert asked.roster is not None
    assert [departure.peer_id for departure in asked.roster.leaves] == [slow]


def test_no_part_moves_before_the_roster_is_certified() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    asked = closed(leader, [second.me])
    assert leader.roster is None
    out = vote(leader, asked, second.me)
    roster = only(out, SendRoster).roster
    assert only(out, SendRoster).to == (second.me,)  # the third is put off and gone
    assert roster.certificate is not None
    assert [cast.voter for cast in roster.certificate.votes] == sorted([leader.me, second.me])
    facts.check_roster(roster, cached_verify, certified=True)
    moved = {i.part for i in out if isinstance(i, SendPart)}
    assert moved == {part for part, reducer in enumerate(roster.reducers) if reducer == second.me}
    assert vote(leader, asked, third.me) == []


def test_a_silent_member_is_asked_twice_and_then_put_off() -> None:
    _, (leader, second, third) = facts_and_rounds(3)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    leader.on_commit(second.me, 0, contribution(second.me), None, None, None, now=0.0)
    assert leader.deadline == 2 * PHASE_S
    assert leader.tick(now=2 * PHASE_S) == [SendClose((third.me,), 0, "full")]
    asked = only(leader.tick(now=3 * PHASE_S), SendBallot).proposal
    assert asked.roster is not None
    assert [departure.peer_id for departure in asked.roster.leaves] == [third.me]
    late = leader.on_commit(third.me, 0, contribution(third.me), None, None, None, now=3.1)
    assert late == [SendBallot((third.me,), asked)]  # it came too late to contribute, but it votes
    roster = only(vote(leader, asked, third.me, now=3.2), SendRoster).roster
    again = leader.on_commit(third.me, 0, contribution(third.me), None, None, None, now=3.3)
    assert again == [SendRoster((third.me,), roster)]
    third.on_roster(leader.me, roster, now=3.4)
    assert third.left


def test_joins_neighbours_and_reason_are_on_the_roster() -> None:
    _, (leader,) = facts_and_rounds(1)
    joiners = [identity.peer_id for identity in identities(3)[1:]]
    near = [PeerId("b"), PeerId("a"), PeerId("b")]
    leader.close(reason="full", joins=[*joiners, leader.me, joiners[0]], neighbours=near, view=0, now=0.0)
    leader.contributed(contribution(leader.me), now=0.0)
    assert leader.roster is not None
    assert leader.roster.joins == tuple(sorted(joiners))
    assert leader.roster.neighbours == ("a", "b")
    assert leader.roster.reason == "full"


def test_a_roster_of_a_lower_view_than_promised_is_not_followed() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    stale, newer = roster_of(facts), roster_of(facts, view=1)
    third.on_roster(second.me, newer, now=0.0)
    assert third.on_roster(first.me, stale, now=0.1) == [SendRoster((first.me,), newer)]
    assert third.roster == newer
    first.on_roster(third.me, newer, now=0.2)
    assert first.roster == newer


def test_a_leader_asks_whoever_has_not_voted_again_for_ever() -> None:
    facts, (leader, second, _, _) = facts_and_rounds(4, witnesses=1)
    asked = closed(leader)
    vote(leader, asked, second.me)
    silent = tuple(peer for peer in facts.voters if peer not in (leader.me, second.me))
    for _ in range(20):
        now = leader.deadline
        assert now is not None
        assert leader.tick(now=now) == [SendBallot(silent, asked)]
    out = vote(leader, asked, *silent)
    assert only(out, SendRoster).roster == leader.roster


# -- parts ------------------------------------------------------------------------------------------------


def test_a_reduced_part_that_overtakes_its_roster_is_used() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    third.on_roster(first.me, roster_of(facts, reducers=(third.me,) * 3), now=0.0)
    assert third.on_reduced(second.me, reduced_part(0, facts.members), now=0.1) == []
    third.on_roster(first.me, roster_of(facts, reducers=(second.me,) * 3, revision=1), now=0.2)
    assert third._reduction.parts.reduced == {0: reduced_part(0, facts.members)}


def test_a_change_of_facts_keeps_only_what_fits() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.on_roster(first.me, roster_of(facts, reducers=(third.me,) * 3), now=0.1)
    for part in (0, 1):
        for peer in (first.me, second.me):
            third.on_part(peer, part)
    third.aggregated(reduced_part(0, facts.members), now=0.3)
    two = tuple(sorted([second.me, third.me]))
    fresh = roster_of(facts, view=1, commits={p: contribution(p) for p in two}, reducers=(third.me,) * 3)
    out = third.on_roster(second.me, fresh, now=0.4)
    assert [i for i in out if isinstance(i, AggregatePart)] == [AggregatePart(0, two, ()), AggregatePart(1, two, ())]
    assert third.aggregated(reduced_part(1, facts.members), now=0.5) == [AggregatePart(1, two, ())]
    assert only(third.aggregated(reduced_part(1, two), now=0.6), SendReduced).reduced == reduced_part(1, two)


def test_a_relieved_reducer_offers_what_it_made_when_the_part_comes_back() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    third.on_close(first.me, 0, Proof(), now=0.0)
    third.contributed(contribution(third.me), now=0.0)
    third.on_roster(first.me, roster_of(facts, reducers=(third.me,) * 3), now=0.1)
    third.on_part(first.me, 0)
    assert third.on_part(second.me, 0) == [AggregatePart(0, facts.members, ())]
    third.on_roster(first.me, roster_of(facts, reducers=(first.me,) * 3, revision=1), now=0.3)
    assert third.aggregated(reduced_part(0, facts.members), now=0.4) == []
    out = third.on_roster(first.me, roster_of(facts, reducers=(third.me,) * 3, revision=2), now=0.5)
    assert only(out, SendReduced).reduced == reduced_part(0, facts.members)


def test_who_brought_nothing_reduces_nothing_where_at_least_half_did() -> None:
    """A line too slow to get work by is one that nobody has measured."""
    facts, _ = facts_and_rounds(4)
    idle = facts.members[:3]
    for num_idle in range(4):
        commits = {peer: contribution(peer, num_work=peer not in idle[:num_idle]) for peer in facts.members}
        reducers = {
            *roster_of(facts, commits=commits, revision=1).reducers,
            *roster_of(facts, commits=commits).reducers,
        }
        assert reducers == {*facts.members} - ({*idle[:num_idle]} if num_idle <= 2 else set())
    worker = replace(contribution(facts.members[3]), rates=(Rate(idle[0], 15),))
    commits = {peer: contribution(peer, num_work=0) for peer in idle} | {worker.peer_id: worker}
    assert {*roster_of(facts, commits=commits).reducers} == {idle[0], worker.peer_id}, "the one was measured before"


def test_a_reducer_far_slower_than_the_others_is_relieved_though_its_bytes_still_come() -> None:
    """Of one whose line had a tenth of the others' rate no round came: each byte bought it another wait."""
    facts, (leader, second, third) = facts_and_rounds(3)
    roster = led_roster(leader)
    for part, reducer in enumerate(roster.reducers):
        if reducer == leader.me:
            for peer in facts.members:
                leader.on_part(peer, part)
            leader.aggregated(reduced_part(part, facts.members), now=0.0)
        elif reducer == second.me:
            leader.on_reduced(reducer, reduced_part(part, facts.members), now=0.0)
    out: list[object] = []
    now = 0.0
    while not has(out, SendRoster):
        now += facts.phase_s / 4
        assert now < 4 * facts.phase_s
        leader.moved(third.me, now=now)
        out = [*leader.tick(now=now)]
    moved = only(out, SendRoster).roster
    assert third.me not in moved.reducers
    assert moved.certificate == roster.certificate


def test_a_reducer_that_waits_for_one_contributor_is_relieved_later() -> None:
    """That one comes, or is left out; on a slow line of the reducer's own neither did, and nobody else could go on."""
    facts, (leader, second, third) = facts_and_rounds(3)
    roster = led_roster(leader)
    for part, reducer in enumerate(roster.reducers):
        if reducer == leader.me:
            for peer in facts.members:
                leader.on_part(peer, part)
            leader.aggregated(reduced_part(part, facts.members), now=0.0)
        elif reducer == second.me:
            leader.on_reduced(reducer, reduced_part(part, facts.members), now=0.0)
    out: list[object] = []
    now = 0.0
    while not has(out, SendRoster):
        now += facts.phase_s / 4
        assert now < 4 * facts.phase_s
        leader.on_missing(third.me, 0, [second.me], [], now=now)
        out = [*leader.tick(now=now)]
    assert now >= 2 * facts.phase_s
    assert third.me not in only(out, SendRoster).roster.reducers


def test_parts_that_moved_to_another_reducer_keep_the_certificate_of_the_facts() -> None:
    _, (leader, second, third) = facts_and_rounds(3)
    roster = led_roster(leader)
    assert third.me in roster.reducers
    moved = only(leader.unreachable(third.me, now=0.1), SendRoster).roster
    assert (moved.rank, moved.certificate) == ((0, 1), roster.certificate)
    assert third.me not in moved.reducers
    assert second.on_roster(leader.me, moved, now=0.2) == []  # nothing of its own to send: it has not contributed
    assert second.roster == moved


def test_a_member_that_is_back_is_told_the_roster_by_who_leads() -> None:
    """Its line was dead when the roster that relieves it was sent: what it goes on sending would all be refused."""
    _, (leader, second, third) = facts_and_rounds(3)
    led_roster(leader)
    assert leader.is_back(third.me, now=0.3) == []  # it never seemed gone
    moved = only(leader.unreachable(third.me, now=0.1), SendRoster).roster
    assert leader.is_back(third.me, now=0.3) == [SendRoster((third.me,), moved)]
    assert leader.is_back(third.me, now=0.3) == []
    second.unreachable(third.me, now=0.1)
    assert second.is_back(third.me, now=0.3) == []  # who leads says it


def test_parts_whose_contributors_all_died_are_left_empty() -> None:
    """Only the second did work, and dies before any of its parts arrives: the round ends with zeros."""
    facts, (leader, second) = facts_and_rounds(2, witnesses=1)
    (witness,) = witnesses_of(facts)
    asked = closed(leader, commits={leader.me: contribution(leader.me, num_work=0)})
    vote(leader, asked, witness)
    out: list[Instruction] = leader.unreachable(second.me, now=0.0)
    assert only(out, SendRoster).roster.reducers == (leader.me,) * 3
    now = 0.0
    while not has(out, SendBallot):
        assert leader.deadline is not None
        now = leader.deadline
        assert now <= 3 * MAX_RELIEFS * PHASE_S, "the round never ends"
        out = leader.tick(now=now)
    assert now >= 2 * MAX_RELIEFS * PHASE_S
    ballot = only(out, SendBallot).proposal
    assert ballot.result is not None
    assert ballot.result.parts == tuple(ReducedPart.empty(part) for part in range(3))
    commit = only(vote(leader, ballot, witness), SendBallot).proposal
    out = vote(leader, commit, witness)
    assert not has(out, FetchPart)  # an empty part has no bytes
    assert only(out, Finish).result.heard() == frozenset()
    # Whoever is told takes it, and a member that comes back votes for it without any bytes.
    assert has(second.on_result(only(out, SendResult).result, now=now), Finish)
    back = round_of(facts, second.me)
    assert not has(back.on_ballot(leader.me, ballot, now=now), SendVote), "it was not there to see the time go by"
    now += UNBROUGHT_PHASES * PHASE_S
    assert only(back.on_ballot(leader.me, ballot, now=now), SendVote).to == leader.me


@pytest.mark.parametrize("reduces", [False, True])
def test_nobody_votes_for_empty_parts_before_reducers_had_their_time_nor_its_reducer_once_it_has_one(
    reduces: bool,
) -> None:
    """Or whoever leads would undo all that others did in its steps, by its word alone."""
    facts, (first, second, _) = facts_and_rounds(3)
    reducer = second if reduces else first
    roster = signed(replace(roster_of(facts), reducers=(reducer.me,) * facts.num_parts))
    second.on_roster(first.me, roster, now=0.0)
    parts = tuple(map(ReducedPart.empty, range(facts.num_parts)))
    asked = asked_result(facts, result_of(facts, roster, parts=parts))
    assert not has(second.on_ballot(first.me, asked, now=0.1), SendVote)
    if reduces:
        everyone = tuple(made.peer_id for made in roster.contributions)
        second.aggregated(reduced_part(0, everyone), now=0.2)
    out: list[Instruction] = []
    while second.deadline is not None and second.deadline <= UNBROUGHT_PHASES * PHASE_S:
        out += second.tick(now=second.deadline)
    assert has(out, SendVote) is not reduces, "it need not be asked again"
    if reduces:
        assert not has(second.on_ballot(first.me, asked, now=UNBROUGHT_PHASES * PHASE_S), SendVote)


def test_what_a_reducer_sends_again_buys_no_time() -> None:
    """A leader held up each round with one part that it sent over and over, a reducer of two its relief."""
    facts, (leader, second, third) = facts_and_rounds(3)
    roster = led_roster(leader)
    second.on_roster(leader.me, roster, now=0.0)
    everyone = tuple(made.peer_id for made in roster.contributions)
    for machine, sender in ((leader, third), (second, leader)):
        part = next(part for part in range(facts.num_parts) if roster.combiner_of(part) == sender.me)
        machine.on_reduced(sender.me, reduced_part(part, everyone), now=0.5)
        before = machine._patience.due
        machine.on_reduced(sender.me, reduced_part(part, everyone), now=0.6)
        assert machine._patience.due == before
    result = result_of(facts, roster)
    second.on_ballot(leader.me, asked_result(facts, result), now=0.7)
    before = second._patience.due
    for made in (result.parts[part], result.parts[part]):
        second.on_reduced(leader.me, made, now=0.8)
        assert second._patience.due == before


# -- the result -------------------------------------------------------------------------------------------


def test_a_member_votes_for_a_result_only_once_it_has_its_bytes() -> None:
    facts, (first, second, _) = facts_and_rounds(3)
    result = result_of(facts, roster_of(facts))
    asked = asked_result(facts, result)
    fetches = second.on_ballot(first.me, asked, now=0.0)
    assert [(i.part, i.digest) for i in fetches if isinstance(i, FetchPart)] == [
        (made.part, made.digest) for made in result.parts
    ]
    assert len(fetches) == 3
    for made in result.parts[:-1]:
        assert second.part_fetched(made, now=0.1) == []
    last = result.parts[-1]
    cast = only(second.part_fetched(last, now=0.2), SendVote)
    assert (cast.to, cast.proposal) == (first.me, asked)
    ballot = facts.election.ballot("result", 0, result.root())
    assert cached_verify(second.me, ballot, cast.vote.signature)
    assert second.on_ballot(first.me, asked, now=0.3) == [cast]


def test_the_bytes_that_a_reducer_is_sending_are_not_fetched_too_unless_asked_again() -> None:
    """A ballot overtakes them on a slow link: fetched as well, they would take it twice."""
    facts, (first, second, third) = facts_and_rounds(3)
    roster = roster_of(facts, reducers=(third.me,) * 3)
    result = result_of(facts, roster)
    second.on_roster(first.me, roster, now=0.0)
    assert second.on_ballot(first.me, asked_result(facts, result), now=0.1) == []
    assert has(second.on_ballot(first.me, asked_result(facts, result), now=0.1), FetchPart)
    for made in result.parts[:-1]:
        assert second.on_reduced(third.me, made, now=0.2) == []
    assert only(second.on_reduced(third.me, result.parts[-1], now=0.3), SendVote).vote.voter == second.me


def test_what_a_reducer_stopped_sending_is_fetched_before_the_leader_asks_again() -> None:
    """It waits for a vote as long as the step took so far: minutes, where a reducer had given up what it sent."""
    facts, (first, second, third, fourth) = facts_and_rounds(4)
    roster = roster_of(facts, reducers=(third.me, fourth.me, third.me))
    second.on_roster(first.me, roster, now=0.0)
    window_s = second._reduction.arrivals.window_s
    assert second.on_ballot(first.me, asked_result(facts, result_of(facts, roster)), now=1.0) == []
    second.moved(fourth.me, now=1.5)
    looks = []
    while (now := second.deadline) is not None and len(looks) < 2:
        if has(out := second.tick(now=now), FetchPart):
            looks.append((now, [one.part for one in out if isinstance(one, FetchPart)]))
    assert looks == [(1.0 + window_s, [0, 2]), (1.0 + 2 * window_s, [0, 1, 2])]


def test_a_part_that_came_to_another_reducer_is_fetched_at_once() -> None:
    """That one may have it of the one before, who sends it to nobody any more: its voters waited for nothing."""
    facts, (first, second, third) = facts_and_rounds(3)
    second.on_roster(first.me, roster_of(facts, reducers=(third.me,) * 3), now=0.0)
    moved = roster_of(facts, reducers=(third.me, first.me, third.me), revision=1)
    second.on_roster(first.me, moved, now=0.1)
    second.moved(first.me, now=0.2)
    fetches = second.on_ballot(first.me, asked_result(facts, result_of(facts, moved)), now=0.3)
    assert [one.part for one in fetches if isinstance(one, FetchPart)] == [1]


def test_what_several_reducers_are_sending_at_once_is_not_fetched_beside_it() -> None:
    """The own line holds it up. What one alone is sending it may send slowly, and others have it."""
    facts, (first, second, third, fourth) = facts_and_rounds(4)
    roster = roster_of(facts, reducers=(first.me, third.me, fourth.me))
    result = certified(facts, result_of(facts, roster))
    second.on_roster(first.me, roster, now=0.0)
    for moving in (first, third):
        second.moved(moving.me, now=0.5)
    assert [one.part for one in second.on_result(result, now=1.0) if isinstance(one, FetchPart)] == [2]
    for _ in range(2):
        now = second.deadline
        assert now is not None
        second.moved(first.me, now=now)
        out = second.tick(now=now)
    assert [one.part for one in out if isinstance(one, FetchPart)] == [0, 1, 2]


def test_a_leader_goes_on_without_a_silent_members_vote_only_late_and_with_a_quorum() -> None:
    _, (leader, second, third, fourth) = facts_and_rounds(4)
    led_roster(leader)
    asked = reduced(leader)
    assert asked.phase == "result"
    assert vote(leader, asked, second.me) == []
    now = leader.deadline
    assert now is not None
    silent = tuple(sorted([third.me, fourth.me]))
    assert leader.tick(now=now) == [SendBallot(silent, asked)]  # two of four: no deadline makes them a quorum
    assert vote(leader, asked, third.me, now=now) == []  # three are, but the fourth may yet fetch the bytes
    now = leader.deadline
    assert now is not None
    commit = only(leader.tick(now=now), SendBallot).proposal
    assert (commit.phase, commit.value) == ("commit", asked.value)


def test_what_a_round_waits_for_is_said_in_words() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)

    def ends(*machines: AveragingRound) -> str:
        return ", ".join(sorted(machine.me[-6:] for machine in machines))

    assert second.waits_for == f"the word of its leader {ends(leader)}"
    _, (closing, *_) = facts_and_rounds(3)
    closing.close(reason="full", joins=(), view=0, now=0.0)
    assert set(closing.waits_for.removeprefix("commitments of ").split(", ")) == {*ends(second, third).split(", ")}
    roster = led_roster(leader)
    own = [part for part in range(facts.num_parts) if roster.combiner_of(part) == leader.me]
    assert f"{len(own)} parts of {ends(second)}" in leader.waits_for
    assert f"parts reduced by {ends(second)}" in leader.waits_for
    asked = reduced(leader)
    assert leader.waits_for.startswith("votes on the result of ")
    second.on_roster(leader.me, roster, now=0.1)
    assert f"parts of {ends(third)}" in second.waits_for
    second.on_ballot(leader.me, asked, now=0.2)
    assert second.waits_for == f"bytes or words of {facts.num_parts} parts of the result, to vote for it"
    assert asked.result is not None
    second.on_result(certified(facts, asked.result), now=0.3)
    assert second.waits_for == f"bytes of {facts.num_parts} parts of the outcome"


def test_who_is_back_is_asked_what_it_was_asked_meanwhile() -> None:
    """That was given up: a leader waited for a vote that it had never asked for, as long as the step took so far."""
    _, (leader, second, third, fourth) = facts_and_rounds(4)
    leader.close(reason="full", joins=(), view=0, now=0.0)
    leader.unreachable(fourth.me, now=0.1)
    assert only(leader.is_back(fourth.me, now=0.2), SendClose).to == (fourth.me,)
    assert leader.is_back(fourth.me, now=0.2) == []
    leader.contributed(contribution(leader.me), now=0.2)
    for peer in (second.me, third.me):
        leader.on_commit(peer, 0, contribution(peer), None, None, None, now=0.2)
    asked = only(leader.on_commit(fourth.me, 0, contribution(fourth.me), None, None, None, now=0.2), SendBallot)
    leader.unreachable(fourth.me, now=0.3)
    assert only(leader.is_back(fourth.me, now=0.4), SendBallot) == SendBallot((fourth.me,), asked.proposal)
    vote(leader, asked.proposal, fourth.me)
    leader.unreachable(fourth.me, now=0.5)
    assert not has(leader.is_back(fourth.me, now=0.6), SendBallot), "it has voted"


@pytest.mark.parametrize("what", ["votes", "is gone", "has turned", "calls to a view of its own"])
def test_a_leader_waits_for_the_votes_of_those_alone_who_may_still_vote(what: str) -> None:
    facts, (leader, second, third, fourth) = facts_and_rounds(4)
    led_roster(leader)
    asked = reduced(leader)
    assert vote(leader, asked, second.me, third.me) == []
    if what == "votes":
        out = vote(leader, asked, fourth.me)
    elif what == "is gone":
        out = leader.unreachable(fourth.me, now=0.1)
    elif what == "has turned":
        out = leader.on_turned(fourth.me, 1, now=0.1)
    else:
        out = leader.on_close(fourth.me, 3, Proof((promise_by(facts, fourth.me, 3),)), now=0.1)
    assert only(out, SendBallot).proposal.phase == "commit"


def test_the_outcome_needs_a_quorum_that_commits_to_it() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    led_roster(leader)
    asked = reduced(leader)
    commit = only(vote(leader, asked, second.me, third.me), SendBallot).proposal
    assert vote(leader, asked, second.me, third.me) == []
    out = vote(leader, commit, second.me)
    assert only(out, SendResult).to == others(leader)
    result = only(out, Finish).result
    assert result == leader.result == only(out, SendResult).result
    facts.check_result(result, cached_verify, certified=True)
    fetches = third.on_result(result, now=0.1)
    assert [i.part for i in fetches if isinstance(i, FetchPart)] == [0, 1, 2]
    assert fetched(third, result) == [Finish(result)]


def test_whoever_missed_the_result_is_asked_for_it_before_it_can_commit() -> None:
    facts, (leader, second, third, fourth) = facts_and_rounds(4)
    led_roster(leader)
    asked = reduced(leader)
    commit = only(vote(leader, asked, second.me, third.me) + leader.unreachable(fourth.me, now=0.0), SendBallot)
    vote(leader, commit.proposal, second.me)
    assert asked.result is not None
    fetched(fourth, asked.result)
    assert fourth.on_ballot(leader.me, commit.proposal, now=0.1) == []  # it cannot show what it would commit to
    now = leader.deadline
    assert now is not None
    silent = tuple(sorted([third.me, fourth.me]))
    assert leader.tick(now=now) == [SendBallot(silent, asked), SendBallot(silent, commit.proposal)]
    votes = [only(fourth.on_ballot(leader.me, again, now=now), SendVote) for again in (asked, commit.proposal)]
    assert [cast.proposal.phase for cast in votes] == ["result", "commit"]
    out = leader.on_vote(fourth.me, 0, "commit", commit.proposal.value, votes[1].vote, now=now)
    assert has(out, Finish)
    assert quorum(len(facts.voters)) == 3


@pytest.mark.parametrize("num_members", [4, 7])
def test_of_two_rosters_or_two_results_in_a_view_at_most_one_is_certified(num_members: int) -> None:
    """The leader, and as many others as may lie, vote for both; it chooses who hears which first."""
    facts, rounds = facts_and_rounds(num_members)
    num_liars = (num_members - 1) // 3
    leader = rounds[0]
    roster = roster_of(facts)
    (joins,) = {one.peer_id for one in identities(num_members + 1)} - {*facts.members}
    other = roster_of(facts, joins=(joins,))
    one = result_of(facts, roster)
    results = [one, result_of(facts, roster, parts=tuple(replace(part, squares=2.0) for part in one.parts))]
    rosters = [Proposal.of_roster(replace(made, certificate=None), Proof()) for made in (roster, other)]
    for pair in (rosters, [asked_result(facts, result) for result in results]):
        num_certified = 0
        for first_heard in product((0, 1), repeat=num_members - num_liars):
            counts = [num_liars, num_liars]
            for peer, first in zip(rounds[num_liars:], first_heard, strict=True):
                machine = round_of(facts, peer.me)
                for result in results:  # reducers may have signed both
                    fetched(machine, result)
                for index in (first, 1 - first, first):
                    out = machine.on_ballot(leader.me, pair[index], now=0.0)
                    assert has(out, SendVote) == (index == first)
                counts[first] += 1
            assert min(counts) < quorum(num_members)
            num_certified += max(counts) >= quorum(num_members)
        assert num_certified >= 2


def test_a_member_that_does_not_vote_takes_part_in_all_else() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    machine = AveragingRound(facts, third.me, identity_of(third.me).sign, cached_verify, votes=False)
    assert machine.on_close(first.me, 0, Proof(), now=0.0) == [MakeContribution()]
    (commit,) = machine.contributed(contribution(third.me), now=0.0)
    assert commit == SendCommit(first.me, 0, contribution(third.me), None, None, None)
    roster = roster_of(facts)
    result = result_of(facts, roster)
    assert machine.on_ballot(first.me, Proposal.of_roster(replace(roster, certificate=None), Proof()), now=0.1) == []
    assert has(machine.on_roster(first.me, roster, now=0.2), SendPart)
    assert all(isinstance(i, FetchPart) for i in machine.on_ballot(first.me, asked_result(facts, result), now=0.3))
    assert fetched(machine, result) == []
    assert machine.on_ballot(first.me, asked_commit(facts, result), now=0.4) == []
    (again,) = machine.on_close(second.me, 1, proof_by(facts, 1), now=0.5)
    assert isinstance(again, SendCommit)
    assert (again.promise, again.roster) == (None, roster)
    assert machine.on_result(certified(facts, result), now=0.6) == [Finish(certified(facts, result))]


def test_a_leader_that_does_not_vote_needs_the_votes_of_others() -> None:
    facts, rounds = facts_and_rounds(4)
    me = rounds[0].me
    leader = AveragingRound(facts, me, identity_of(me).sign, cached_verify, votes=False)
    asked = closed(leader)
    assert vote(leader, asked, *others(leader)[:2]) == []
    assert has(vote(leader, asked, others(leader)[2]), SendRoster)
    commit = only(vote(leader, reduced(leader), *others(leader)), SendBallot).proposal
    assert has(vote(leader, commit, *others(leader)), Finish)


@pytest.mark.parametrize("what", ["squares", "excluded", "emptied"])
def test_nobody_votes_for_what_a_leader_filled_in(what: str) -> None:
    """A result says of each part what its reducer has signed for, and of no part that a reducer brought, nothing."""
    facts, rounds = facts_and_rounds(4)
    leader, machine = rounds[0], round_of(facts, rounds[1].me)
    true = result_of(facts, roster_of(facts))
    fetched(machine, true)
    first, victim = true.parts[0], facts.members[-1]
    filled_in = {
        "squares": replace(first, squares=1e30),
        "excluded": replace(
            first,
            contributors=tuple(peer for peer in first.contributors if peer != victim),
            excluded=(Exclusion(victim, "malformed"),),
        ),
        "emptied": ReducedPart.empty(0),
    }[what]
    made_up = result_of(facts, true.roster, parts=(filled_in, *true.parts[1:]))
    assert not has(machine.on_ballot(leader.me, asked_result(facts, made_up), now=0.0), SendVote)
    assert has(machine.on_ballot(leader.me, asked_result(facts, true), now=0.1), SendVote)


def test_nobody_is_told_the_same_news_again_at_once() -> None:
    """A message of a few bytes would be answered with a roster of megabytes, as often as it is sent."""
    facts, (leader, _, third) = facts_and_rounds(3)
    roster = led_roster(leader)
    asked = (third.me, facts.first_view, contribution(third.me), None, None, None)
    told = SendRoster((third.me,), roster)
    again_s = AGAIN_PHASES * facts.phase_s
    assert leader.on_commit(*asked, now=0.1) == [told]
    assert leader.on_commit(*asked, now=0.1 + again_s / 2) == []
    assert leader.on_commit(*asked, now=0.1 + again_s) == [told]
    moved = only(leader.unreachable(leader.facts.leaders[1], now=0.2 + again_s), SendRoster).roster
    assert leader.on_commit(*asked, now=0.2 + again_s) == [SendRoster((third.me,), moved)], "these are others"
