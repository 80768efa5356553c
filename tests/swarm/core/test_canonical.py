"""Canonical bytes: golden vectors, agreement with MessagePack, refusal of everything `pack` would not write."""

import math
import struct
import time
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from uuid import UUID

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import MAX_VALUES, Packed, Value, digest, pack, signed_bytes, unpack
from swarm.core.errors import RemoteError

LIMIT = 1 << 20
MAX_DEPTH = 255

# Written out by hand from the MessagePack specification.
GOLDEN: list[tuple[Value, str]] = [
    (None, "c0"),
    (False, "c2"),
    (True, "c3"),
    (0, "00"),
    (127, "7f"),
    (128, "cc80"),
    (256, "cd0100"),
    (1 << 16, "ce00010000"),
    ((1 << 64) - 1, "cfffffffffffffffff"),
    (-1, "ff"),
    (-32, "e0"),
    (-33, "d0df"),
    (-129, "d1ff7f"),
    (-(1 << 63), "d38000000000000000"),
    (1.0, "cb3ff0000000000000"),
    (0.0, "cb0000000000000000"),
    ("", "a0"),
    ("ü", "a2c3bc"),
    ("x" * 32, "d920" + "78" * 32),
    (b"", "c400"),
    (b"\x00\xff", "c40200ff"),
    ([], "90"),
    ([1, "a", None], "9301a161c0"),
    ([0] * 16, "dc0010" + "00" * 16),
    ({}, "80"),
    ({"b": 1, "a": [True]}, "82a16191c3a16201"),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=40,
)


class Kind(Enum):
    ONE = 1


@dataclass(frozen=True)
class Pair:
    one: int
    other: int


def _sorted(value: Value) -> Value:
    if isinstance(value, float):
        return value or 0.0
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _repacked(data: bytes) -> bytes | None:
    """What `pack` makes of the bytes' value; None if they are refused, with no error but the promised one."""
    try:
        return pack(unpack(data, max_bytes=LIMIT))
    except RemoteError as error:
        if error.kind != "malformed":
            raise
        return None


@pytest.mark.parametrize(("value", "expected"), GOLDEN, ids=[expected[:12] for _, expected in GOLDEN])
def test_pack_gives_the_golden_bytes(value: Value, expected: str) -> None:
    assert pack(value).hex() == expected
    assert unpack(bytes.fromhex(expected), max_bytes=LIMIT) == value


def test_pack_gives_zero_no_sign() -> None:
    assert pack([-0.0, {"a": -0.0}]) == pack([0.0, {"a": 0.0}])


def test_bytes_that_look_like_minus_zero_stay() -> None:
    found = b"\xcb\x80" + bytes(7)
    assert unpack(pack([found, -0.0]), max_bytes=LIMIT) == [found, 0.0]
    assert found in pack([found])


def test_what_is_packed_already_and_kinds_of_numbers_stand_for_their_values() -> None:
    assert pack({"b": Packed([1, {"a": 2}]), "a": (np.float64(1.5), Packed("x"))}) == pack(
        {"a": [1.5, "x"], "b": [1, {"a": 2}]}
    )


def test_digest_gives_the_golden_hash() -> None:
    # sha256 of b"homeswarm/manifest" 00 81 a1 61 01
    assert signed_bytes("manifest", {"a": 1}) == b"homeswarm/manifest\0\x81\xa1a\x01"
    assert digest("manifest", {"a": 1}).hex() == "7bf67e17395c7d6289cb0f41ce3e1fa4d49912050d237d2e99d0e98acccf1c7d"


@settings(max_examples=60, deadline=None)
@given(values)
def test_unpack_returns_what_was_packed(value: Value) -> None:
    data = pack(value)
    assert unpack(data, max_bytes=len(data)) == value
    assert data == msgpack.packb(_sorted(value), use_bin_type=True)


@settings(deadline=None)
@given(st.floats())
def test_unpack_keeps_every_bit_of_a_float_but_the_sign_of_zero(value: float) -> None:
    found = unpack(pack(value), max_bytes=9)
    assert isinstance(found, float)
    assert struct.pack(">d", found) == struct.pack(">d", value or 0.0) or (math.isnan(found) and math.isnan(value))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_unpack_accepts_only_what_pack_writes(data: bytes) -> None:
    assert _repacked(data) in (None, data)


@settings(max_examples=60, deadline=None)
@given(values, st.data())
def test_unpack_of_damaged_bytes_is_refused_or_canonical(value: Value, draw: st.DataObject) -> None:
    data = bytearray(pack(value))
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] = draw.draw(st.integers(0, 255))
    assert _repacked(bytes(data)) in (None, data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("int longer than needed", "cc01"),
        ("signed code for a positive int", "d001"),
        ("float32", "ca3f800000"),
        ("-0.0", "cb8000000000000000"),
        ("str longer than needed", "d90161"),
        ("bin longer than needed", "c5000100"),
        ("array longer than needed", "dc000101"),
        ("map longer than needed", "de0001a16101"),
        ("keys out of order", "82a16201a16101"),
        ("a key twice", "82a16101a16101"),
        ("a key that is no string", "810101"),
        ("bytes after the value", "0101"),
        ("no bytes", ""),
        ("cut short", "cd01"),
        ("a string cut short", "a561"),
        ("not UTF-8", "a1ff"),
        ("an extension type", "d40000"),
        ("a timestamp", "d6ff00000000"),
        ("a huge array announced", "ddffffffff"),
        ("a huge map announced", "dfffffffff"),
        ("a huge string announced", "dbffffffff"),
    ],
)
def test_unpack_refuses(name: str, data: str) -> None:
    with pytest.raises(RemoteError) as caught:
        unpack(bytes.fromhex(data), max_bytes=LIMIT)
    assert caught.value.kind == "malformed"


def test_unpack_refuses_more_bytes_than_allowed() -> None:
    with pytest.raises(RemoteError, match="3 bytes is over the limit of 2"):
        unpack(pack("ab"), max_bytes=2)


def test_nesting_is_bounded_both_ways() -> None:
    deepest: Value = 0
    for _ in range(MAX_DEPTH):
        deepest = [deepest]
    assert unpack(pack(deepest), max_bytes=LIMIT) == deepest
    with pytest.raises(TypeError, match="limit"):
        pack([deepest])
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(RemoteError, match="limit"):
            unpack(b"\x91" * depth + b"\x00", max_bytes=LIMIT)


@pytest.mark.parametrize(
    "value",
    [1 << 64, -(1 << 63) - 1, {1: 2}, object(), {1, 2}, 1j, datetime(2026, 1, 1), UUID(int=1), Kind.ONE, Pair(1, 2)],
)
def test_pack_refuses_what_has_no_canonical_form(value: object) -> None:
    with pytest.raises(TypeError):
        pack(value)  # type: ignore[arg-type]


def test_a_message_of_too_many_values_is_refused_before_they_are_made() -> None:
    half = b"\xdd" + struct.pack(">I", MAX_VALUES // 2)
    nested = b"\x92" + 2 * (half + b"\xc0" * (MAX_VALUES // 2))
    with pytest.raises(RemoteError, match=f"more than {MAX_VALUES} values"):
        unpack(nested, max_bytes=len(nested))


@pytest.mark.parametrize(
    "head", [b"\xdd" + struct.pack(">I", (8 << 20) - 5), b"\x90"], ids=["in a list", "after a value"]
)
def test_what_is_too_much_is_not_looked_through(head: bytes) -> None:
    data = head.ljust(8 << 20, b"\0")
    began = time.thread_time()
    with pytest.raises(RemoteError):
        unpack(data, max_bytes=len(data))
    assert time.thread_time() - began < 0.5, "looking at each of them takes four seconds"


def test_a_long_message_of_few_values_is_read() -> None:
    value: Value = [{"digest": bytes([number % 256]) * 32, "text": "x" * 40, "n": number} for number in range(30_000)]
    data = pack(value)
    assert len(data) > MAX_VALUES
    assert unpack(memoryview(data), max_bytes=len(data)) == value
