"""The messages of a round: their bytes for ever, what is refused, and what a contribution weighs."""

import hashlib
from dataclasses import replace

import pytest

from swarm.core.audit.chance import Chance, HostWord, Link
from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import (
    EMPTY_DIGEST,
    Contribution,
    Departure,
    Exclusion,
    LeftOut,
    Rate,
    ReducedPart,
    Result,
    Roster,
    Share,
    Work,
    counted_work,
)
from swarm.core.round.voting import Certificate, Election, Phase, Vote
from swarm.identity.key import Identity, verify

MAKER = Identity.from_seed(bytes(range(32)))
OTHER = Identity.from_seed(bytes(range(1, 33)))
PEERS = tuple(sorted([MAKER.peer_id, OTHER.peer_id]))
PREVIOUS_NAME = hashlib.sha256(b"previous").digest()
ELECTION = Election("ab" * 32, StageIndex(1), Step(3), PREVIOUS_NAME, 0, dict.fromkeys(PEERS, 1), PeerId("run key"))

BEFORE = RoundBasis(
    bytes(32), bytes(32), PEERS, (5, 6), PEERS, (7, 8), (), (None, None), HostWord(3, bytes(range(1, 33)))
)
"""What the round starts from; its name is not that of the messages, which are no round's."""


def _contribution(identity: Identity) -> Contribution:
    work = (
        Work(MicrobatchId(41), 30, Version(2), 512, bytes(range(32)), bytes(range(32, 64))),
        Work(MicrobatchId(300_000), 31, Version(3), 500, bytes(range(64, 96)), bytes(32)),
    )
    unsigned = Contribution(
        "ab" * 32,
        StageIndex(1),
        Step(3),
        PREVIOUS_NAME,
        identity.peer_id,
        work,
        (hashlib.sha256(b"part").digest(), bytes(32)),
        Chance(bytes(range(32)), HostWord(3, bytes(range(1, 33))), None),
        (Rate(PeerId("a peer"), 20), Rate(PeerId("b peer"), 17)),
    )
    return replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))


def _certificate(phase: Phase, view: int, value: bytes) -> Certificate:
    ballot = ELECTION.ballot(phase, view, value)
    votes = [Vote(identity.peer_id, identity.sign(ballot)) for identity in (MAKER, OTHER)]
    return Certificate(phase, view, value, tuple(sorted(votes, key=lambda vote: vote.voter)))


def _roster(reducers: tuple[PeerId, ...] = (MAKER.peer_id, OTHER.peer_id)) -> Roster:
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
        reducers,
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
    roster = _roster((MAKER.peer_id, OTHER.peer_id, MAKER.peer_id))
    unsigned = Result(roster, parts, MAKER.peer_id)
    signed = replace(unsigned, signature=MAKER.sign(unsigned.signed_bytes()))
    return replace(signed, certificate=_certificate("commit", 6, signed.root()))


# Computed once from the first release of the format. A change here is a change of the protocol's number.
GOLDEN = {
    "contribution": "073358c816fe3eb855b1ad37e125bfa9ee3f495192d6fed629d0db35a858647e",
    "roster": "323039b8f0e12a9f9ab96a79329b741142ac300c042cab5f23e31163a74bc93a",
    "roster facts": "a8a240820ead0ef672755f538f46dbbb99ee29dc8bd822263790f82cfa179386",
    "result root": "a9a05bc4599b39015a92f4f29cd5432271f99f9a4ff6cdbd3990afc8fc8780f9",
    "version name": "83e26abe4e7f2dd7a5bda9f1d7a74849a293f0612b396c6f58795dc9b1d862e8",
    "result": "caf41ea79b9e1fd541ef46fa01dfa56ecebd51272e5cb687a1a50d7e91a93d8b",
}


def test_a_result_has_as_many_parts_as_its_roster() -> None:
    result = _result()
    for parts in (result.parts[:2], (*result.parts, ReducedPart.empty(3))):
        with pytest.raises(RemoteError, match="its roster has 3"):
            Result.from_value(replace(result, parts=parts).to_value())


def test_everybodys_work_is_in_no_part_where_all_parts_are_empty() -> None:
    result = _result()
    assert result.unheard == (), "one part is empty, and both are in others"
    empty = replace(result, parts=tuple(map(ReducedPart.empty, range(3))))
    assert empty.unheard == result.roster.committed
    first, second = result.roster.contributions
    lost = LeftOut(first, ())
    smaller = replace(result.roster, contributions=(second,), left_out=(lost,))
    assert replace(result, roster=smaller).unheard == (first,)
    assert replace(empty, roster=smaller).unheard == (first, second), "the only one left has come to nothing, too"


def test_the_bytes_that_are_signed_and_hashed_never_change() -> None:
    contribution, roster, result = _contribution(MAKER), _roster(), _result()
    found = {
        "contribution": hashlib.sha256(contribution.signed_bytes()).hexdigest(),
        "roster": hashlib.sha256(roster.signed_bytes()).hexdigest(),
        "roster facts": roster.facts_digest().hex(),
        "result root": result.root().hex(),
        "version name": result.basis_after(BEFORE, (1, 2, 3)).name.hex(),
        "result": hashlib.sha256(pack(result.to_value())).hexdigest(),
    }
    assert found == GOLDEN
    assert contribution.signed_bytes().startswith(b"homeswarm/contribution\0\x8a\xa6chance\x93\xc4\x20")


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
    assert result.heard() == frozenset(PEERS)
    nothing = replace(result, parts=tuple(ReducedPart.empty(part) for part in range(3)))
    assert nothing.heard() == frozenset()
    assert nothing.root() != result.root()


def test_who_comes_after_the_round_is_on_its_roster() -> None:
    roster = _roster()
    assert roster.members_after == tuple(sorted([*PEERS, PeerId("joiner")]))
    basis = _result().basis_after(BEFORE, (1, 2, 3))
    assert (basis.previous_work, basis.work) == ((7, 8), (1, 2, 3))
    assert (basis.previous_members, basis.members) == (roster.members, roster.members_after)
    assert (basis.previous_name, basis.neighbours) == (BEFORE.name, ("neighbour",))
    revealed = {one.peer_id: Link(Step(3), one.chance.value) for one in _roster().contributions}
    assert basis.link_of == revealed, "of the joiner nothing is known, of the leaver nothing is wanted"
    assert basis.said == HostWord(3, bytes(range(1, 33)))


def test_at_stage_0_what_a_member_lists_counts_if_it_was_leased_to_it() -> None:
    made = _contribution(MAKER)
    leased = frozenset([MicrobatchId(41), MicrobatchId(7)])
    assert counted_work(made, None) == made.work
    assert counted_work(made, {MAKER.peer_id: leased}) == made.work[:1]
    assert counted_work(made, {OTHER.peer_id: leased}) == ()


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


@pytest.mark.parametrize(
    "wrong",
    [
        replace(BEFORE, members=(), work=(), links=()),
        replace(BEFORE, previous_members=(), previous_work=()),
        replace(BEFORE, members=PEERS[::-1]),
        replace(BEFORE, previous_members=PEERS[:1] * 2),
        replace(BEFORE, links=(None,)),
        replace(BEFORE, work=(1,)),
    ],
)
def test_a_basis_of_nobody_or_out_of_order_is_refused(wrong: RoundBasis) -> None:
    """A member of two could show one to the host, which asks where its stage stands, and have it end."""
    assert RoundBasis.from_value(BEFORE.to_value()) == BEFORE
    with pytest.raises(RemoteError, match="basis"):
        RoundBasis.from_value(wrong.to_value())
