"""Every declared record of the program, and where records stand in a message's value.

A record that is declared tomorrow is found and changed as those of today: nothing here names one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, TypeAlias

from peer.round.mail import fragments
from swarm import host_protocol
from swarm.checkpoint import record as checkpoint_record
from swarm.core.audit import chance, ticket
from swarm.core.canonical import Value
from swarm.core.directory import posting
from swarm.core.forms import Each, Either, Form, Items, Maybe, Nested
from swarm.core.layout import Slot, layout_of
from swarm.core.record import Record, Row, Signed, SignedOnce, SignedValue
from swarm.core.round import ballots, basis, contribution, words
from swarm.core.state import stage_chain
from swarm.data import pieces
from swarm.identity.signed_record import SignedRecord
from swarm.network.bulk import direct
from swarm.network.directory import dial_back
from swarm.network.punch import puncher, seen
from verification.audit import owed, probation, verdicts
from verification.kinds import equivocation
from verification.pipeline import headers
from verification.replay import evidence_file
from verification.round import papers
from verification.state import anchor, past, state_statement

Kind: TypeAlias = type[Any]
"""A record's class."""

PACKAGES = ("swarm.", "verification.", "peer.")
HOLDING = (
    *(ballots, basis, checkpoint_record, contribution, direct, dial_back, equivocation, fragments, headers),
    *(host_protocol, owed, papers, pieces, probation, stage_chain, state_statement, ticket, words),
    *(verdicts, anchor, chance, seen, puncher, posting, evidence_file, past),
)
"""Modules with records, which are loaded by this. A test looks for others."""
BASES = frozenset({Signed, SignedOnce, SignedRecord, SignedValue, Record, Row})


@cache
def declared() -> tuple[Kind, ...]:
    """All records that go over the wire or under a signature, by name."""
    kinds = {kind for base in (Record, Row) for kind in _below(base)} - BASES
    whole = [kind for kind in kinds if is_dataclass(kind) and not kind.__name__.startswith("_")]
    ours = [kind for kind in whole if kind.__module__.startswith(PACKAGES)]
    return tuple(sorted(ours, key=lambda kind: (kind.__name__, kind.__module__)))


def _below(kind: Kind) -> Iterator[Kind]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def slots_of(kind: Kind) -> Sequence[Slot]:
    """Of every field: its name on the wire, its attribute, its form; what is signed first."""
    return layout_of(kind).slots


def is_under_value(kind: Kind, wire_name: str) -> bool:
    """Whether the field stands in the signed value, and not beside it."""
    return issubclass(kind, SignedValue) and wire_name in {name for name, _, _ in layout_of(kind, "signed").slots}


Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Site:
    """A record in a message: where it stands, and of what kind it is."""

    path: Path
    kind: Kind

    def field(self, wire_name: str) -> Path:
        """Where one of its fields stands."""
        if issubclass(self.kind, Row):
            return (*self.path, [name for name, _, _ in slots_of(self.kind)].index(wire_name))
        return (*self.path, "value", wire_name) if is_under_value(self.kind, wire_name) else (*self.path, wire_name)


def sites(value: Value) -> list[Site]:
    """All records in a message, those around others first."""
    return list(_sites(value, ()))


def get(value: Value, path: Path) -> Any:
    found: Any = value
    for key in path:
        found = found[key]
    return found


def put(value: Any, path: Path, new: Value) -> None:
    """In place."""
    get(value, path[:-1])[path[-1]] = new


def _sites(value: Value, path: Path) -> Iterator[Site]:
    if isinstance(value, dict):
        kind = _kind_of(value)
        if kind is not None:
            yield from _within(value, path, kind)
            return
        for key in sorted(value):
            row = _rows().get(key)
            if row is not None and isinstance(value[key], list):
                yield from _within(value[key], (*path, key), row)
            else:
                yield from _sites(value[key], (*path, key))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            if isinstance(one, dict | list):
                yield from _sites(one, (*path, at))


def _within(value: Any, path: Path, kind: Kind) -> Iterator[Site]:
    """The record itself, and those that its fields say it holds."""
    site = Site(path, kind)
    yield site
    for wire_name, _, form in slots_of(kind):
        where = site.field(wire_name)
        try:
            held = get(value, where[len(path) :])
        except (KeyError, IndexError, TypeError):
            continue
        yield from _held(held, where, form)


def _held(value: Any, path: Path, form: Form) -> Iterator[Site]:
    if value is None:
        return
    if isinstance(form, Maybe):
        yield from _held(value, path, form.form)
    elif isinstance(form, Nested):
        if hasattr(form.kind, "KIND"):
            yield from _within(value, path, form.kind)
    elif isinstance(form, Either) and isinstance(value, list) and value and value[0] in form.kinds:
        yield from _held(value[1], (*path, 1), Nested(form.kinds[value[0]]))
    elif isinstance(form, Items) and isinstance(value, list):
        for at, one in enumerate(value):
            yield from _held(one, (*path, at), form.item)
    elif isinstance(form, Each) and isinstance(value, list):
        for at, (one, each) in enumerate(zip(value, form.items, strict=False)):
            yield from _held(one, (*path, at), each)


Shape: TypeAlias = tuple[frozenset[str], frozenset[str] | None]


@cache
def _by_shape() -> dict[Shape, Kind]:
    """By the names of its fields, and of those under `value`; of several alike the first by name."""
    found: dict[Shape, Kind] = {}
    for kind in declared():
        if issubclass(kind, Row):
            continue
        names = frozenset(name for name, _, _ in slots_of(kind))
        if issubclass(kind, SignedValue):
            signed = frozenset(name for name, _, _ in layout_of(kind, "signed").slots)
            found.setdefault((names - signed | {"value"}, signed), kind)
        else:
            found.setdefault((names, None), kind)
    return found


@cache
def _rows() -> dict[str, Kind]:
    """Records without names of their own fields, by what they are called in a message."""
    return {kind.KIND: kind for kind in declared() if issubclass(kind, Row)}


def _kind_of(value: dict[str, Value]) -> Kind | None:
    inner = value.get("value")
    names = frozenset(value)
    if isinstance(inner, dict):
        kind = _by_shape().get((names, frozenset(inner)))
        if kind is not None:
            return kind
    return _by_shape().get((names, None))
