"""The messages of a round: their bytes for ever, what is refused, and what a contribution weighs."""

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import (
    EMPTY_DIGEST,
    Contribution,
    Departure,
    Exclusion,
    Rate,
    ReducedPart,
    Result,
    Roster,
    Share,
    Work,
    counted_tokens,
)
from swarm.core.round.voting import Certificate, Election, Phase, Vote
from swarm.identity.key import Identity, verify

MAKER = Identity.from_seed(bytes(range(32)))
OTHER = Identity.from_seed(bytes(range(1, 33)))
PEERS = tuple(sorted([MAKER.peer_id, OTHER.peer_id]))
PREVIOUS_NAME = hashlib.sha256(b"previous").digest()
ELECTION = Election("ab" * 32, StageIndex(1), Step(3), PREVIOUS_NAME, 0, PEERS, PeerId("run key"))


def _contribution(identity: Identity) -> Contribution:
    work = (
        Work(MicrobatchId(41), 96, Version(2), 512, bytes(range(32)), bytes(range(32, 64))),
        Work(MicrobatchId(300_000), 97, Version(3), 500, bytes(range(64, 96)), bytes(32)),
    )
    unsigned = Contribution(
        "ab" * 32,
        StageIndex(1),
        Step(3),
        PREVIOUS_NAME,
        identity.peer_id,
        work,
        (hashlib.sha256(b"part").digest(), bytes(32)),
        (Rate(PeerId("a peer"), 20), Rate(PeerId("b peer"), 17)),
    )
    return replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))


def _certificate(phase: Phase, view: int, value: bytes) -> Certificate:
    ballot = ELECTION.ballot(phase, view, value)
    votes = [Vote(identity.peer_id, identity.sign(ballot)) for identity in (MAKER, OTHER)]
    return Certificate(phase, view, value, tuple(sorted(votes, key=lambda vote: vote.voter)))


def _roster() -> Roster:
    made = sorted((_contribution(MAKER), _contribution(OTHER)), key=lambda one: one.peer_id)
    unsigned = Roster(
        "ab" * 32,
        StageIndex(1),
        Step(3),
        5,
        1,
        MAKER.peer_id,
        PREVIOUS_NAME,
        tuple(sorted([*PEERS, PeerId("leaver")])),
        tuple(made),
        (MAKER.peer_id, OTHER.peer_id),
        (PeerId("joiner"),),
        (Departure(PeerId("leaver"), "no commitment within 30.0 s"),),
        "all of 16 microbatches are in",
        (PeerId("neighbour"),),
    )
    signed = replace(unsigned, signature=MAKER.sign(unsigned.signed_bytes()))
    return replace(signed, certificate=_certificate("roster", signed.view, signed.facts_digest()))


def _result() -> Result:
    left_out = (Exclusion(PEERS[1], "malformed"),)
    parts = (
        ReducedPart(0, bytes(range(32)), PEERS, squares=0.5),
        ReducedPart.empty(1),
        ReducedPart(2, b"2" * 32, PEERS[:1], left_out),
    )
    unsigned = Result(_roster(), parts, MAKER.peer_id)
    signed = replace(unsigned, signature=MAKER.sign(unsigned.signed_bytes()))
    return replace(signed, certificate=_certificate("commit", 6, signed.root()))


# Computed once from the first release of the format. A change here is a change of the protocol's number.
GOLDEN = {
    "contribution": "cf1595b31da21a8c918655976ba3220e0bffeb440e268b9ebb2abf117a103f1b",
    "roster": "b758ca9c3b80912929802172615f321b27c68d285cb14c4bf8a7f3728c1eee07",
    "roster facts": "5509f65f0753e4d7b67346dcf4b53ee2cdb116dd5e4fa7a24fa9732afaa7ec35",
    "result root": "02c7b1ab403061e715f6a630602b375f626f01f48de327fd9ac7c3f7c471ba11",
    "version name": "18fa62f883f6a57dc5d10c1b9ed534a7db9a2d499698274889ef05901584bc62",
    "result": "b64d9ffe88f1880008d196547f445de0816c9524d065716c75291ea1d76efda4",
}


def test_the_bytes_that_are_signed_and_hashed_never_change() -> None:
    contribution, roster, result = _contribution(MAKER), _roster(), _result()
    found = {
        "contribution": hashlib.sha256(contribution.signed_bytes()).hexdigest(),
        "roster": hashlib.sha256(roster.signed_bytes()).hexdigest(),
        "roster facts": roster.facts_digest().hex(),
        "result root": result.root().hex(),
        "version name": result.new_name.hex(),
        "result": hashlib.sha256(pack(result.to_value())).hexdigest(),
    }
    assert found == GOLDEN
    assert contribution.signed_bytes().startswith(
        b"homeswarm/contribution\0\x89\xa7charges\x90\xacpart_digests\x92\xc4\x20"
    )


@pytest.mark.parametrize(
    "made",
    [
        _contribution(MAKER),
        _roster(),
        replace(_roster(), certificate=None),
        _result(),
        replace(_result(), certificate=None),
        *_result().parts,
    ],
)
def test_what_is_written_is_read(made: Contribution | Roster | Result | ReducedPart) -> None:
    again = type(made).from_value(unpack(pack(made.to_value()), max_bytes=1 << 20))
    assert again == made
    if isinstance(again, Contribution):
        assert verify(again.peer_id, again.signed_bytes(), again.signature)
    if isinstance(again, Roster | Result):
        assert verify(again.leader, again.signed_bytes(), again.signature)


def _mutations(value: Value) -> list[Value]:
    """Every value that differs from `value` in one leaf; what is left out has none."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [{**value, key: other} for key in value for other in _mutations(value[key])]
    if isinstance(value, list | tuple):
        listed = list(value)
        return [
            [*listed[:at], other, *listed[at + 1 :]] for at in range(len(listed)) for other in _mutations(listed[at])
        ]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 1.0]
    if isinstance(value, str):
        return [value + "x"]
    assert isinstance(value, bytes)
    return [bytes([value[0] ^ 1]) + value[1:]]


@pytest.mark.parametrize("made", [_contribution(MAKER), _roster(), _result()])
def test_no_leaf_can_be_changed_under_a_signature_or_a_certificate(made: Contribution | Roster | Result) -> None:
    changed = _mutations(made.to_value())
    assert len(changed) > 15
    for value in changed:
        try:
            again = type(made).from_value(value)
        except RemoteError:
            continue
        assert again != made
        assert not _is_genuine(again)
    assert _is_genuine(made)


def _is_genuine(made: Contribution | Roster | Result) -> bool:
    """Whether every signature on it is good: a result's covers the root, its roster's the rest."""
    signer = made.peer_id if isinstance(made, Contribution) else made.leader
    if not verify(signer, made.signed_bytes(), made.signature):
        return False
    try:
        if isinstance(made, Roster):
            assert made.certificate is not None
            ELECTION.check_certificate(made.certificate, "roster", made.facts_digest(), verify)
            return made.certificate.view == made.view
        if isinstance(made, Result):
            assert made.certificate is not None
            ELECTION.check_certificate(made.certificate, "commit", made.root(), verify)
            return _is_genuine(made.roster)
    except RemoteError:
        return False
    return True


def test_the_root_is_the_same_whoever_led_and_reduced() -> None:
    result = _result()
    elsewhere = replace(
        result.roster, view=9, revision=4, leader=OTHER.peer_id, reducers=PEERS[::-1], reason="the leader is gone"
    )
    assert replace(result, roster=elsewhere, leader=OTHER.peer_id, certificate=None).root() == result.root()
    for other in (
        replace(result.roster, contributions=result.roster.contributions[:1]),
        replace(result.roster, joins=()),
        replace(result.roster, leaves=()),
        replace(result.roster, previous_name=bytes(32)),
        replace(result.roster, members=PEERS),
        replace(result.roster, neighbours=()),
    ):
        assert replace(result, roster=other).root() != result.root()
    assert replace(result, parts=result.parts[:1]).root() != result.root()


def test_malformed_messages_are_refused() -> None:
    contribution, roster, result = _contribution(MAKER), _roster(), _result()
    twice = replace(contribution, work=contribution.work[:1] * 2)
    disordered = replace(roster, contributions=roster.contributions[::-1])
    of_strangers = replace(
        result, parts=(replace(result.parts[0], excluded=(Exclusion(PeerId("x"), "malformed"),) * 2),)
    )
    of_good = ReducedPart(0, b"0" * 32, PEERS)
    backwards = ReducedPart(0, b"0" * 32, PEERS[::-1])
    doubled = ReducedPart(0, b"0" * 32, PEERS[:1] * 2)
    of_nobody = ReducedPart(0, b"0" * 32, ())
    of_nothing = ReducedPart(0, EMPTY_DIGEST, PEERS)
    both_ways = ReducedPart(0, b"0" * 32, PEERS, (Exclusion(PEERS[0], "malformed"),))
    left_out_twice = ReducedPart(0, b"0" * 32, PEERS[:1], (Exclusion(PEERS[1], "malformed"),) * 2)
    squares_of_nothing, negative = replace(ReducedPart.empty(0), squares=1.0), replace(of_good, squares=-1.0)
    own_rate = replace(contribution, rates=(Rate(MAKER.peer_id, 3),))
    rates_disordered = replace(contribution, rates=contribution.rates[::-1])
    contributions: tuple[Contribution, ...] = (twice, own_rate, rates_disordered)
    parts = (backwards, doubled, of_nobody, of_nothing, both_ways, left_out_twice, squares_of_nothing, negative)
    malformed: tuple[Contribution | Roster | Result | ReducedPart, ...] = (
        *contributions,
        disordered,
        of_strangers,
        *parts,
    )
    for made in malformed:
        with pytest.raises(RemoteError) as caught:
            type(made).from_value(made.to_value())
        assert caught.value.kind == "malformed"


def test_an_empty_part_is_nobodys_work() -> None:
    assert [part.is_empty for part in _result().parts] == [False, True, False]
    result = _result()
    assert [item.microbatch_id for item in result.work_done()] == [41, 300_000]
    nothing = replace(result, parts=tuple(ReducedPart.empty(part) for part in range(3)))
    assert nothing.work_done() == ()
    assert nothing.root() != result.root()


def test_who_comes_after_the_round_is_on_its_roster() -> None:
    roster = _roster()
    assert roster.members_after == tuple(sorted([*PEERS, PeerId("joiner")]))
    basis = _result().basis
    assert (basis.previous_members, basis.members) == (roster.members, roster.members_after)
    assert (basis.name, basis.neighbours) == (_result().new_name, ("neighbour",))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_id_that_counts_counts_once_at_its_highest_attempt(seed: int) -> None:
    rng = random.Random(seed)
    peers = [PeerId(name) for name in "abcd"]
    made = []
    for peer in peers:
        ids = rng.sample(range(12), rng.randint(0, 8))
        work = tuple(
            Work(MicrobatchId(number), rng.randint(0, 2), Version(0), 10 + number, bytes(32), bytes(32))
            for number in ids
        )
        made.append(Contribution("run", StageIndex(0), Step(0), bytes(32), peer, work, ()))
    recent = frozenset(rng.sample(range(12), 3))
    counted = counted_tokens(made, recent)
    shuffled = rng.sample(made, len(made))
    assert counted_tokens(shuffled, recent) == counted
    expected = dict.fromkeys(peers, 0)
    for number in set(range(12)) - recent:
        claims = [(-item.attempt, one.peer_id) for one in made for item in one.work if item.microbatch_id == number]
        if claims:
            expected[min(claims)[1]] += 10 + number
    assert counted == expected


def test_what_is_packed_once_has_the_bytes_of_its_value() -> None:
    contribution, roster, result = _contribution(MAKER), _roster(), _result()
    for made in (contribution, roster, result):
        assert made.packed.data == pack(made.to_value())
    assert all(part.packed_outcome.data == pack(part.outcome.to_value()) for part in result.parts)
    assert roster.signed_bytes().endswith(pack(roster.signed_value()))


def test_a_reduced_part_of_a_cohort_comes_back_as_it_was() -> None:
    share = ReducedPart(3, b"3" * 32, PEERS[:1], (Exclusion(PEERS[1], "malformed"),), cohort=1)
    combined = ReducedPart(3, b"4" * 32, PEERS, squares=2.5, shares=(Share(0, PEERS[0], b"5" * 32),))
    for made in (share, combined):
        assert ReducedPart.from_value(made.to_value()) == made
    for wrong in (replace(share, shares=combined.shares), replace(share, squares=1.0)):
        with pytest.raises(RemoteError, match="itself combined"):
            ReducedPart.from_value(wrong.to_value())
