"""A contribution whose parts do not come is left out whole, by the words of a quorum of reducers and of nobody else."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from swarm.core.audit.beacon import Beacon
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import AveragingRound, SayMissing, SendRoster, SendVote
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Lack, LeftOut, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voting import Proof
from swarm.identity.key import verify
from tests.swarm.core.audit.chances import HOST_CHAIN, said_by
from tests.swarm.core.round.round_members import (
    asked_result,
    certified,
    facts_and_rounds,
    fetched,
    has,
    led_roster,
    only,
    proof_by,
    result_of,
    roster_of,
    signed,
)
from tests.swarm.core.round.round_world import contribution, identity_of

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
    second.on_roster(leader.me, smaller, now=LATER_S)
    assert second.roster == leader.roster == smaller
    with pytest.raises(RemoteError, match="not on the roster"):
        second.expected_digest(0, slow.me)
    result = result_of(facts, smaller)
    second.on_ballot(leader.me, asked_result(facts, result), now=LATER_S)
    assert has(fetched(second, result), SendVote)
    facts.check_result(certified(facts, result), verify, certified=True)


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
