"""A voter that is no member: what it signs for a leader, and what it can show to the next one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.ballots import Proposal
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voter import ALONE_S, RoundVoter, Witness
from swarm.core.round.voting import Promise, Proof, Vote
from tests.swarm.core.round.round_members import (
    asked_commit,
    asked_result,
    certificate_by,
    certified,
    facts_and_rounds,
    promise_by,
    proof_by,
    result_of,
    roster_of,
    vote_by,
    witnesses_of,
)
from tests.swarm.core.round.round_world import cached_verify, contribution, identities, identity_of, words_for, words_of


def _witness(num_members: int = 3, *, votes: bool = True) -> tuple[RoundFacts, Witness]:
    facts, _ = facts_and_rounds(num_members, witnesses=1)
    (me,) = witnesses_of(facts)
    return facts, Witness(RoundVoter(facts, me, identity_of(me).sign, cached_verify, votes))


def test_a_witness_votes_in_each_phase_without_the_bytes() -> None:
    facts, witness = _witness()
    leader, me = facts.leader_of(0), witness.voter.me
    roster = roster_of(facts)
    result = result_of(facts, roster)
    asked = (
        Proposal.of_roster(replace(roster, certificate=None), Proof()),
        asked_result(facts, result),
        asked_commit(facts, result),
    )
    for proposal in (*asked, *asked):  # asked again, it answers the same
        vote = witness.on_ballot(leader, proposal, words_of(proposal))
        assert vote == vote_by(facts, me, proposal.phase, 0, proposal.value)
    assert witness.voter.outcome is None  # a vote to commit is not the outcome yet


def test_a_witness_shows_what_it_voted_to_commit_to() -> None:
    facts, witness = _witness()
    roster = roster_of(facts)
    result = result_of(facts, roster)
    assert (witness.voter.roster, witness.voter.result, witness.voter.certificates()) == (None, None, ())
    witness.on_ballot(facts.leader_of(0), asked_result(facts, result), words_for(result))
    assert (witness.voter.roster, witness.voter.result) == (roster, None)
    witness.on_ballot(facts.leader_of(0), asked_commit(facts, result))
    assert witness.voter.result == certified(facts, result, phase="result")
    promise = witness.on_ask(facts.leader_of(1), 1, proof_by(facts, 1), now=0.0)
    assert promise is not None
    assert promise.roster == (0, roster.facts_digest())
    assert promise.result == (0, result.root())
    assert {made.rank: made.value for made in witness.voter.certificates()} == {
        (0, 0): roster.facts_digest(),
        (0, 1): result.root(),
    }


def test_a_witness_commits_to_nothing_it_could_not_show() -> None:
    facts, witness = _witness()
    result = result_of(facts, roster_of(facts))
    assert witness.on_ballot(facts.leader_of(0), asked_commit(facts, result)) is None
    assert witness.voter.result is None
    assert witness.on_ballot(facts.leader_of(0), asked_result(facts, result), words_for(result)) is not None
    assert witness.on_ballot(facts.leader_of(0), asked_commit(facts, result)) is not None


def test_a_witness_votes_for_nothing_below_its_promise_and_once_in_a_phase() -> None:
    facts, witness = _witness()
    roster = replace(roster_of(facts), certificate=None)
    smaller = {peer: contribution(peer) for peer in facts.members[:2]}
    other = replace(roster_of(facts, view=1, commits=smaller), certificate=None)
    promise = witness.on_ask(facts.leader_of(1), 1, proof_by(facts, 1), now=0.0)
    assert promise is not None
    assert witness.on_ask(facts.leader_of(1), 1, proof_by(facts, 1), now=0.0) == promise
    assert witness.on_ballot(facts.leader_of(0), Proposal.of_roster(roster, Proof())) is None
    again = replace(roster_of(facts, view=1), certificate=None)
    free = proof_by(facts, 1)
    assert witness.on_ballot(facts.leader_of(1), Proposal.of_roster(other, free)) is not None
    assert witness.on_ballot(facts.leader_of(1), Proposal.of_roster(again, free)) is None
    assert witness.on_ask(facts.leader_of(2), 2, proof_by(facts, 2), now=0.0) is not None
    assert witness.on_ask(facts.leader_of(1), 1, proof_by(facts, 1), now=0.0) is None


def test_a_witness_answers_only_whoever_leads_the_view_it_is_asked_in() -> None:
    facts, witness = _witness()
    asked = Proposal.of_roster(replace(roster_of(facts), certificate=None), Proof())
    stranger = identities(5)[4].peer_id
    before = repr(witness)
    for sender in (facts.leader_of(1), stranger, witness.voter.me):
        with pytest.raises(RemoteError):
            witness.on_ballot(sender, asked)
        with pytest.raises(RemoteError):
            witness.on_ask(sender, 3, proof_by(facts, 3), now=0.0)
    with pytest.raises(RemoteError):
        witness.on_ballot(facts.leader_of(0), replace(asked, proof=Proof(), roster=roster_of(facts, view=1), view=1))
    assert repr(witness) == before


def test_a_leader_whom_too_few_members_follow_uses_up_no_view_of_a_witness() -> None:
    facts, witness = _witness()
    own = Proof((promise_by(facts, facts.leader_of(3), 3),))
    with pytest.raises(TransientError):
        witness.on_ask(facts.leader_of(3), 3, own, now=0.0)
    assert witness.on_ask(facts.leader_of(3), 3, own, gone=facts.leaders[1:], now=0.0) is not None, (
        "nobody else is there"
    )
    with pytest.raises(RemoteError) as caught:
        witness.on_ask(facts.leader_of(4), 4, proof_by(facts, 5), now=0.0)
    assert caught.value.kind == "certificate"
    two = Proof(tuple(promise_by(facts, peer, 4) for peer in facts.members[:2]))
    assert witness.on_ask(facts.leader_of(4), 4, two, now=0.0) is not None


def test_of_two_members_one_alone_has_a_witness_promise_each_view_at_once_twice_and_ever_later() -> None:
    facts, witness = _witness(2)

    def ask(view: int, now: float, *, by: int = 1, gone: Sequence[PeerId] = ()) -> Promise | None:
        leader = facts.leader_of(view)
        shown = Proof(tuple(promise_by(facts, peer, view) for peer in [leader, *others_than(leader)][:by]))
        return witness.on_ask(leader, view, shown, gone=gone, now=now)

    def others_than(leader: PeerId) -> list[PeerId]:
        return [peer for peer in facts.members if peer != leader]

    def waits(view: int, now: float, until: float) -> None:
        with pytest.raises(TransientError, match="alone"):
            ask(view, now)
        with pytest.raises(TransientError, match="alone"):
            ask(view, until - 0.1)
        assert ask(view, until) is not None

    assert ask(1, 0.0) is not None
    assert ask(2, 0.1) is not None
    waits(3, 0.2, 0.1 + ALONE_S)
    assert ask(3, 0.2) is not None, "it has promised that one"
    now = 0.1 + ALONE_S
    waits(5, now, now + 2 * 2 * ALONE_S)  # after a view of its own
    now += 4 * ALONE_S
    assert ask(6, now, by=2) is not None, "both have turned to it"
    assert ask(7, now, gone=others_than(facts.leader_of(7))) is not None, "nobody else is there"
    waits(8, now, now + 4 * ALONE_S)
    now += 4 * ALONE_S
    assert ask(8, now, by=2) is not None, "the other has come to it since"
    waits(9, now, now + 4 * ALONE_S)


def test_a_witness_that_does_not_vote_still_learns_and_shows() -> None:
    facts, witness = _witness(votes=False)
    roster = roster_of(facts)
    result = result_of(facts, roster)
    asked = [Proposal.of_roster(replace(roster, certificate=None), Proof()), asked_result(facts, result)]
    votes: list[Vote | None] = [
        witness.on_ballot(facts.leader_of(0), proposal, words_of(proposal)) for proposal in asked
    ]
    votes.append(witness.on_ballot(facts.leader_of(0), asked_commit(facts, result)))
    assert votes == [None, None, None]
    assert witness.on_ask(facts.leader_of(1), 1, proof_by(facts, 1), now=0.0) is None
    assert witness.voter.roster == roster


def test_what_is_learned_is_kept_if_it_is_higher_and_the_outcome_for_ever() -> None:
    facts, witness = _witness()
    voter = witness.voter
    lower, higher = roster_of(facts), roster_of(facts, view=1)
    moved = roster_of(facts, view=1, revision=1)
    for roster in (higher, lower, moved, higher):
        voter.learn(roster, None)
    assert voter.roster == moved
    likely = [certified(facts, result_of(facts, made), phase="result", view=made.view) for made in (higher, lower)]
    for result in likely:
        voter.learn(None, result)
    assert voter.result == likely[0]
    outcome = certified(facts, result_of(facts, lower))
    voter.learn(None, outcome)
    voter.learn(None, likely[0])
    assert voter.result == outcome


def test_nothing_is_learned_from_what_is_not_certified() -> None:
    facts, witness = _witness()
    roster = roster_of(facts)
    result = result_of(facts, roster)
    wrong: list[PeerId] = [*facts.voters[:1], *(identity.peer_id for identity in identities(6)[4:])]
    before = repr(witness)
    for certificate in (
        None,
        certificate_by(facts, "roster", 0, roster.facts_digest(), facts.voters[:1]),
        certificate_by(facts, "roster", 0, roster.facts_digest(), wrong),
        certificate_by(facts, "result", 0, roster.facts_digest()),
    ):
        with pytest.raises(RemoteError) as caught:
            witness.voter.learn(replace(roster, certificate=certificate), None)
        assert caught.value.kind == "certificate"
    for phase in ("result", "commit"):
        good = certified(facts, result, phase=phase)
        assert good.certificate is not None
        few = replace(good, certificate=replace(good.certificate, votes=good.certificate.votes[:1]))
        for bad in (replace(good, certificate=None), few):
            with pytest.raises(RemoteError) as caught:
                witness.voter.learn(None, bad)
            assert caught.value.kind == "certificate"
    assert repr(witness) == before
