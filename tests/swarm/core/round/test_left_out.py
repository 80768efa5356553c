"""A contribution whose parts do not come is left out whole, by the words of a quorum of reducers and of nobody else."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from swarm.core.audit.beacon import Beacon
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import (
    AggregatePart,
    AveragingRound,
    Instruction,
    Instructions,
    SayMissing,
    SendBallot,
    SendCommit,
    SendReduced,
    SendRoster,
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Exclusion, Lack, LeftOut, ReducedPart, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voting import Proof
from swarm.identity.key import verify
from tests.swarm.core.audit.chances import HOST_CHAIN, said_by
from tests.swarm.core.round.round_members import (
    asked_result,
    certified,
    closed,
    facts_and_rounds,
    fetched,
    has,
    led_roster,
    only,
    proof_by,
    reduced,
    result_of,
    roster_of,
    signed,
    vote,
    witnesses_of,
)
from tests.swarm.core.round.round_world import contribution, identity_of, reduced_part, round_of

LATER_S = 100.0


def lacks(roster: Roster, slow: PeerId, reducers: Collection[PeerId]) -> tuple[Lack, ...]:
    """What they sign of the parts of `slow`."""
    made = roster.commitment_of(slow)
    assert made is not None
    return tuple(Lack(peer, identity_of(peer).sign(Lack.signs(made))) for peer in sorted(reducers))


def without(roster: Roster, slow: PeerId, said: tuple[Lack, ...], *, leader: AveragingRound, view: int = 1) -> Roster:
    """What the leader of a later view proposes: the roster without the contribution of `slow`, by these words."""
    made = roster.commitment_of(slow)
    assert made is not None
    smaller = replace(
        roster,
        view=view,
        leader=leader.me,
        contributions=tuple(one for one in roster.contributions if one.peer_id != slow),
        left_out=(LeftOut(made, said),),
        certificate=None,
    )
    return signed(smaller)


def asked(facts: RoundFacts, roster: Roster, earlier: Roster) -> Proposal:
    """For votes on it, after promises that name what was certified earlier."""
    return Proposal.of_roster(roster, proof_by(facts, roster.view, bound=earlier.certificate))


def test_who_gives_itself_up_is_left_out_by_its_own_word_alone() -> None:
    """Among others' words it made a roster that is malformed to everybody: each leader sent one, and stood still."""
    facts, (leader, second, slow) = facts_and_rounds(3)
    roster = led_roster(leader)
    words = {
        lack.reducer: (slow.me, lack.signature) for lack in lacks(roster, slow.me, [leader.me, second.me, slow.me])
    }
    assert not leader.on_missing(second.me, 0, [slow.me], [words[second.me]], now=LATER_S), "one of others is too few"
    smaller = only(leader.on_missing(slow.me, 0, [slow.me], [words[slow.me]], now=LATER_S), SendRoster).roster
    assert [one.reducer for one in smaller.left_out[0].said] == [slow.me]
    assert Roster.from_value(smaller.to_value()) == smaller
    second.contributed(contribution(second.me), now=0.0)
    second.on_roster(leader.me, smaller, now=LATER_S)
    assert second.roster == smaller
    several = replace(smaller.left_out[0], said=tuple(lacks(roster, slow.me, sorted([second.me, slow.me]))))
    with pytest.raises(RemoteError, match="its maker's among them"):
        LeftOut.from_value(several.to_value())
    assert facts.members == tuple(sorted([leader.me, second.me, slow.me]))


def test_of_two_the_others_word_does_not_leave_out_who_leads() -> None:
    _, (leader, other) = facts_and_rounds(2, witnesses=1)
    roster = led_roster(leader)
    assert roster.num_lacks(leader.me) == 1
    (said,) = lacks(roster, leader.me, [other.me])
    assert not leader.on_missing(other.me, 0, [leader.me], [(leader.me, said.signature)], now=LATER_S)
    (said,) = lacks(roster, leader.me, [leader.me])
    smaller = only(
        leader.on_missing(leader.me, 0, [leader.me], [(leader.me, said.signature)], now=LATER_S), SendRoster
    ).roster
    assert [one.peer_id for one in smaller.left_out] == [leader.me], "its own word does"


def test_reducers_say_whose_parts_do_not_come_and_the_view_goes_on_without() -> None:
    facts, (leader, second, slow) = facts_and_rounds(3)
    roster = led_roster(leader)
    assert roster.num_lacks(slow.me) == 2
    out = [*second.contributed(contribution(second.me), now=0.0), *second.on_roster(leader.me, roster, now=0.0)]
    for part, reducer in enumerate(roster.reducers):
        for machine in (leader, second):
            if reducer == machine.me:
                machine.on_part((second if machine is leader else leader).me, part)
    out = second.tick(now=second.deadline or 0.0)
    said = only(out, SayMissing)
    assert said.missing == (slow.me,)
    assert not said.given_up, "it has had one phase"
    out = second.tick(now=LATER_S)
    said = only(out, SayMissing)
    assert [peer for peer, _ in said.given_up] == [slow.me]
    assert second.given_up == {slow.me}
    assert not leader.on_missing(second.me, 0, said.missing, said.given_up, now=LATER_S), "one word is too few"
    forged = [(slow.me, bytes(64))]
    with pytest.raises(RemoteError) as caught:
        leader.on_missing(second.me, 0, said.missing, forged, now=LATER_S)
    assert caught.value.kind == "signature"
    own = lacks(roster, slow.me, [leader.me])
    out = leader.on_missing(leader.me, 0, [slow.me], [(slow.me, own[0].signature)], now=LATER_S)
    sent = only(out, SendRoster)
    smaller = sent.roster
    assert set(sent.to) == {second.me, slow.me}
    assert (smaller.view, smaller.revision) == (roster.view, roster.revision + 1)
    assert [one.peer_id for one in smaller.left_out] == [slow.me]
    assert {one.reducer for one in smaller.left_out[0].said} == {leader.me, second.me}
    assert smaller.certificate == roster.certificate, "the words prove the rest: nobody votes once more"
    of_all = ReducedPart(0, bytes(32), tuple(one.peer_id for one in roster.contributions))
    assert second.roster_of(of_all) == roster
    second.on_roster(leader.me, smaller, now=LATER_S)
    assert second.roster == leader.roster == smaller
    assert second.is_overtaken(of_all), "with what is left out nobody has a use for it"
    assert not second.is_overtaken(replace(of_all, contributors=(leader.me,))), "its roster may still come"
    with pytest.raises(RemoteError, match="not on the roster"):
        second.expected_digest(0, slow.me)
    result = result_of(facts, smaller)
    second.on_ballot(leader.me, asked_result(facts, result), now=LATER_S)
    assert has(fetched(second, result), SendVote)
    facts.check_result(certified(facts, result), verify, certified=True)


def test_a_part_that_did_without_the_nonsense_of_one_who_is_left_out_is_reduced_anew() -> None:
    """It says why that one is not in it, and no result of the smaller roster may: a stage stood still for good."""
    facts, (leader, second, liar) = facts_and_rounds(3)
    roster = signed(replace(led_roster(leader), reducers=(second.me,) * facts.num_parts))
    second.contributed(contribution(second.me), now=0.0)
    second.on_roster(leader.me, roster, now=0.0)
    second.on_part(leader.me, 0)
    honest = tuple(sorted((leader.me, second.me)))
    without_it = AggregatePart(0, honest, (Exclusion(liar.me, "malformed"),))
    assert only(second.on_bad_part(liar.me, 0), AggregatePart) == without_it
    of_first = replace(reduced_part(0, honest), excluded=without_it.excluded)
    assert second.aggregated(of_first, now=0.1) != []
    said = lacks(roster, liar.me, [leader.me, second.me])
    smaller = replace(without(roster, liar.me, said, leader=leader, view=0), revision=1, certificate=roster.certificate)
    out = second.on_roster(leader.me, signed(smaller), now=0.2)
    assert only(out, AggregatePart) == AggregatePart(0, honest, ())
    assert not has(out, SendReduced)
    assert only(second.aggregated(reduced_part(0, honest), now=0.3), SendReduced).reduced == reduced_part(0, honest)


def leads_without_one(num_members: int) -> tuple[RoundFacts, AveragingRound, list[PeerId], Proposal]:
    """The leader, which asks for votes on its result; one member was left out, and these were not."""
    facts, (leader, *rest) = facts_and_rounds(num_members, witnesses=3)
    others, slow = [one.me for one in rest[:-1]], rest[-1].me
    roster, out = led_roster(leader), list[Instruction]()
    for lack in lacks(roster, slow, [leader.me, *others]):
        out += leader.on_missing(lack.reducer, 0, [slow], [(slow, lack.signature)], now=LATER_S)
    assert [one.peer_id for one in only(out, SendRoster).roster.left_out] == [slow]
    if others:
        return facts, leader, others, reduced(leader)
    for part in range(facts.num_parts):
        out += leader.aggregated(reduced_part(part, (leader.me,)), now=LATER_S)
    return facts, leader, others, only(out, SendBallot).proposal


def test_once_most_have_the_bytes_nobody_waits_for_the_vote_of_who_was_left_out() -> None:
    """It has to fetch them over the line on which its own did not come."""
    facts, leader, others, asked_for = leads_without_one(3)
    assert vote(leader, asked_for, *witnesses_of(facts), now=LATER_S) == []
    out = vote(leader, asked_for, *others, now=LATER_S)
    assert only(out, SendBallot).proposal.phase == "commit"


def test_fewer_do_not_leave_the_others_behind() -> None:
    """On lines that had all become slow a leader went on alone, and two members on good lines fell off the stage."""
    facts, leader, others, asked_for = leads_without_one(2)
    assert not others
    assert vote(leader, asked_for, *witnesses_of(facts), now=LATER_S) == []
    out: list[Instruction] = []
    while not has(out, SendBallot):
        due = leader.deadline
        assert due is not None
        assert due < 2 * LATER_S, "but for a while"
        out = leader.tick(now=due)
    assert only(out, SendBallot).proposal.phase == "commit"


def test_whose_parts_were_missing_for_a_while_goes_on_reducing_when_another_is_left_out() -> None:
    facts, _ = facts_and_rounds(4)
    first, second, third, slow = facts.leaders
    leader = round_of(facts, first)
    roster = led_roster(leader)
    leader.on_missing(second, 0, [first, third, slow], [], now=1.0)
    leader.on_missing(third, 0, [first, second, slow], [], now=1.0)
    out: Instructions = []
    for lack in lacks(roster, slow, [first, second, third]):
        out += leader.on_missing(lack.reducer, 0, [slow], [(slow, lack.signature)], now=LATER_S)
    smaller = only(out, SendRoster).roster
    kept = [reducer for reducer in smaller.reducers if reducer in (second, third)]
    assert kept == [reducer for reducer in roster.reducers if reducer in (second, third)] != []
    assert slow not in smaller.reducers


def test_what_was_certified_proves_only_what_comes_of_it_by_enough_words() -> None:
    facts, (first, second, third, slow) = facts_and_rounds(4)
    roster = roster_of(facts)
    good = lacks(roster, slow.me, [first.me, third.me])
    smaller = replace(without(roster, slow.me, good, leader=first, view=0), revision=1, certificate=roster.certificate)
    cases = [
        ("protocol", replace(smaller, left_out=(replace(smaller.left_out[0], said=good[:1]),))),
        ("certificate", replace(smaller, left_out=())),
        ("certificate", replace(smaller, joins=(PeerId("~stranger"),))),
        ("certificate", replace(smaller, certificate=None)),
    ]
    for kind, made in cases:
        with pytest.raises(RemoteError) as caught:
            third.on_roster(first.me, signed(made), now=0.0)
        assert caught.value.kind == kind, made
        result = result_of(facts, signed(made))
        proof = Proof((), roster.certificate)
        with pytest.raises(RemoteError):
            third.on_ballot(first.me, Proposal.of_result(result, 0, proof), now=0.0)
    third.on_roster(first.me, signed(smaller), now=0.0)
    assert third.roster == signed(smaller)
    later = asked(facts, replace(signed(smaller), view=1, revision=0, leader=second.me), roster)
    assert later.roster is not None
    again = Proposal.of_roster(signed(later.roster), later.proof)
    assert has(third.on_ballot(second.me, again, now=0.0), SendVote), "what is left out stays so in the next view"


def test_nobody_is_left_out_by_fewer_words_by_its_own_or_by_none_that_are_signed() -> None:
    facts, (first, second, third, slow) = facts_and_rounds(4)
    roster = roster_of(facts)
    assert roster.num_lacks(slow.me) == 2
    good = lacks(roster, slow.me, [first.me, third.me])
    cases = [
        ("protocol", ()),
        ("protocol", good[:1]),
        ("signature", (good[0], replace(good[1], signature=bytes(64)))),
        ("signature", tuple(replace(one, signature=good[0].signature) for one in good)),
        ("protocol", (good[0], replace(good[1], reducer=PeerId("~stranger")))),
    ]
    for kind, said in cases:
        with pytest.raises(RemoteError) as caught:
            third.on_ballot(second.me, asked(facts, without(roster, slow.me, said, leader=second), roster), now=0.0)
        assert caught.value.kind == kind, said
    smaller = without(roster, slow.me, good, leader=second)
    with pytest.raises(RemoteError, match="do not allow"):  # nothing was certified that parts could be awaited of
        third.on_ballot(second.me, Proposal.of_roster(smaller, proof_by(facts, 1)), now=0.0)
    fresh = without(roster, slow.me, good, leader=first, view=0)
    with pytest.raises(RemoteError, match="do not allow"):
        third.on_ballot(first.me, Proposal.of_roster(fresh, Proof()), now=0.0)
    assert has(third.on_ballot(second.me, asked(facts, smaller, roster), now=0.0), SendVote)


def test_words_that_cannot_count_are_malformed() -> None:
    facts, (first, second, third, slow) = facts_and_rounds(4)
    roster = roster_of(facts)
    good = lacks(roster, slow.me, [first.me, third.me])
    own = lacks(roster, slow.me, [slow.me])
    for said in (good[::-1], (good[0], good[0]), tuple(sorted((*good, *own), key=lambda one: one.reducer))):
        with pytest.raises(RemoteError) as caught:
            Roster.from_value(without(roster, slow.me, said, leader=second).to_value())
        assert caught.value.kind == "malformed"
    everyone = tuple(LeftOut(made, ()) for made in roster.contributions)
    with pytest.raises(RemoteError, match="or all"):
        Roster.from_value(replace(roster, contributions=(), left_out=everyone).to_value())
    with pytest.raises(RemoteError, match="that it has"):
        Roster.from_value(replace(roster, left_out=everyone[:1]).to_value())


def test_what_a_contribution_says_beside_its_work_counts_where_it_is_left_out() -> None:
    facts, (first, second, third, slow) = facts_and_rounds(4)
    roster = roster_of(facts)
    words = {slow.me: lacks(roster, slow.me, [first.me, second.me, third.me])}
    smaller = roster.without(words)
    assert smaller.contribution_of(slow.me) is None
    assert smaller.commitment_of(slow.me) == roster.contribution_of(slow.me)
    assert smaller.committed == roster.contributions
    assert len(smaller.left_out[0].said) == smaller.num_lacks(slow.me)
    assert (smaller.said, smaller.cohorts) == (roster.said, roster.cohorts)
    word = said_by(HOST_CHAIN, facts.step + 1)
    assert Beacon.of(smaller, word) == Beacon.of(roster, word)
    assert smaller.facts_digest() != roster.facts_digest()
    assert smaller.comes_of(roster.facts_digest())
    assert not roster.comes_of(smaller.facts_digest())
    everyone = {peer: lacks(roster, peer, set(facts.members) - {peer}) for peer in facts.members}
    assert roster.without(everyone) is roster, "somebody's work is in every round"


def test_who_was_too_slow_lately_reduces_nothing_and_no_result_waits_for_its_vote() -> None:
    facts, _ = facts_and_rounds(4)
    slow = facts.leaders[1]
    facts = replace(facts, late=(slow,))
    leader = round_of(facts, facts.leaders[0])
    roster = led_roster(leader)
    assert roster.contribution_of(slow) is not None, "what it brings in time counts"
    assert slow not in roster.reducers
    asked_for = reduced(leader)
    others = [peer for peer in facts.members if peer not in (leader.me, slow)]
    out = vote(leader, asked_for, *others)
    assert only(out, SendBallot).proposal.phase == "commit"


def gives_up(member: AveragingRound, slow: PeerId, *, now: float) -> Instructions:
    """What a reducer does that has everything but the parts of one member, and waits no longer."""
    roster = member.roster
    assert roster is not None
    for part, reducer in enumerate(roster.reducers):
        for peer in facts_members(roster) if reducer == member.me else ():
            if peer not in (slow, member.me):
                member.on_part(peer, part)
    member.tick(now=member.deadline or now)
    return member.tick(now=now)


def facts_members(roster: Roster) -> tuple[PeerId, ...]:
    return tuple(made.peer_id for made in roster.contributions)


def test_a_leader_whose_own_parts_do_not_come_is_left_and_the_next_one_hears_so_at_once() -> None:
    facts, (slow, second, third, _) = facts_and_rounds(4)
    roster = roster_of(facts)
    for one in (second, third):
        one.contributed(contribution(one.me), now=0.0)
        one.on_roster(slow.me, roster, now=0.0)
    out = gives_up(third, slow.me, now=LATER_S)
    assert [peer for peer, _ in only(out, SayMissing).given_up] == [slow.me]
    commit = only(out, SendCommit)
    assert (commit.to, third.leader) == (second.me, second.me), "the next in turn"
    later = replace(roster_of(facts, view=1), reducers=roster.reducers)
    third.on_roster(second.me, signed(later), now=LATER_S)
    assert third.deadline == LATER_S, "who was given up is not waited for once more"
    said = only(third.tick(now=LATER_S), SayMissing)
    assert (said.to, [peer for peer, _ in said.given_up]) == (second.me, [slow.me])
    gives_up(second, slow.me, now=LATER_S)
    for _ in facts.members:
        third.unreachable(third.leader, now=LATER_S)
        assert third.leader != slow.me, "it leads only if nobody else is there"
        if third.leader == third.me:
            break


@pytest.mark.parametrize("gave_up", [False, True])
def test_a_leader_that_is_left_out_itself_reduces_nothing(gave_up: bool) -> None:
    """On a slow line it had given up everybody before, and gave all parts to itself; later leaders left it that."""
    facts, (slow, second, third) = facts_and_rounds(3)
    roster = led_roster(slow)
    assert slow.me in roster.reducers
    if gave_up:
        said = [(peer, lacks(roster, peer, [slow.me])[0].signature) for peer in facts.members if peer != slow.me]
        assert not slow.on_missing(slow.me, 0, [peer for peer, _ in said], said, now=LATER_S)
    words = lacks(roster, slow.me, [second.me, third.me])
    for word in words:
        out = slow.on_missing(word.reducer, 0, [slow.me], [(slow.me, word.signature)], now=LATER_S)
        if out:
            break
    smaller = only(out, SendRoster).roster
    assert [one.peer_id for one in smaller.left_out] == [slow.me]
    assert {*smaller.reducers} == {second.me, third.me}
    second.on_roster(slow.me, signed(replace(smaller, reducers=(slow.me,) * facts.num_parts)), now=LATER_S)
    next_one = closed(second, view=1).roster
    assert next_one is not None
    assert [one.peer_id for one in next_one.left_out] == [slow.me]
    assert {*next_one.reducers} == {second.me, third.me}


def test_who_is_given_more_to_reduce_waits_anew_for_what_is_sent_only_then() -> None:
    facts, (leader, second, third, slow) = facts_and_rounds(4)
    roster = roster_of(facts)
    second.contributed(contribution(second.me), now=0.0)
    second.on_roster(leader.me, roster, now=0.0)
    gives_up(second, slow.me, now=LATER_S)
    good = lacks(roster, slow.me, [leader.me, second.me, third.me])
    smaller = without(roster, slow.me, good, leader=leader, view=0)
    everything = replace(smaller, revision=1, reducers=(second.me,) * facts.num_parts, certificate=roster.certificate)
    second.on_roster(leader.me, signed(everything), now=LATER_S)
    (said,) = [one for one in second.tick(now=second.deadline or LATER_S) if isinstance(one, SayMissing)]
    assert set(said.missing) == {leader.me, third.me} | ({second.me} & set(said.missing))
    assert not said.given_up


def test_bytes_keep_nobody_with_a_leader_that_alone_has_not_reduced_its_parts() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    everyone = facts_members(roster)
    second.contributed(contribution(second.me), now=0.0)
    second.on_roster(leader.me, roster, now=0.0)
    waits_until = []
    for part, reducer in enumerate(roster.reducers):
        second.moved(leader.me, now=LATER_S + part)
        waits_until.append(second._patience.due)
        if reducer == third.me:
            second.on_reduced(third.me, reduced_part(part, everyone), now=0.0)
        elif reducer == second.me:
            for peer in everyone:
                second.on_part(peer, part)
            second.aggregated(reduced_part(part, everyone), now=0.0)
    second.moved(leader.me, now=2 * LATER_S)
    assert waits_until[0] is not None
    assert waits_until[0] > LATER_S
    assert second._patience.due is not None
    assert second._patience.due < 2 * LATER_S


def test_one_members_word_does_not_take_the_parts_of_whom_it_names() -> None:
    """A liar said that it lacked the parts of whomever it liked, and they reduced nothing more in that view."""
    _, (leader, slow, named, liar, last) = facts_and_rounds(5)
    roster = led_roster(leader)
    (word,) = lacks(roster, named.me, [liar.me])
    assert not leader.on_missing(liar.me, 0, [named.me], [(named.me, word.signature)], now=LATER_S)
    for lack in lacks(roster, slow.me, [liar.me, last.me, named.me]):
        out = leader.on_missing(lack.reducer, 0, [slow.me], [(slow.me, lack.signature)], now=LATER_S)
        if out:
            break
    smaller = only(out, SendRoster).roster
    assert [one.peer_id for one in smaller.left_out] == [slow.me]
    assert named.me in smaller.reducers
    assert slow.me not in smaller.reducers
