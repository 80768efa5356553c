"""Records that are declared: what their annotations say is what is taken from a stranger, and what is sent."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, ClassVar, Literal

import pytest

from swarm.core.canonical import Value, pack, signed_bytes
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, StageNumber, Text
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.layout import AtMost, Beside, Named
from swarm.core.record import PackedOnce, Record, Row, Signed, SignedOnce, SignedValue


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Stone(Row):
    weight: Annotated[int, Integer(low=1, high=9)]
    peers: Annotated[tuple[PeerId, ...], AtMost(2)] = ()


@dataclass(frozen=True)
class StoneWall(SignedOnce):
    DOMAIN: ClassVar[str] = "wall"
    stage: StageNumber
    step: Step
    phase: Literal["wet", "dry"]
    mood: Mood
    share: float | None
    stones: Annotated[tuple[Stone, ...], AtMost(3)]
    pair: tuple[Annotated[str, Text(3)], Digest]
    is_new: Annotated[bool, Named("new")]
    witnesses: Annotated[tuple[Stone, ...], AtMost(2), Beside()] = ()

    def _check_fields(self) -> None:
        if not self.stones:
            raise RemoteError("malformed", "a wall without stones")


@dataclass(frozen=True)
class Town(PackedOnce, kind="small town"):
    wall: StoneWall | None
    name: str


@dataclass(frozen=True)
class Flat(Signed):
    DOMAIN: ClassVar[str] = "flat"
    step: Step

    def signed_value(self) -> Value:
        return [self.step]


@dataclass(frozen=True)
class Plain(SignedValue):
    DOMAIN: ClassVar[str] = "plain"
    step: Step


class Key:
    def sign(self, data: bytes) -> bytes:
        return data[-1:] * 64


WALL = StoneWall(
    stage=StageIndex(1),
    step=Step(2),
    phase="wet",
    mood=Mood.BAD,
    share=None,
    stones=(Stone(3, (PeerId("a"),)), Stone(4)),
    pair=("abc", bytes(32)),
    is_new=True,
    witnesses=(Stone(5),),
    signature=bytes(64),
)
SAID: dict[str, Value] = {
    "stage": 1,
    "step": 2,
    "phase": "wet",
    "mood": "bad",
    "share": None,
    "stones": [[3, ["a"]], [4, []]],
    "pair": ["abc", bytes(32)],
    "new": True,
}
SENT: dict[str, Value] = {"value": SAID, "witnesses": [[5, []]], "signature": bytes(64)}


def test_a_record_is_written_as_declared_and_read_back() -> None:
    assert WALL.to_value() == SENT
    assert StoneWall.from_value(SENT) == WALL
    town = Town(WALL, "x")
    assert Town.from_value(town.to_value()) == town
    assert Town.from_value({"wall": None, "name": "x"}) == Town(None, "x")


def test_what_is_packed_once_gives_the_same_bytes() -> None:
    town = Town(WALL, "x")
    assert pack(town.packed) == pack(town.to_value())
    assert pack(WALL.packed) == pack(WALL.to_value())
    assert town.packed is town.packed


def test_a_signature_covers_the_domain_and_the_value() -> None:
    assert WALL.signed_bytes() == signed_bytes("wall", SAID)
    assert replace(WALL, witnesses=(), signature=b"").signed_bytes() == WALL.signed_bytes()
    assert Flat(Step(7)).signed_bytes() == signed_bytes("flat", [7])
    assert Plain(Step(7)).signed_bytes() == signed_bytes("plain", {"step": 7})
    assert Plain(Step(7)).signed_by(Key()).signature == b"\7" * 64
    assert Flat(Step(7)).signed_by(Key()).to_value() == {"step": 7, "signature": b"\7" * 64}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage": (1 << 16) + 1}, r"stone wall.stage is 65537, not an integer from 0 to 65536"),
        ({"step": -1}, r"stone wall.step is -1, not an integer from 0 to 9223372036854775807"),
        ({"step": True}, r"stone wall.step is True, not an integer"),
        ({"phase": "damp"}, r"stone wall.phase is 'damp', not one of wet, dry"),
        ({"phase": 7}, r"stone wall.phase is 7, not text of at most 256 letters and signs"),
        ({"mood": "so"}, r"stone wall.mood is 'so', not one of good, bad"),
        ({"share": 1}, r"stone wall.share is 1, not a finite number"),
        ({"share": float("nan")}, r"stone wall.share is nan, not a finite number"),
        ({"stones": [[1, []]] * 4}, r"stone wall.stones is list of 4, not a list of at most 3"),
        ({"stones": [[0, []]]}, r"stone.weight is 0, not an integer from 1 to 9"),
        ({"stones": [[1]]}, r"stone is not a list of 2"),
        ({"stones": [[1, ["a", 7]]]}, r"stone.peers\[\] is 7, not text of at most 64 letters and signs"),
        ({"stones": []}, r"a wall without stones"),
        ({"pair": ["abcd", bytes(32)]}, r"stone wall.pair\[\] is str of 4, not text of at most 3 letters and signs"),
        ({"pair": ["abc"]}, r"stone wall.pair is not a list of 2"),
        ({"pair": ["abc", bytes(31)]}, r"stone wall.pair\[\] is bytes of 31, not 32 bytes"),
        ({"new": 1}, r"stone wall.new is 1, not true or false"),
        ({"is_new": True}, r"stone wall has unknown fields is_new"),
        ({"signature": bytes(64)}, r"stone wall has unknown fields signature"),
    ],
)
def test_a_field_that_is_not_as_declared_is_refused(change: dict[str, Value], said: str) -> None:
    with pytest.raises(RemoteError, match=said) as caught:
        StoneWall.from_value({**SENT, "value": {**SAID, **change}})
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("name", [*SAID, *SENT])
def test_a_field_that_is_missing_is_refused(name: str) -> None:
    value = {key: of for key, of in SAID.items() if key != name}
    sent: dict[str, Value] = {key: of for key, of in {**SENT, "value": value}.items() if key != name}
    with pytest.raises(RemoteError, match=f"stone wall lacks {name}"):
        StoneWall.from_value(sent)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7, "stone wall is int, not a map"),
        ({**SENT, "value": [1]}, "stone wall is list, not a map"),
        ({**SENT, "more": 1}, "stone wall has unknown fields more"),
        ({**SENT, "signature": bytes(63)}, "stone wall.signature is bytes of 63, not 64 bytes"),
        ({**SENT, "witnesses": None}, "stone wall.witnesses is None, not a list of at most 2"),
    ],
)
def test_what_stands_around_a_signed_value_is_checked_too(value: Value, said: str) -> None:
    with pytest.raises(RemoteError, match=said):
        StoneWall.from_value(value)


def test_a_class_may_be_called_otherwise_in_errors() -> None:
    with pytest.raises(RemoteError, match="small town lacks wall"):
        Town.from_value({"name": "x"})


def test_an_annotation_that_says_too_little_is_refused() -> None:
    @dataclass(frozen=True)
    class Endless(Record):
        items: tuple[int, ...]

    @dataclass(frozen=True)
    class Anything(Record):
        items: bytes

    for kind in (Endless, Anything):
        with pytest.raises(TypeError, match="says too little of what a stranger may send"):
            kind.from_value({"items": []})
