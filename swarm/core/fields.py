"""This is where a stranger's value is read field by field: right type, right range, nothing more."""

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from swarm.core.canonical import Packed, Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId

T = TypeVar("T")


class Fields:
    """Reads the fields of one message. Each reader raises RemoteError("malformed") naming kind and field."""

    def __init__(self, kind: str, value: Value) -> None:
        if not isinstance(value, dict):
            raise RemoteError("malformed", f"{kind} is {type(value).__name__}, not a map")
        self._kind = kind
        self._value = value
        self._left = set(value)

    @classmethod
    def of_list(cls, kind: str, value: Value, *names: str) -> "Fields":
        """The fields of a message that is sent as a list, without their names. Raises RemoteError("malformed")."""
        if not isinstance(value, list) or len(value) != len(names):
            raise RemoteError("malformed", f"{kind} is not a list of {len(names)}")
        return cls(kind, dict(zip(names, value, strict=True)))

    def integer(self, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        """A finite float."""
        value = self._take(name)
        if not isinstance(value, float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return value

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, *, max_length: int = 256) -> str:
        value = self._take(name)
        if not isinstance(value, str) or len(value) > max_length:
            raise self._wrong(name, value, f"text of at most {max_length} characters")
        return value

    def peer(self, name: str) -> PeerId:
        return PeerId(self.text(name, max_length=64))

    def octets(self, name: str, *, length: int | None = None, max_length: int = 1 << 20) -> bytes:
        """Bytes, of exactly `length` if given."""
        value = self._take(name)
        limit = max_length if length is None else length
        if not isinstance(value, bytes) or len(value) > limit or (length is not None and len(value) != length):
            raise self._wrong(name, value, f"{'at most ' if length is None else ''}{limit} bytes")
        return value

    def items(self, name: str, read: Callable[[Value], T], *, max_items: int) -> tuple[T, ...]:
        """A list whose every element `read` accepts."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > max_items:
            raise self._wrong(name, value, f"a list of at most {max_items}")
        return tuple(read(item) for item in value)

    def message(self, name: str) -> Value:
        """A nested value, for a reader of its own."""
        return self._take(name)

    def maybe(self, name: str, read: Callable[[Value], T]) -> T | None:
        """A nested value that `read` accepts, or None; an absent field would be another way to write None."""
        value = self._take(name)
        return None if value is None else read(value)

    def optional(self, name: str) -> bool:
        """Whether the field is there and not None; an absent or None field is taken."""
        if self._value.get(name) is None:
            self._left.discard(name)
            return False
        return True

    def done(self) -> None:
        """Nothing else may have been sent."""
        if self._left:
            raise RemoteError("malformed", f"{self._kind} has unknown fields {', '.join(sorted(self._left)[:4])[:80]}")

    def _take(self, name: str) -> Value:
        if name not in self._value:
            raise RemoteError("malformed", f"{self._kind} lacks {name}")
        self._left.discard(name)
        return self._value[name]

    def _wrong(self, name: str, value: Value, wanted: str) -> RemoteError:
        # A stranger's value is not printed whole: it may be megabytes.
        if isinstance(value, str | bytes | list | tuple | dict):
            found = f"{type(value).__name__} of {len(value)}"
        else:
            found = repr(value)
        return RemoteError("malformed", f"{self._kind}.{name} is {found}, not {wanted}")


class Sendable(Protocol):
    """What says itself as a value."""

    def to_value(self) -> Value: ...


def value_or_none(made: Sendable | None) -> Value:
    """For a field that `Fields.maybe` reads."""
    return made.to_value() if made is not None else None


class Packing(Protocol):
    """What says itself as a value that is packed already."""

    @property
    def packed(self) -> Packed: ...


def packed_or_none(made: Packing | None) -> Value:
    """As `value_or_none`, for what is large."""
    return made.packed if made is not None else None


def peer_item(value: Value) -> PeerId:
    """Reader of a list element that is a peer id."""
    return Fields("peer", {"id": value}).peer("id")


def digest_item(value: Value) -> bytes:
    """Reader of a list element that is a digest."""
    return Fields("digest", {"value": value}).octets("value", length=32)


def number_item(value: Value) -> float:
    """Reader of a nested value that is a finite float."""
    return Fields("number", {"value": value}).number("value")


def integer_item(value: Value) -> int:
    """Reader of a list element that is a count or an id."""
    return Fields("integer", {"value": value}).integer("value")


def stage_item(value: Value) -> int:
    """Reader of a nested value that is a stage's number."""
    return Fields("stage", {"value": value}).integer("value", high=1 << 16)
