"""Readers of strangers' values: whatever comes, they take what fits or raise RemoteError("malformed")."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item, integer_item, peer_item
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.ballots import Proposal
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Contribution, Rate, ReducedPart, Result, Roster, Work
from swarm.core.round.voting import Certificate, Promise, Proof, Reconfiguration, Vote
from swarm.core.state.stage_chain import Genesis, StageChain
from verification.pipeline.headers import BirthRecord, HopHeader

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
READERS = (
    *(Contribution, ReducedPart, Result, Roster, Work, LeaseTable, Genesis, StageChain, BirthRecord, HopHeader),
    *(Certificate, Promise, Proof, Proposal, Rate, Reconfiguration, RoundBasis, Vote),
)


@pytest.mark.parametrize("reader", READERS)
@given(value=VALUES)
def test_no_value_breaks_a_reader(reader: type[Roster], value: Value) -> None:
    with pytest.raises(RemoteError) as caught:
        reader.from_value(value)
    assert caught.value.kind == "malformed"


@given(value=VALUES)
def test_each_field_takes_its_type_or_refuses(value: Value) -> None:
    refusals: list[RemoteError] = []

    def take(name: str, *args: object, **options: object) -> object:
        try:
            return getattr(Fields("message", {"x": value}), name)("x", *args, **options)
        except RemoteError as error:
            refusals.append(error)
            return None

    number = take("integer", low=-5, high=5)
    assert number is None or (type(number) is int and -5 <= number <= 5)
    real = take("number")
    assert real is None or (type(real) is float and math.isfinite(real))
    flag = take("boolean")
    assert flag is None or flag is value
    text = take("text", max_length=3)
    assert text is None or (isinstance(text, str) and len(text) <= 3)
    octets = take("octets", length=2)
    assert octets is None or (isinstance(octets, bytes) and len(octets) == 2)
    assert refusals
    assert all(error.kind == "malformed" and len(str(error)) < 200 for error in refusals)
    assert all(str(error).startswith("message.x is ") for error in refusals)


def test_every_field_is_asked_for_and_no_other_is_there() -> None:
    fields = Fields("message", {"a": 1, "b": None, "c": "x", "d": 7})
    assert fields.integer("a") == 1
    assert not fields.optional("b")
    assert not fields.optional("never sent")
    assert fields.optional("c")
    with pytest.raises(RemoteError, match="unknown fields c, d"):
        fields.done()
    fields.text("c")
    fields.integer("d")
    fields.done()
    with pytest.raises(RemoteError, match="message lacks e"):
        fields.integer("e")


def test_a_field_that_may_be_none_may_not_be_absent() -> None:
    fields = Fields("message", {"a": 1, "b": None})
    assert fields.maybe("a", integer_item) == 1
    assert fields.maybe("b", integer_item) is None
    with pytest.raises(RemoteError, match="message lacks c"):
        fields.maybe("c", integer_item)


def test_booleans_are_no_integers() -> None:
    with pytest.raises(RemoteError):
        Fields("message", {"x": True}).integer("x")
    with pytest.raises(RemoteError):
        integer_item(False)


def test_a_large_value_is_not_printed() -> None:
    with pytest.raises(RemoteError) as caught:
        Fields("message", {"x": ["y" * 1000] * 1000}).text("x")
    assert str(caught.value) == "message.x is list of 1000, not text of at most 256 letters and signs"
    with pytest.raises(RemoteError) as caught:
        Fields("message", {str(n) * 100: n for n in range(1000)}).done()
    assert len(str(caught.value)) < 200


def test_lists_are_bounded_and_read_item_by_item() -> None:
    assert Fields("message", {"x": ["a", "b"]}).items("x", peer_item, max_items=2) == ("a", "b")
    with pytest.raises(RemoteError):
        Fields("message", {"x": ["a", "b", "c"]}).items("x", peer_item, max_items=2)
    with pytest.raises(RemoteError):
        Fields("message", {"x": ["a", 1]}).items("x", peer_item, max_items=2)
    with pytest.raises(RemoteError):
        peer_item("p" * 65)
    assert digest_item(bytes(32)) == bytes(32)
    with pytest.raises(RemoteError):
        digest_item(bytes(31))


@pytest.mark.parametrize("said", ["\x1b[2J", "two\nlines", "\N{RIGHT-TO-LEFT OVERRIDE}", "\x9b"])
def test_text_is_a_line_of_letters_and_signs(said: str) -> None:
    """Whoever shows it to people, or writes it down, has nothing to see to."""
    with pytest.raises(RemoteError, match=r"message\.x is str of \d+, not text of at most 256 letters and signs"):
        Fields("message", {"x": said}).text("x")
    assert Fields("message", {"x": "żółw 亀 🐢"}).text("x") == "żółw 亀 🐢"
