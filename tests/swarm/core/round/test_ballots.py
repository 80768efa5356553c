"""Proposals as they come over the wire, and a leader's count of promises and votes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.round.ballots import Ballots, Proposal
from swarm.core.round.contribution import ReducedPart
from swarm.core.round.voter import RoundVoter, Witness
from swarm.core.round.voting import Certificate, Promise, Proof, Vote, quorum
from tests.swarm.core.round.round_members import (
    asked_commit,
    asked_result,
    certificate_by,
    facts_and_rounds,
    promise_by,
    proof_by,
    result_of,
    roster_of,
    vote_by,
    witnesses_of,
)
from tests.swarm.core.round.round_world import cached_verify, identities, identity_of, words_for, words_of
from tests.swarm.core.test_fields import SCALARS

FACTS = facts_and_rounds(3, witnesses=1)[0]
ROSTER = roster_of(FACTS)
RESULT = result_of(FACTS, ROSTER)
DECIDED = certificate_by(FACTS, "result", 0, RESULT.root())
PROPOSALS = (
    Proposal.of_roster(replace(ROSTER, certificate=None), Proof()),
    Proposal.of_roster(
        replace(roster_of(FACTS, view=1), certificate=None), proof_by(FACTS, 1, bound=ROSTER.certificate)
    ),
    asked_result(FACTS, RESULT),
    Proposal.of_result(RESULT, 1, proof_by(FACTS, 1, bound=DECIDED)),
    asked_commit(FACTS, RESULT),
)
MESSAGES: tuple[Proposal | Proof | Promise | Certificate | Vote, ...] = (
    *PROPOSALS,
    PROPOSALS[1].proof,
    PROPOSALS[1].proof.promises[0],
    promise_by(FACTS, FACTS.voters[0], 3, roster=ROSTER.certificate, result=DECIDED),
    DECIDED,
    DECIDED.votes[0],
)


def _witness() -> Witness:
    (me,) = witnesses_of(FACTS)
    return Witness(RoundVoter(FACTS, me, identity_of(me).sign, cached_verify))


def _with(value: Value, other: Value, rng: random.Random) -> Value:
    """`value` with `other` in a place drawn at random."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {name: held for name, held in value.items() if name != key}
        return {**value, key: _with(value[key], other, rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], _with(value[at], other, rng), *value[at + 1 :]]
    return other


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_written_is_read(message: Proposal) -> None:
    assert type(message).from_value(unpack(pack(message.to_value()), max_bytes=1 << 20)) == message


@settings(max_examples=1000, deadline=None)
@given(
    message=st.sampled_from(MESSAGES),
    other=SCALARS | st.sampled_from([message.to_value() for message in MESSAGES]),
    seed=st.integers(0, 1 << 32),
)
def test_a_mangled_message_is_refused_or_read_as_it_is(message: Proposal, other: Value, seed: int) -> None:
    mangled = _with(message.to_value(), other, random.Random(seed))
    try:
        read = type(message).from_value(mangled)
    except RemoteError:
        return
    assert type(message).from_value(read.to_value()) == read
    if isinstance(read, Proposal):  # whatever it now says, the voter votes for that, or refuses
        try:
            words = words_of(read)
        except ValueError:  # nobody has reduced under such a roster
            words = None
        try:
            vote = _witness().on_ballot(FACTS.leader_of(read.view), read, words)
        except RemoteError:
            return
        if vote is not None:
            (me,) = witnesses_of(FACTS)
            assert vote == vote_by(FACTS, me, read.phase, read.view, read.value)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_a_proposal_cannot_be_changed_in_any_leaf(proposal: Proposal) -> None:
    """Each leaf is under a signature, or is held against what is."""
    witness = _witness()
    witness.on_ballot(
        FACTS.leader_of(0), asked_result(FACTS, RESULT), words_for(RESULT)
    )  # it knows what it may commit to
    assert witness.on_ballot(FACTS.leader_of(proposal.view), proposal, words_of(proposal)) is not None
    changed = _leaves_changed(proposal.to_value())
    assert len(changed) > 10
    num_read = 0
    for value in changed:
        try:
            read = Proposal.from_value(value)
        except RemoteError:
            continue
        num_read += 1
        with pytest.raises(RemoteError):
            witness.on_ballot(FACTS.leader_of(proposal.view), read)
    assert num_read > 5


def _leaves_changed(value: Value) -> list[Value]:
    if isinstance(value, dict):
        return [{**value, key: other} for key in sorted(value) for other in _leaves_changed(value[key])]
    if isinstance(value, list):
        return [[*value[:at], o, *value[at + 1 :]] for at in range(len(value)) for o in _leaves_changed(value[at])]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, str):
        return [value + "x"]
    return [bytes([value[0] ^ 1]) + value[1:]] if isinstance(value, bytes) else []


def test_a_proposal_that_contradicts_itself_is_malformed() -> None:
    fresh, _, result, _, commit = PROPOSALS
    other = replace(ROSTER, view=1, certificate=None)
    for wrong in (
        replace(fresh, phase="result"),
        replace(fresh, phase="commit"),
        replace(fresh, result=RESULT),
        replace(fresh, roster=None),
        replace(fresh, roster=other),
        replace(fresh, view=1),
        replace(result, phase="roster"),
        replace(result, result=None),
        replace(commit, proof=Proof()),
        replace(commit, view=1),
        replace(commit, roster=ROSTER),
        replace(commit, view=(1 << 20) + 1),
    ):
        with pytest.raises(RemoteError) as caught:
            Proposal.from_value(wrong.to_value())
        assert caught.value.kind == "malformed"


def test_a_proposal_of_another_value_is_refused_once_it_is_held_against_the_round() -> None:
    for proposal in PROPOSALS[:4]:
        with pytest.raises(RemoteError, match="another value"):
            _witness().on_ballot(FACTS.leader_of(proposal.view), replace(proposal, value=bytes(32)))


def _ballots(view: int = 1) -> Ballots:
    return Ballots(FACTS.election, cached_verify, view)


def test_promises_of_a_quorum_begin_a_view() -> None:
    ballots = _ballots()
    for number, voter in enumerate(FACTS.voters):
        proof = ballots.proof(())
        assert (proof is not None) == (number >= quorum(len(FACTS.voters)))
        ballots.promised(promise_by(FACTS, voter, 1))
    proof = ballots.proof(())
    assert proof is not None
    assert FACTS.election.bound(1, proof, cached_verify) is None


def test_of_what_promises_name_the_highest_that_is_known_binds() -> None:
    """A liar that names a certificate of its own invention is not counted; the others suffice without it."""
    assert ROSTER.certificate is not None
    known = (ROSTER.certificate, DECIDED)
    ballots = _ballots(view=4)
    invented = certificate_by(FACTS, "result", 3, b"x" * 32, FACTS.voters[:1])
    ballots.promised(promise_by(FACTS, FACTS.voters[0], 4, result=invented))
    ballots.promised(promise_by(FACTS, FACTS.voters[1], 4))
    ballots.promised(promise_by(FACTS, FACTS.voters[2], 4, roster=ROSTER.certificate))
    assert ballots.proof(known) is None
    ballots.promised(promise_by(FACTS, FACTS.voters[3], 4, roster=ROSTER.certificate, result=DECIDED))
    assert ballots.proof(known[:1]) is None
    proof = ballots.proof(known)
    assert proof is not None
    assert proof.certificate == DECIDED
    assert [promise.voter for promise in proof.promises] == list(FACTS.voters[1:])
    assert FACTS.election.bound(4, proof, cached_verify) == DECIDED


def test_only_votes_for_what_is_asked_now_are_counted() -> None:
    stranger = identities(9)[8].peer_id
    ballots = _ballots(view=0)
    asked, _, later, _, _ = PROPOSALS
    votes = [vote_by(FACTS, voter, "roster", 0, asked.value) for voter in FACTS.voters]
    assert not ballots.count(votes[0], "roster", 0, asked.value)  # nothing is asked
    assert ballots.certificate() is None
    ballots.ask(asked)
    with pytest.raises(RemoteError) as caught:
        ballots.count(vote_by(FACTS, stranger, "roster", 0, asked.value), "roster", 0, asked.value)
    assert caught.value.kind == "standing"
    for number, vote in enumerate(votes):
        assert (ballots.certificate() is not None) == (number >= quorum(len(FACTS.voters)))
        assert ballots.count(vote, "roster", 0, asked.value)
        assert not ballots.count(vote, "roster", 0, asked.value)
    certificate = ballots.certificate()
    assert certificate is not None
    FACTS.election.check_certificate(certificate, "roster", asked.value, cached_verify)
    ballots.ask(later)
    assert (ballots.before, ballots.votes, ballots.certificate()) == (asked, {}, None)
    assert not ballots.count(votes[0], "roster", 0, asked.value)
    empty = replace(RESULT, parts=tuple(ReducedPart.empty(part) for part in range(3)))
    other = vote_by(FACTS, FACTS.voters[0], "result", 0, empty.root())
    assert not ballots.count(other, "result", 0, empty.root())
