"""What a field of a message is changed into: an extreme, an old or another's value, a repeated or a missing one.

By the field's declared form alone, so that most of what is made is well formed, and refused, if at all, for what it
says.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from benchmarks.red_team.records import Kind, Site, get, slots_of
from swarm.core.canonical import Value
from swarm.core.forms import Boolean, Each, Form, Integer, Items, Maybe, Nested, Number, Octets, OneOf, Text
from swarm.core.record import Row

Way: TypeAlias = Literal[
    "extreme", "near", "others", "own_before", "repeated", "missing", "longest", "sibling", "inner"
]
"""`own_before`: what this peer said there before; `others`: what somebody said in such a place. `sibling`: where
digests of records stand, that of another that this peer signs about the same thing. `inner`: one thing within it."""

WAYS: Sequence[Way] = get_args(Way)
MOST_KEPT = 24
SCALE = 16
"""The longest lists and messages of these runs are so much shorter than a program's, which takes seconds for each."""
MOST_ITEMS = (1 << 16) // SCALE
NUMBERS = (0.0, 1e-30, 1e30, 5e-324, 1.7e308, -1.0, 1.0)

SiblingOf = Callable[[bytes, random.Random], bytes | None]
"""The digest of another record beside the one of this digest; None if it is no record of this peer's."""


@dataclass
class Memory:
    """What was said in each field of each kind of record, in the messages that a liar has sent or got."""

    mine: dict[tuple[str, str], deque[Value]] = field(default_factory=dict)
    theirs: dict[tuple[str, str], deque[Value]] = field(default_factory=dict)

    def keep(self, value: Value, found: Sequence[Site], *, is_mine: bool) -> None:
        kept = self.mine if is_mine else self.theirs
        for site in found:
            for wire_name, _, _ in slots_of(site.kind):
                try:
                    held = get(value, site.field(wire_name))
                except (KeyError, IndexError, TypeError):
                    continue
                kept.setdefault((site.kind.__name__, wire_name), deque(maxlen=MOST_KEPT)).append(held)

    def of(self, kind: Kind, wire_name: str, rng: random.Random, *, is_mine: bool) -> Value:
        """One of these; None if there is none."""
        held = (self.mine if is_mine else self.theirs).get((kind.__name__, wire_name))
        return rng.choice(list(held)) if held else None


def ways_of(form: Form) -> tuple[Way, ...]:
    """Those that make sense for what a field may hold."""
    if isinstance(form, Maybe):
        return (*dict.fromkeys(("missing", *ways_of(form.form))),)
    if isinstance(form, Items):
        inner: tuple[Way, ...] = ("sibling",) if isinstance(form.item, Octets) else ("inner",)
        return ("others", "own_before", "repeated", "missing", "longest", *inner)
    if isinstance(form, Integer | Number):
        return ("extreme", "near", "others", "own_before")
    if isinstance(form, Octets):
        return ("extreme", "others", "own_before", "sibling")
    if isinstance(form, Boolean | OneOf):
        return ("extreme",)
    return ("extreme", "others", "own_before")


def changed(
    way: Way,
    form: Form,
    value: Any,
    *,
    kind: Kind,
    wire_name: str,
    memory: Memory,
    sibling: SiblingOf,
    rng: random.Random,
) -> Any:
    """The field's new value; the old one where there is nothing to change it into."""
    if way in ("others", "own_before"):
        found = memory.of(kind, wire_name, rng, is_mine=way == "own_before")
        if isinstance(form, Items) and isinstance(found, list) and isinstance(value, list) and rng.random() < 0.5:
            return [*value, *found][: form.max_items]
        return value if found is None else found
    if isinstance(form, Maybe):
        if way == "missing" or value is None:
            return None
        form = form.form
    if isinstance(form, Items) and isinstance(value, list):
        return _list(way, form, value, sibling, rng)
    if isinstance(form, Octets) and way == "sibling":
        made = sibling(value, rng) if isinstance(value, bytes) else None
        return value if made is None else made
    return _one(way, form, value, rng)


def _one(way: Way, form: Form, value: Any, rng: random.Random) -> Any:
    if isinstance(form, Integer):
        if way == "near" and isinstance(value, int):
            return min(form.high, max(form.low, value + rng.choice((-1, 1, 2))))
        return rng.choice((form.low, form.high, min(form.high, form.low + 1), min(form.high, 1 << 20)))
    if isinstance(form, Number):
        near = way == "near" and isinstance(value, float)
        return value * rng.choice((0.5, 2.0, 1.001)) if near else rng.choice(NUMBERS)
    if isinstance(form, Boolean):
        return not value
    if isinstance(form, OneOf):
        return rng.choice([word for word in form.words if word != value] or [value])
    if isinstance(form, Text):
        return rng.choice(("", "x" * form.max_length, "\u00e9", str(value)[::-1]))
    if isinstance(form, Octets):
        length = form.limit if form.is_exact else rng.randrange(1 + min(form.limit, 64))
        return rng.choice((bytes(length), rng.randbytes(length), b"\xff" * length))
    if isinstance(form, Each) and isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [_one("extreme", form.items[at], one, rng) if at == here else one for here, one in enumerate(value)]
    return value


def _list(way: Way, form: Items, value: list[Any], sibling: SiblingOf, rng: random.Random) -> Value:
    if way == "missing":
        at = rng.randrange(len(value)) if value else 0
        return [] if rng.random() < 0.5 else value[:at] + value[at + 1 :]
    if not value:
        return value
    at = rng.randrange(len(value))
    if way == "repeated":
        return value[: at + 1] + value[at:]
    if way == "longest":
        return _longest(value, min(MOST_ITEMS, form.max_items))
    if way == "sibling":
        made = sibling(value[at], rng)
        if made is None:
            return value[::-1]
        return rng.choice(([*value, made], [made, *value], [made if one == value[at] else one for one in value]))
    if isinstance(form.item, Nested) and isinstance(value[at], list) and issubclass(form.item.kind, Row):
        slots = slots_of(form.item.kind)
        which = rng.randrange(len(slots))
        row = list(value[at])
        row[which] = _one("extreme", slots[which][2], row[which], rng)
        return [*value[:at], row, *value[at + 1 :]]
    return [*value[:at], _one("extreme", form.item, value[at], rng), *value[at + 1 :]]


def _longest(value: list[Any], length: int) -> list[Any]:
    """That long, each item another one where it has a number to tell it by."""
    model = value[-1]
    where = (
        next((at for at, one in enumerate(model) if isinstance(one, int)), None) if isinstance(model, list) else None
    )
    made = list(value)
    number = 1 << 40
    while len(made) < length:
        item = model
        if where is not None:
            item = [*model[:where], number, *model[where + 1 :]]
            number += 1
        made.append(item)
    return made
