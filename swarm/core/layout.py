"""The layout of a record on the wire, as the annotations of its class's fields say it.

An `int` is an integer from 0 to 2^63 - 1, a `str` text of at most 256 characters, a `PeerId` of at most 64, a `Literal`
one of its words, `X | None` also None, another record that record. Where the type says too little, `Annotated` says the
rest: a form, or a mark.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, TypeAlias, Union, get_args, get_origin, get_type_hints

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.forms import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    PEER_ID,
    TEXT,
    Each,
    Form,
    Items,
    Maybe,
    Member,
    Nested,
    OneOf,
    Wire,
    Writer,
    lacks,
    unknown,
)
from swarm.core.ids import PeerId


@dataclass(frozen=True)
class AtMost:
    """Marks a tuple: so many items."""

    num_items: int


@dataclass(frozen=True)
class Named:
    """Marks a field that has another name on the wire."""

    name: str


@dataclass(frozen=True)
class Beside:
    """Marks a field of a `SignedValue` that stands beside what is signed."""


Part = Literal["whole", "signed", "beside"]
"""Which of a record's fields: all, those that are signed, or those that stand beside."""


Slot: TypeAlias = tuple[str, str, Form]
"""Name on the wire, attribute, form."""


class Layout:
    """How fields are read and written; made once for each class."""

    def __init__(self, kind: str, slots: Sequence[Slot]) -> None:
        self._kind = kind
        self.slots = tuple(slots)
        self._names = [name for name, _, _ in slots]
        self._get = _getter([attribute for _, attribute, _ in slots])
        self._readers = [(name, attribute, form.read, f"{kind}.{name}") for name, attribute, form in slots]
        self._writers = {shallow: _writers(slots, shallow=shallow) for shallow in (False, True)}

    def read(self, value: Mapping[str, Value]) -> dict[str, Any]:
        """The attributes. Raises RemoteError("malformed")."""
        made = {}
        for name, attribute, read, place in self._readers:
            if name not in value:
                raise lacks(self._kind, name)
            made[attribute] = read(value[name], place)
        if len(value) != len(made):
            raise unknown(self._kind, set(value) - set(self._names))
        return made

    def read_row(self, value: Value) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(self._readers):
            raise RemoteError("malformed", f"{self._kind} is not a list of {len(self._readers)}")
        return [read(one, place) for (_, _, read, place), one in zip(self._readers, value, strict=True)]

    def write(self, record: object, *, shallow: bool = False) -> dict[str, Value]:
        """Values by their names; `shallow`: with the large records in it packed."""
        made = dict(zip(self._names, self._get(record), strict=True))
        for at, write in self._writers[shallow]:
            made[self._names[at]] = write(made[self._names[at]])
        return made

    def row_writer(self, *, shallow: bool) -> Writer:
        get, writers = self._get, self._writers[shallow]
        if not writers:
            return get if shallow else lambda record: list(get(record))

        def write(record: object) -> list[Value]:
            made = list(get(record))
            for at, write_one in writers:
                made[at] = write_one(made[at])
            return made

        return write


@cache
def layout_of(kind: type[Any], part: Part = "whole") -> Layout:
    hints = get_type_hints(kind, include_extras=True)
    signed: list[Slot] = []
    beside: list[Slot] = []
    for name in [one.name for one in fields(kind)]:
        marks = get_args(hints[name])[1:] if get_origin(hints[name]) is Annotated else ()
        wire_name = next((mark.name for mark in marks if isinstance(mark, Named)), name)
        slots = beside if any(isinstance(mark, Beside) for mark in marks) else signed
        slots.append((wire_name, name, form_of(hints[name])))
    return Layout(kind.KIND, {"whole": [*signed, *beside], "signed": signed, "beside": beside}[part])


def form_of(hint: Any) -> Form:
    """The form that an annotation asks for. Raises TypeError if it says too little."""
    marks: Sequence[Any] = ()
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
    for mark in marks:
        if isinstance(mark, Form):
            return mark
    args = get_args(hint)
    if hint in _BY_TYPE:
        return _BY_TYPE[hint]
    if isinstance(hint, NewType):
        return form_of(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, Wire):
        return Nested(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Member(hint)
    origin, bounds = get_origin(hint), [mark.num_items for mark in marks if isinstance(mark, AtMost)]
    if origin is Literal:
        return OneOf(args)
    if origin in (Union, UnionType) and len(args) == 2 and args[1] is NoneType:
        return Maybe(form_of(args[0]))
    if origin is tuple and args[-1] is Ellipsis and bounds:
        return Items(form_of(args[0]), bounds[0])
    if origin is tuple and args[-1] is not Ellipsis:
        return Each([form_of(arg) for arg in args])
    raise TypeError(f"{hint} says too little of what a stranger may send: annotate it with a form or a bound")


def _writers(slots: Sequence[Slot], *, shallow: bool) -> list[tuple[int, Writer]]:
    """Of the slots whose values are not what is held."""
    found = [(at, form.writer(shallow=shallow)) for at, (_, _, form) in enumerate(slots)]
    return [(at, write) for at, write in found if write is not None]


def _getter(attributes: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    if len(attributes) > 1:
        return attrgetter(*attributes)
    return lambda record: tuple(attrgetter(name)(record) for name in attributes)


_BY_TYPE: dict[Any, Form] = {int: INTEGER, float: NUMBER, bool: BOOLEAN, str: TEXT, PeerId: PEER_ID}
