"""Tables of settings that a person writes or a stranger sends, read by what each field declares.

A table is a frozen dataclass that derives from `Table`. A field's type is `Annotated` with the bounds of its values,
and, where a person writes it, with the sentence that stands above it in the file.
"""

import difflib
import json
import math
import re
from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from swarm.core.errors import SettingsError

MAX_PROBLEMS = 10
_MAX_VALUE_CHARACTERS = 60
_FOUND = {
    bool: "a truth value",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}
_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    dict: "a table",
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Of a number, or of the length of text and bytes."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def remedy(self, value: Any) -> str | None:
        """What to give instead of a value that is out of bounds; None if it is within."""
        is_number = isinstance(value, int | float)
        size = value if is_number else len(value)
        if self.least is not None and size < self.least:
            broken = f"greater than or equal to {self.least}"
        elif self.most is not None and size > self.most:
            broken = f"less than or equal to {self.most}"
        elif self.above is not None and size <= self.above:
            broken = f"greater than {self.above}"
        elif self.below is not None and size >= self.below:
            broken = f"less than {self.below}"
        else:
            return None
        return f"a number {broken}" if is_number else f"{_WANTED.get(type(value), 'bytes')} of a length {broken}"


@dataclass(frozen=True)
class Matching:
    """Text that matches a pattern from end to end."""

    pattern: str

    def remedy(self, value: str) -> str | None:
        """What to give instead of text that does not match; None if it does."""
        return None if re.fullmatch(self.pattern, value) else f"text that matches {self.pattern}"


@dataclass(frozen=True)
class Amendable:
    """Marks a field that the run key may change while the run goes on (`swarm.manifest.amendment`)."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of fields. Its subclasses are frozen dataclasses."""

    def disagreement(self, given: Collection[str]) -> str | None:
        """Two fields of the table that do not go together: "<field> = <value> <why, and the remedy>", or None.

        `given` names the fields that do not have their default only because they were left out.
        """
        return None


T = TypeVar("T", bound=Table)


def read_table(declared: type[T], value: object) -> T:
    """The table that plain values stand for: lists for tuples, dicts for tables; a field left out has its default.

    Raises SettingsError with a line for each field in trouble, at most MAX_PROBLEMS of them: the field, its value, and
    what to give instead.
    """
    problems: list[str] = []
    made = _read_table(declared, value, "", problems)
    if made is None:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise SettingsError("\n".join(problems[:MAX_PROBLEMS] + more))
    return made


def show(value: object) -> str:
    """A value as TOML writes it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def field_types(declared: type[Table]) -> dict[str, Any]:
    """Type of each field, with its annotations."""
    return get_type_hints(declared, include_extras=True)


class _Unfit(Exception):
    """A value that its field cannot take."""

    def __init__(self, place: str, value: object, *, wanted: str, is_other_type: bool) -> None:
        wrong = f"is {_FOUND.get(type(value), type(value).__name__)}" if is_other_type else "cannot be used"
        super().__init__(f"{place} = {show(value)} {wrong}; give {wanted}")
        self.place = place
        self.wanted = wanted
        self.is_other_type = is_other_type


def _read_table(declared: type[T], value: object, place: str, problems: list[str]) -> T | None:
    """None if there are problems, which are appended; `place` is where the table stands, with a dot behind it."""
    if not isinstance(value, dict):
        problems.append(str(_Unfit(place.removesuffix("."), value, wanted="a table", is_other_type=True)))
        return None
    num_problems = len(problems)
    types = field_types(declared)
    read: dict[str, Any] = {}
    for field in fields(declared):
        path = place + field.name
        if field.name in value:
            try:
                read[field.name] = _read(types[field.name], value[field.name], path, problems)
            except _Unfit as error:
                problems.append(f"{error}{_default(field) if error.place == path else ''}")
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{path} is missing; give it")
    problems += [
        f"{place}{name} = {show(value[name])} is unknown; {_nearest(str(name), types)}"
        for name in value
        if name not in types
    ]
    if len(problems) > num_problems:
        return None
    made = declared(**read)
    disagreement = made.disagreement(value.keys())
    if disagreement is not None:
        problems.append(place + disagreement)
        return None
    return made


def _read(kind: Any, value: Any, place: str, problems: list[str]) -> Any:
    """The value as its type has it. Raises _Unfit; what is wrong with a table's fields is appended to `problems`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        read = _read(arguments[0], value, place, problems)
        for mark in arguments[1:]:
            remedy = mark.remedy(value) if isinstance(mark, Bounds | Matching) else None
            if remedy is not None:
                raise _Unfit(place, value, wanted=remedy, is_other_type=False)
        return read
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            wanted = f"{', '.join(map(repr, arguments[:-1]))} or {arguments[-1]!r}"
            raise _Unfit(place, value, wanted=wanted, is_other_type=False)
        return value
    if origin in (Union, UnionType):
        return _read_union(arguments, value, place, problems)
    if origin is tuple:
        return _read_items(arguments, value, place, problems)
    plain = origin or kind
    if issubclass(plain, Table):
        return _read_table(plain, value, f"{place}.", problems)
    if plain is float and type(value) in (int, float):
        return _finite(value, place)
    if type(value) is not plain:
        raise _Unfit(place, value, wanted=_WANTED.get(plain, plain.__name__), is_other_type=True)
    return value


def _read_union(kinds: tuple[Any, ...], value: Any, place: str, problems: list[str]) -> Any:
    """The first of the kinds that takes the value, or None where that is one of them."""
    if value is None and NoneType in kinds:
        return None
    refusals = []
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _read(kind, value, place, problems)
            except _Unfit as error:
                refusals.append(error)
    wanted = " or ".join(refusal.wanted for refusal in refusals)
    raise _Unfit(place, value, wanted=wanted, is_other_type=all(refusal.is_other_type for refusal in refusals))


def _read_items(kinds: tuple[Any, ...], value: Any, place: str, problems: list[str]) -> tuple[Any, ...]:
    """A list as `tuple[kind, ...]`, or as one of fixed length."""
    if not isinstance(value, list | tuple):
        raise _Unfit(place, value, wanted="a list", is_other_type=True)
    of_each = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(of_each) != len(value):
        raise _Unfit(place, value, wanted=f"a list of {len(of_each)}", is_other_type=False)
    return tuple(
        _read(kind, item, f"{place}[{at}]", problems)
        for at, (kind, item) in enumerate(zip(of_each, value, strict=True))
    )


def _finite(value: float, place: str) -> float:
    try:
        read = float(value)
    except OverflowError:
        read = math.inf
    if not math.isfinite(read):
        raise _Unfit(place, value, wanted="a finite number", is_other_type=False)
    return read


def _default(field: "Field[Any]") -> str:
    return "" if field.default in (MISSING, None) else f" (the default is {show(field.default)})"


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f'did you mean "{near[0]}"?' if near else f"remove it, or use one of {', '.join(names)}"
