"""The forms of what a stranger may send: right type, right range, nothing more.

A form reads one value and writes it. Where a value is in a message is said by whoever reads it, for the error.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Self, TypeAlias

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex


class Wire(ABC):
    """What is sent as a value, and read from a stranger's."""

    @abstractmethod
    def to_value(self) -> Value: ...

    @classmethod
    @abstractmethod
    def from_value(cls, value: Value) -> Self:
        """Raises RemoteError("malformed")."""

    @classmethod
    def writer(cls, *, shallow: bool) -> Callable[[Any], Value]:
        """`to_value`; `shallow`: of what is packed at once, so that large records in it are packed already."""
        return cls.to_value


Writer: TypeAlias = Callable[[Any], Value]


class Form:
    """What one field may hold: how it is read, and how it is written. As it stands, anything, for a later reader."""

    def read(self, value: Value, place: str) -> Any:
        """What the value stands for. Raises RemoteError("malformed") that says what is wrong at the place."""
        return value

    def writer(self, *, shallow: bool) -> Writer | None:
        """What makes the value again of what is held; None where they are the same. `shallow`: as in `Wire`."""
        return None


class Integer(Form):
    """An integer in bounds."""

    def __init__(self, *, low: int = 0, high: int = 2**63 - 1) -> None:
        self.low = low
        self.high = high

    def read(self, value: Value, place: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise _wrong(place, value, f"an integer from {self.low} to {self.high}")
        return value


class Number(Form):
    """A finite float."""

    def read(self, value: Value, place: str) -> float:
        if not isinstance(value, float) or not math.isfinite(value):
            raise _wrong(place, value, "a finite number")
        return value


class Boolean(Form):
    """True or false."""

    def read(self, value: Value, place: str) -> bool:
        if not isinstance(value, bool):
            raise _wrong(place, value, "true or false")
        return value


class Text(Form):
    """At most so many letters and signs, on one line: what is said to people acts on no terminal, and writes no line of
    a log."""

    def __init__(self, max_length: int = 256) -> None:
        self.max_length = max_length

    def read(self, value: Value, place: str) -> str:
        if not isinstance(value, str) or len(value) > self.max_length or not value.isprintable():
            raise _wrong(place, value, f"text of at most {self.max_length} letters and signs")
        return value


class Octets(Form):
    """Bytes, of exactly `length` if given."""

    def __init__(self, length: int | None = None, *, max_length: int = 1 << 20) -> None:
        self.is_exact = length is not None
        self.limit = max_length if length is None else length

    def read(self, value: Value, place: str) -> bytes:
        if not isinstance(value, bytes) or len(value) > self.limit or (self.is_exact and len(value) != self.limit):
            raise _wrong(place, value, f"{'' if self.is_exact else 'at most '}{self.limit} bytes")
        return value


class Nested(Form):
    """A record in a record."""

    def __init__(self, kind: type[Wire]) -> None:
        self.kind = kind

    def read(self, value: Value, place: str) -> Wire:
        return self.kind.from_value(value)

    def writer(self, *, shallow: bool) -> Writer | None:
        return self.kind.writer(shallow=shallow)


class Either(Form):
    """A record of one of several kinds: a pair of its kind's word and itself."""

    def __init__(self, kinds: Mapping[str, type[Wire]]) -> None:
        self.kinds = dict(kinds)
        self._words = {kind: word for word, kind in kinds.items()}
        self._pair = Each((OneOf(tuple(kinds)), Form()))

    def read(self, value: Value, place: str) -> Wire:
        word, record = self._pair.read(value, place)
        return self.kinds[word].from_value(record)

    def writer(self, *, shallow: bool) -> Writer | None:
        writers = {kind: kind.writer(shallow=shallow) for kind in self._words}
        return lambda held: [self._words[type(held)], writers[type(held)](held)]


class Items(Form):
    """A list, each of the same form."""

    def __init__(self, item: Form, max_items: int) -> None:
        self.item = item
        self.max_items = max_items

    def read(self, value: Value, place: str) -> tuple[Any, ...]:
        read, item = self.item.read, place + "[]"
        return tuple([read(one, item) for one in as_list(value, place, self.max_items)])

    def writer(self, *, shallow: bool) -> Writer | None:
        write = self.item.writer(shallow=shallow)
        if write is None:
            return None if shallow else list
        return lambda held: list(map(write, held))


class Each(Form):
    """A list of so many, each of its own form."""

    def __init__(self, items: Sequence[Form]) -> None:
        self.items = items

    def read(self, value: Value, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(self.items):
            raise RemoteError("malformed", f"{place} is not a list of {len(self.items)}")
        return tuple([form.read(one, f"{place}[]") for form, one in zip(self.items, value, strict=True)])

    def writer(self, *, shallow: bool) -> Writer | None:
        assert all(form.writer(shallow=shallow) is None for form in self.items), "plain values alone"
        return None if shallow else list


class Maybe(Form):
    """What another form takes, or None."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def read(self, value: Value, place: str) -> Any:
        return None if value is None else self.form.read(value, place)

    def writer(self, *, shallow: bool) -> Writer | None:
        write = self.form.writer(shallow=shallow)
        return None if write is None else lambda held: None if held is None else write(held)


class OneOf(Form):
    """A word of few."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def read(self, value: Value, place: str) -> Any:
        word = TEXT.read(value, place)
        if word not in self.words:
            raise RemoteError("malformed", f"{place} is {word[:20]!r}, not one of {', '.join(self.words)}")
        return word


class Member(OneOf):
    """A member of an enum, by its value."""

    def __init__(self, members: type[Enum]) -> None:
        super().__init__([member.value for member in members])
        self.members = members

    def read(self, value: Value, place: str) -> Enum:
        return self.members(super().read(value, place))

    def writer(self, *, shallow: bool) -> Writer | None:
        return attrgetter("value")


def as_map(kind: str, value: Value) -> dict[str, Value]:
    """The value, if it is a map. Raises RemoteError("malformed")."""
    if not isinstance(value, dict):
        raise RemoteError("malformed", f"{kind} is {type(value).__name__}, not a map")
    return value


def lacks(kind: str, name: str) -> RemoteError:
    return RemoteError("malformed", f"{kind} lacks {name}")


def unknown(kind: str, names: Iterable[str]) -> RemoteError:
    return RemoteError("malformed", f"{kind} has unknown fields {', '.join(sorted(names)[:4])[:80]}")


def as_list(value: Value, place: str, max_items: int) -> list[Value]:
    """The value, if it is a list that is not too long. Raises RemoteError("malformed")."""
    if not isinstance(value, list) or len(value) > max_items:
        raise _wrong(place, value, f"a list of at most {max_items}")
    return value


def _wrong(place: str, value: Value, wanted: str) -> RemoteError:
    # A stranger's value is not printed whole: it may be megabytes.
    if isinstance(value, str | bytes | list | tuple | dict):
        found = f"{type(value).__name__} of {len(value)}"
    else:
        found = repr(value)
    return RemoteError("malformed", f"{place} is {found}, not {wanted}")


INTEGER = Integer()
NUMBER = Number()
BOOLEAN = Boolean()
TEXT = Text()
PEER_ID = Text(64)
DIGEST = Octets(32)
SIGNATURE = Octets(64)

Digest: TypeAlias = Annotated[bytes, DIGEST]
StageNumber: TypeAlias = Annotated[StageIndex, Integer(high=1 << 16)]
