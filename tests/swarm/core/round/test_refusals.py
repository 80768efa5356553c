"""What a member of a round refuses: each wrong message names its kind and leaves the member as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.averaging_round import AveragingRound, SendRoster, SendVote
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Departure, Exclusion, ReducedPart, Result, Roster, Share
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voting import PHASES, Certificate, Promise, Proof, Vote, quorum
from tests.swarm.core.round.round_members import (
    asked_commit,
    asked_result,
    certificate_by,
    certified,
    closed,
    facts_and_rounds,
    fetched,
    only,
    promise_by,
    proof_by,
    resigned,
    result_of,
    roster_of,
    signed,
    signed_result,
    vote,
    vote_by,
    witnesses_of,
)
from tests.swarm.core.round.round_world import contribution, facts_of, identities, reduced_part, round_of

STRANGER = identities(5)[4].peer_id
"""No member of a round of at most four."""


@contextmanager
def refused(kind: str, machine: AveragingRound) -> Iterator[None]:
    """What is done within is refused for this reason and changes nothing."""
    before = repr(machine)
    with pytest.raises(RemoteError) as caught:
        yield
    assert caught.value.kind == kind, (kind, caught.value.kind, str(caught.value))
    assert repr(machine) == before


def bad_certificates(facts: RoundFacts, good: Certificate) -> list[Certificate | None]:
    """What is no certificate of what `good` certifies in its view."""
    phase, view, value = good.phase, good.view, good.value
    ballot = facts.election.ballot(phase, view, value)
    strangers = vote_by(facts, STRANGER, phase, view, value)
    forged = replace(good.votes[0], signature=good.votes[1].signature)
    elsewhere = replace(facts, previous_name=bytes(32))
    assert STRANGER not in facts.voters
    assert ballot != elsewhere.election.ballot(phase, view, value)
    return [
        None,
        certificate_by(facts, phase, view, value, facts.voters[: quorum(len(facts.voters)) - 1]),
        replace(good, votes=(good.votes[0],) * len(good.votes)),
        replace(good, votes=good.votes[::-1]),
        replace(good, votes=tuple(sorted((strangers, *good.votes[1:]), key=lambda cast: cast.voter))),
        replace(good, votes=(forged, *good.votes[1:])),
        replace(good, view=view + 1),
        certificate_by(facts, phase, view, bytes(32)),
        replace(certificate_by(facts, phase, view, bytes(32)), value=value),
        certificate_by(elsewhere, phase, view, value),
        *(certificate_by(facts, other, view, value) for other in PHASES if other != phase),
    ]


def test_bad_commits_are_refused_and_change_nothing() -> None:
    _, (leader, second, third) = facts_and_rounds(3)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    good = contribution(second.me)
    leader.on_commit(second.me, 0, good, None, None, None, now=0.1)
    theirs = contribution(third.me)
    for kind, sender, view, made in (
        ("equivocation", second.me, 0, contribution(second.me, num_work=2)),
        ("signature", third.me, 0, replace(theirs, signature=bytes(64))),
        ("signature", third.me, 0, replace(theirs, part_digests=theirs.part_digests[::-1])),
        ("protocol", third.me, 0, good),
        ("protocol", third.me, 1, theirs),
        ("protocol", third.me, 0, resigned(replace(theirs, run_id="other"))),
        ("protocol", third.me, 0, resigned(replace(theirs, stage=StageIndex(2)))),
        ("protocol", third.me, 0, resigned(replace(theirs, step=Step(8)))),
        ("fork", third.me, 0, resigned(replace(theirs, previous_name=bytes(32)))),
        ("protocol", third.me, 0, resigned(replace(theirs, part_digests=theirs.part_digests[1:]))),
        ("protocol", third.me, 0, resigned(replace(theirs, work=()))),
        ("standing", STRANGER, 0, contribution(STRANGER)),
    ):
        with refused(kind, leader):
            leader.on_commit(sender, view, made, None, None, None, now=0.2)


def test_bad_promises_are_refused_and_change_nothing() -> None:
    facts, (first, leader, third) = facts_and_rounds(3, witnesses=1)
    (witness,) = witnesses_of(facts)
    leader.close(reason="the leader is gone", joins=[], view=1, now=0.0)
    theirs, roster = contribution(third.me), roster_of(facts, view=1)

    def cases(voter: PeerId) -> list[tuple[str, Promise]]:
        good = promise_by(facts, voter, 1)
        return [
            ("signature", replace(good, signature=bytes(64))),
            ("signature", replace(good, roster=(0, bytes(32)))),
            ("protocol", promise_by(facts, first.me, 1)),
            ("certificate", promise_by(facts, voter, 1, roster=roster.certificate)),
            ("signature", promise_by(replace(facts, step=Step(8)), voter, 1)),
        ]

    for kind, promise in cases(third.me):
        with refused(kind, leader):
            leader.on_commit(third.me, 1, theirs, promise, None, None, now=0.1)
    ahead = promise_by(facts, third.me, 4)
    with refused("certificate", leader):
        leader.on_commit(third.me, 1, theirs, ahead, None, None, now=0.1)
    for kind, promise in cases(witness):
        with refused(kind, leader):
            leader.on_promise(witness, promise, None, None, now=0.1)
    stranger = promise_by(facts, STRANGER, 1)
    with refused("certificate", leader):
        leader.on_promise(STRANGER, stranger, None, None, now=0.1)
    waiting = round_of(facts, leader.me)  # it has not begun: what a refused message asks for is never carried out
    for _, promise in cases(third.me):
        with pytest.raises(RemoteError):
            waiting.on_commit(third.me, 1, theirs, promise, None, None, now=0.1)
    assert repr(waiting) == repr(round_of(facts, leader.me))
    # Of another view it is genuine and of no use.
    assert leader.on_promise(witness, promise_by(facts, witness, 4), None, None, now=0.1) == []
    assert set(leader._lead.ballots.promises) == {leader.me}


def test_what_is_shown_with_a_promise_must_be_certified() -> None:
    facts, (_, leader, third) = facts_and_rounds(3, witnesses=1)
    (witness,) = witnesses_of(facts)
    leader.close(reason="the leader is gone", joins=[], view=1, now=0.0)
    roster = roster_of(facts)
    assert roster.certificate is not None
    likely = certified(facts, result_of(facts, roster), phase="result")
    outcome = certified(facts, result_of(facts, roster))
    assert likely.certificate is not None
    assert outcome.certificate is not None
    rosters = [replace(roster, certificate=bad) for bad in bad_certificates(facts, roster.certificate)]
    results = [replace(likely, certificate=bad) for bad in bad_certificates(facts, likely.certificate)[:-1]]
    results += [replace(outcome, certificate=bad) for bad in bad_certificates(facts, outcome.certificate)[:-1]]
    shown: list[tuple[Roster | None, Result | None]] = [*((made, None) for made in rosters)]
    shown += [(None, made) for made in results if made.certificate is None or made.certificate.view == 0]
    shown += [(None, replace(outcome, roster=made)) for made in rosters]
    made, promise = contribution(third.me), promise_by(facts, third.me, 1)
    before = repr(leader)
    for number, (earlier, result) in enumerate(shown):
        with pytest.raises(RemoteError) as by_commit:
            leader.on_commit(third.me, 1, made, promise, earlier, result, now=0.1)
        with pytest.raises(RemoteError) as by_promise:
            leader.on_promise(witness, promise_by(facts, witness, 1), earlier, result, now=0.1)
        assert by_commit.value.kind == by_promise.value.kind == "certificate", (number, str(by_commit.value))
        assert repr(leader) == before, number


def test_bad_rosters_are_refused_and_change_nothing() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    good = roster_of(facts)
    assert good.certificate is not None
    forged = tuple(replace(made, signature=bytes(64)) for made in good.contributions)
    no_work = tuple(contribution(made.peer_id, num_work=0) for made in good.contributions)
    crowd = tuple(PeerId(f"joiner {number}") for number in range(MAX_MEMBERS))
    cases: list[tuple[str, Roster]] = [
        ("signature", replace(good, reason="other")),
        ("protocol", signed(replace(good, run_id="other"))),
        ("protocol", signed(replace(good, stage=StageIndex(0)))),
        ("protocol", signed(replace(good, step=Step(8)))),
        ("fork", signed(replace(good, previous_name=bytes(32)))),
        ("fork", signed(replace(good, members=good.members[1:]))),
        ("protocol", signed(replace(good, view=1))),
        ("certificate", signed(replace(good, view=3 << 40))),
        ("protocol", signed(replace(good, leader=second.me))),
        ("protocol", signed(replace(good, reducers=good.reducers[1:]))),
        ("protocol", signed(replace(good, reducers=(*good.reducers, leader.me)))),
        ("standing", signed(replace(good, reducers=(STRANGER,) * 3))),
        ("signature", signed(replace(good, contributions=forged))),
        ("protocol", signed(replace(good, contributions=no_work))),
        ("standing", signed(replace(good, contributions=(contribution(STRANGER),)))),
        ("protocol", signed(replace(good, leaves=(Departure(STRANGER, ""),)))),
        ("protocol", signed(replace(good, leaves=(Departure(leader.me, ""),), reducers=(second.me,) * 3))),
        ("protocol", signed(replace(good, leaves=(Departure(third.me, ""),), reducers=(second.me,) * 3))),
        ("protocol", signed(replace(good, joins=(second.me,)))),
        ("protocol", signed(replace(good, joins=(STRANGER, STRANGER)))),
        ("protocol", signed(replace(good, joins=crowd))),
        ("certificate", signed(replace(good, joins=(STRANGER,)))),
        ("certificate", signed(replace(good, neighbours=(STRANGER,)))),
        ("certificate", signed(replace(good, contributions=good.contributions[:1]))),
        *(("certificate", replace(good, certificate=bad)) for bad in bad_certificates(facts, good.certificate)),
    ]
    for kind, roster in cases:
        with refused(kind, second):
            second.on_roster(leader.me, roster, now=0.0)
    second.on_roster(leader.me, good, now=0.0)
    assert second.roster == good
    with refused("equivocation", second):
        second.on_roster(leader.me, signed(replace(good, reason="other")), now=0.1)


def test_a_certificate_of_another_view_does_not_certify_a_roster() -> None:
    """The facts were certified in view 0; in view 1 they need votes again."""
    facts, (first, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    again = signed(replace(roster, view=1, leader=second.me))
    with refused("certificate", third):
        third.on_roster(second.me, again, now=0.0)
    assert third.on_roster(first.me, roster, now=0.0) == []


def test_bad_parts_are_refused() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    with pytest.raises(RemoteError):
        second.on_part(leader.me, 0)  # before any roster: the driver holds it back
    second.on_roster(leader.me, roster_of(facts), now=0.0)
    for sender, part in ((STRANGER, 0), (leader.me, 3), (leader.me, -1), (leader.me, 1 << 40)):
        with refused("protocol", second):
            second.on_part(sender, part)
    for kind, sender, reduced in (
        ("standing", STRANGER, reduced_part(0, facts.members)),
        ("protocol", third.me, reduced_part(3, facts.members)),
        ("protocol", third.me, reduced_part(-1, facts.members)),
        ("protocol", third.me, ReducedPart.empty(0)),
        ("protocol", third.me, reduced_part(0, (STRANGER,))),
    ):
        with refused(kind, second):
            second.on_reduced(sender, reduced, now=0.1)


def test_a_reducer_cannot_fill_memory_with_versions_of_a_part() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    second.on_roster(leader.me, roster_of(facts), now=0.0)
    num_refused = 0
    for number in range(1, 101):
        made = replace(reduced_part(0, (leader.me,)), digest=number.to_bytes(32, "big"))
        try:
            second.on_reduced(third.me, made, now=0.1)
        except RemoteError:
            num_refused += 1
    assert len(second._reduction.parts.held) + num_refused == 100
    assert len(second._reduction.parts.held) <= 4


def _bad_results(facts: RoundFacts, good: Result) -> list[tuple[str, Result]]:
    """Results that neither a vote nor an outcome can be."""
    roster = good.roster
    assert roster.certificate is not None
    return [
        ("signature", replace(good, parts=(replace(good.parts[0], digest=b"x" * 32), *good.parts[1:]))),
        ("signature", replace(good, signature=bytes(64))),
        ("protocol", signed_result(replace(good, parts=good.parts[1:]))),
        ("protocol", signed_result(replace(good, parts=(reduced_part(0, (STRANGER,)), *good.parts[1:])))),
        ("standing", signed_result(replace(good, leader=STRANGER))),
        ("fork", signed_result(replace(good, roster=signed(replace(roster, previous_name=bytes(32)))))),
        ("signature", signed_result(replace(good, roster=replace(roster, reason="other")))),
        *(
            ("certificate", signed_result(replace(good, roster=replace(roster, certificate=bad))))
            for bad in bad_certificates(facts, roster.certificate)
        ),
    ]


def test_bad_results_are_refused_and_change_nothing() -> None:
    facts, (_, second, _) = facts_and_rounds(3)
    good = certified(facts, result_of(facts, roster_of(facts)))
    assert good.certificate is not None
    for kind, result in _bad_results(facts, good):
        with refused(kind, second):
            second.on_result(result, now=0.0)
    uncertified = [replace(good, certificate=bad) for bad in bad_certificates(facts, good.certificate)]
    other_parts = signed_result(replace(good, parts=tuple(ReducedPart.empty(part) for part in range(3))))
    for result in (*uncertified, other_parts):
        with refused("certificate", second):
            second.on_result(result, now=0.0)
    second.on_result(good, now=0.0)
    fetched(second, good)
    assert second.finished
    assert second.on_result(good, now=0.1) == []


@pytest.mark.parametrize(
    "said",
    [
        {"excluded": (Exclusion(facts_of(3).members[0], "malformed"),)},
        {"shares": (Share(0, facts_of(3).members[0], bytes(32)),)},
    ],
    ids=["names somebody", "has shares"],
)
def test_an_empty_part_about_which_its_leader_says_something_is_refused(said: dict[str, Any]) -> None:
    facts, (_, second, _) = facts_and_rounds(3)
    roster = roster_of(facts)
    parts = (replace(ReducedPart.empty(0), **said), *result_of(facts, roster).parts[1:])
    with refused("protocol", second):
        second.on_result(certified(facts, result_of(facts, roster, parts=parts)), now=0.0)


def test_a_second_certified_outcome_is_refused() -> None:
    """More voters lie than may: what was applied stays."""
    facts, (_, second, _) = facts_and_rounds(3)
    good = result_of(facts, roster_of(facts))
    other = result_of(facts, good.roster, parts=tuple(ReducedPart.empty(part) for part in range(3)))
    second.on_result(certified(facts, good), now=0.0)
    with refused("fork", second):
        second.on_result(certified(facts, other), now=0.1)


def test_bad_ballots_are_refused_and_change_nothing() -> None:
    facts, (first, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    result = result_of(facts, roster)
    fresh = Proposal.of_roster(replace(roster, certificate=None), Proof())
    good = asked_result(facts, result)
    cases: list[tuple[str, PeerId, Proposal]] = [
        ("protocol", second.me, fresh),
        ("protocol", STRANGER, fresh),
        ("signature", first.me, Proposal.of_roster(replace(roster, reason="other"), Proof())),
        *((kind, first.me, asked_result(facts, bad)) for kind, bad in _bad_results(facts, result)),
        # In the first view there is nothing to prove a result by but its roster's certificate.
        ("equivocation", first.me, replace(good, proof=Proof())),
        ("certificate", first.me, replace(good, proof=Proof((), certificate_by(facts, "roster", 0, bytes(32))))),
    ]
    for kind, sender, proposal in cases:
        with refused(kind, third):
            third.on_ballot(sender, proposal, now=0.0)
    commit = asked_commit(facts, result)
    assert commit.proof.certificate is not None
    for bad in bad_certificates(facts, commit.proof.certificate)[1:]:
        assert bad is not None
        wrong = replace(commit, proof=Proof((), bad))
        with refused("certificate", third):
            third.on_ballot(first.me, wrong, now=0.0)


def test_a_new_leader_may_propose_only_what_the_promises_allow() -> None:
    facts, (_, leader, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    result = result_of(facts, roster)
    assert roster.certificate is not None
    decided = certificate_by(facts, "result", 0, result.root())
    smaller = {peer: contribution(peer) for peer in facts.members[:2]}
    again, fresh = (
        replace(made, certificate=None)
        for made in (roster_of(facts, view=1), roster_of(facts, view=1, commits=smaller))
    )
    other = result_of(facts, roster, parts=tuple(ReducedPart.empty(part) for part in range(3)))
    bound = proof_by(facts, 1, bound=roster.certificate)
    must = proof_by(facts, 1, bound=decided)
    hidden = replace(bound, certificate=None)
    few = replace(bound, promises=bound.promises[:1])
    twice = replace(bound, promises=(bound.promises[0],) * 3)
    of_strangers = proof_by(facts, 1, voters=[STRANGER, facts.members[0]])
    of_another_view = proof_by(facts, 4, bound=roster.certificate)
    forged = replace(bound, promises=(replace(bound.promises[0], roster=None), *bound.promises[1:]))
    cases: list[tuple[str, Proposal]] = [
        ("equivocation", Proposal.of_roster(fresh, bound)),
        ("equivocation", Proposal.of_result(result, 1, bound)),
        ("equivocation", Proposal.of_result(result, 1, proof_by(facts, 1))),
        ("equivocation", Proposal.of_result(other, 1, must)),
        ("equivocation", Proposal.of_roster(again, must)),
        ("certificate", Proposal.of_roster(fresh, Proof())),
        ("certificate", Proposal.of_roster(again, hidden)),
        ("certificate", Proposal.of_roster(again, few)),
        ("certificate", Proposal.of_roster(again, twice)),
        ("certificate", Proposal.of_roster(again, of_strangers)),
        ("certificate", Proposal.of_roster(again, of_another_view)),
        ("signature", Proposal.of_roster(again, forged)),
        *(
            ("certificate", Proposal.of_roster(again, replace(bound, certificate=bad)))
            for bad in bad_certificates(facts, roster.certificate)
        ),
        # The highest of what the promises name binds, whoever else names a lower one.
        ("equivocation", Proposal.of_roster(again, replace(must, promises=(bound.promises[0], *must.promises[1:])))),
    ]
    for kind, proposal in cases:
        with refused(kind, third):
            third.on_ballot(leader.me, proposal, now=0.0)
    free = proof_by(facts, 1)
    for allowed in (Proposal.of_roster(fresh, free), Proposal.of_roster(again, bound)):
        _, (_, _, member) = facts_and_rounds(3)
        assert only(member.on_ballot(leader.me, allowed, now=0.0), SendVote).vote.voter == third.me
    fetched(third, result)
    assert only(third.on_ballot(leader.me, Proposal.of_result(result, 1, must), now=0.0), SendVote)


def test_a_result_is_refused_unless_its_roster_carries_the_certificate_that_is_shown() -> None:
    """Else voters would promise to follow a certificate that none of them could show: no later view could begin."""
    facts, (_, leader, third) = facts_and_rounds(3)
    old = roster_of(facts)
    certificate = certificate_by(facts, "roster", 1, old.facts_digest())
    result = result_of(facts, old, leader=leader.me)
    fetched(third, result)
    asked = Proposal.of_result(result, 1, Proof((), certificate))
    with refused("certificate", third):
        third.on_ballot(leader.me, asked, now=0.0)


def test_bad_votes_are_refused_or_of_no_use() -> None:
    facts, (leader, second, third, fourth) = facts_and_rounds(4)
    asked = closed(leader)
    facts_digest = asked.value
    good = vote_by(facts, second.me, "roster", 0, facts_digest)
    assert leader.on_vote(second.me, 0, "roster", facts_digest, good, now=0.0) == []
    cases: list[tuple[str, PeerId, Vote]] = [
        ("protocol", third.me, good),
        ("signature", third.me, Vote(third.me, good.signature)),
        ("signature", third.me, vote_by(facts, third.me, "result", 0, facts_digest)),
        ("signature", third.me, vote_by(facts, third.me, "roster", 1, facts_digest)),
        ("signature", third.me, vote_by(facts, third.me, "roster", 0, bytes(32))),
        ("standing", STRANGER, vote_by(facts, STRANGER, "roster", 0, facts_digest)),
    ]
    for kind, sender, cast in cases:
        with refused(kind, leader):
            leader.on_vote(sender, 0, "roster", facts_digest, cast, now=0.0)
    before = repr(leader)
    theirs = vote_by(facts, third.me, "roster", 0, facts_digest)
    for view, phase, value in ((1, "roster", facts_digest), (0, "result", facts_digest), (0, "roster", bytes(32))):
        assert leader.on_vote(third.me, view, phase, value, theirs, now=0.0) == []
    assert leader.on_vote(second.me, 0, "roster", facts_digest, good, now=0.0) == []  # counted once
    assert repr(leader) == before
    assert only(vote(leader, asked, fourth.me), SendRoster).roster == leader.roster


def test_whoever_does_not_lead_counts_nothing() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    asked = closed(leader)
    cast = vote_by(facts, third.me, "roster", 0, asked.value)
    before = repr(second)
    assert second.on_vote(third.me, 0, "roster", asked.value, cast, now=0.0) == []
    assert repr(second) == before
