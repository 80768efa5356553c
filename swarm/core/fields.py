"""The fields of a message that is no record: a call's request or answer, read one by one."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.forms import (
    BOOLEAN,
    DIGEST,
    INTEGER,
    NUMBER,
    PEER_ID,
    SIGNATURE,
    Integer,
    Octets,
    Text,
    Wire,
    as_list,
    as_map,
    lacks,
    unknown,
)
from swarm.core.ids import PeerId
from swarm.core.record import PackedOnce

T = TypeVar("T")


class Fields:
    """Reads the fields of one message. Each reader raises RemoteError("malformed") naming kind and field."""

    def __init__(self, kind: str, value: Value) -> None:
        self._kind = kind
        self._value = as_map(kind, value)
        self._left = set(self._value)

    @classmethod
    def of_list(cls, kind: str, value: Value, *names: str) -> "Fields":
        """The fields of a message that is sent as a list, without their names. Raises RemoteError("malformed")."""
        if not isinstance(value, list) or len(value) != len(names):
            raise RemoteError("malformed", f"{kind} is not a list of {len(names)}")
        return cls(kind, dict(zip(names, value, strict=True)))

    def integer(self, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
        return _integer(low, high).read(self._take(name), self._place(name))

    def number(self, name: str) -> float:
        """A finite float."""
        return NUMBER.read(self._take(name), self._place(name))

    def boolean(self, name: str) -> bool:
        return BOOLEAN.read(self._take(name), self._place(name))

    def text(self, name: str, *, max_length: int = 256) -> str:
        return _text(max_length).read(self._take(name), self._place(name))

    def peer(self, name: str) -> PeerId:
        return PeerId(PEER_ID.read(self._take(name), self._place(name)))

    def octets(self, name: str, *, length: int | None = None, max_length: int = 1 << 20) -> bytes:
        """Bytes, of exactly `length` if given."""
        return _octets(length, max_length).read(self._take(name), self._place(name))

    def items(self, name: str, read: Callable[[Value], T], *, max_items: int) -> tuple[T, ...]:
        """A list whose every element `read` accepts."""
        return tuple([read(item) for item in as_list(self._take(name), self._place(name), max_items)])

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
            raise unknown(self._kind, self._left)

    def _take(self, name: str) -> Value:
        if name not in self._value:
            raise lacks(self._kind, name)
        self._left.discard(name)
        return self._value[name]

    def _place(self, name: str) -> str:
        return f"{self._kind}.{name}"


@lru_cache(maxsize=256)  # bounds may be a stranger's
def _integer(low: int, high: int) -> Integer:
    return Integer(low=low, high=high)


@lru_cache(maxsize=256)  # bounds may be a stranger's
def _text(max_length: int) -> Text:
    return Text(max_length)


@lru_cache(maxsize=256)  # bounds may be a stranger's
def _octets(length: int | None, max_length: int) -> Octets:
    return Octets(length, max_length=max_length)


def value_or_none(made: Wire | None) -> Value:
    """For a field that `Fields.maybe` reads."""
    return made.to_value() if made is not None else None


def packed_or_none(made: PackedOnce | None) -> Value:
    """As `value_or_none`, for what is large."""
    return made.packed if made is not None else None


def peer_item(value: Value) -> PeerId:
    """Reader of a list element that is a peer id."""
    return PeerId(PEER_ID.read(value, "peer.id"))


def digest_item(value: Value) -> bytes:
    """Reader of a list element that is a digest."""
    return DIGEST.read(value, "digest.value")


def signature_item(value: Value) -> bytes:
    """Reader of a list element that is a signature."""
    return SIGNATURE.read(value, "signature.value")


def integer_item(value: Value) -> int:
    """Reader of a list element that is a count or an id."""
    return INTEGER.read(value, "integer.value")
