"""The messages of a round: their bytes for ever, what is refused, and what a contribution weighs."""

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, unpack
from swarm.core.contribution import Contribution, Departure, ReducedPart, Result, Roster, Work, counted_tokens
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.identity import Identity, verify

MAKER = Identity.from_seed(bytes(range(32)))
OTHER = Identity.from_seed(bytes(range(1, 33)))
PEERS = tuple(sorted([MAKER.peer_id, OTHER.peer_id]))


def _contribution(identity: Identity) -> Contribution:
    work = (
        Work(MicrobatchId(41), 96, Version(2), 512, bytes(range(32)), bytes(range(32, 64))),
        Work(MicrobatchId(300_000), 97, Version(3), 500, bytes(range(64, 96)), bytes(32)),
    )
    unsigned = Contribution(
        "ab" * 32,
        StageIndex(1),
        Step(3),
        hashlib.sha256(b"previous").digest(),
        identity.peer_id,
        work,
        (hashlib.sha256(b"part").digest(), bytes(32)),
    )
    return replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))


def _roster() -> Roster:
    made = sorted((_contribution(MAKER), _contribution(OTHER)), key=lambda one: one.peer_id)
    unsigned = Roster(
        "ab" * 32,
        StageIndex(1),
        Step(3),
        5,
        1,
        MAKER.peer_id,
        hashlib.sha256(b"previous").digest(),
        tuple(made),
        (MAKER.peer_id, OTHER.peer_id),
        (PeerId("joiner"),),
        (Departure(PeerId("leaver"), "no commitment within 30.0 s"),),
        "all of 16 microbatches are in",
    )
    return replace(unsigned, signature=MAKER.sign(unsigned.signed_bytes()))


def _result() -> Result:
    parts = (ReducedPart(0, bytes(range(32)), PEERS), ReducedPart(1, bytes(32), PEERS[:1]))
    unsigned = Result(_roster(), parts, MAKER.peer_id)
    return unsigned.signed_by(MAKER.sign(unsigned.signed_bytes()))


# Computed once from the first release of the format. A change here is a change of the protocol's number.
GOLDEN = {
    "contribution": "76082807e114bd616b6015ed06462087662e2763937a6344f65a8cd152b6acbd",
    "roster": "6b094df724792ae992f5ae9f41a29e0cb882f846b496091b57a14a2fe9a60be8",
    "roster facts": "a5e4f3ef1c1471ad348590aa8edd9afe917b2f1248d03ae1861eb6ef3380afb6",
    "result root": "d988720f304563f85f06df1ef56aa9460bec4b49edbfdc9fcc6b7f1968a30235",
    "version name": "1a7921264660d21986436916fa986bc772f8162ebc200300e43ae759478f2d34",
    "result": "4e2a082f7b60da4aae55b679c74069225c8bdc865dd231329b5ccfb3f72e6e5a",
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
    assert contribution.signed_bytes().startswith(b"homeswarm/contribution\0\x87\xacpart_digests\x92\xc4\x20")


@pytest.mark.parametrize("made", [_contribution(MAKER), _roster(), _result(), _result().parts[0]])
def test_what_is_written_is_read(made: Contribution | Roster | Result | ReducedPart) -> None:
    again = type(made).from_value(unpack(pack(made.to_value()), max_bytes=1 << 20))
    assert again == made
    if isinstance(again, Contribution):
        assert verify(again.peer_id, again.signed_bytes(), again.signature)
    if isinstance(again, Roster | Result):
        assert verify(again.leader, again.signed_bytes(), again.signature)


def _mutations(value: Value) -> list[Value]:
    """Every value that differs from `value` in one leaf."""
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
    if isinstance(value, str):
        return [value + "x"]
    assert isinstance(value, bytes)
    return [bytes([value[0] ^ 1]) + value[1:]]


@pytest.mark.parametrize("made", [_contribution(MAKER), _roster(), _result()])
def test_no_leaf_can_be_changed_under_a_signature(made: Contribution | Roster | Result) -> None:
    changed = _mutations(made.to_value())
    assert len(changed) > 15
    for value in changed:
        try:
            again = type(made).from_value(value)
        except RemoteError:
            continue
        signer = again.peer_id if isinstance(again, Contribution) else again.leader
        assert again != made
        valid = verify(signer, again.signed_bytes(), again.signature)
        if isinstance(again, Result):  # a result's signature covers the root: whoever led and reduced may differ
            valid = valid and verify(again.roster.leader, again.roster.signed_bytes(), again.roster.signature)
        assert not valid


def test_the_root_is_the_same_whoever_led_and_reduced() -> None:
    result = _result()
    elsewhere = replace(
        result.roster, view=9, revision=4, leader=OTHER.peer_id, reducers=PEERS[::-1], reason="the leader is gone"
    )
    assert replace(result, roster=elsewhere, leader=OTHER.peer_id).root() == result.root()
    for other in (
        replace(result.roster, contributions=result.roster.contributions[:1]),
        replace(result.roster, joins=()),
        replace(result.roster, leaves=()),
        replace(result.roster, previous_name=bytes(32)),
    ):
        assert replace(result, roster=other).root() != result.root()
    assert replace(result, parts=result.parts[:1]).root() != result.root()


def test_malformed_messages_are_refused() -> None:
    contribution, roster, result = _contribution(MAKER), _roster(), _result()
    twice = replace(contribution, work=contribution.work[:1] * 2)
    disordered = replace(roster, contributions=roster.contributions[::-1])
    gap = replace(result, parts=result.parts[1:])
    backwards = ReducedPart(0, bytes(32), PEERS[::-1])
    doubled = ReducedPart(0, bytes(32), PEERS[:1] * 2)
    for made in (twice, disordered, gap, backwards, doubled):
        with pytest.raises(RemoteError) as caught:
            type(made).from_value(made.to_value())
        assert caught.value.kind == "malformed"


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
