"""What of a run's settings may be changed while it goes on, and what the change makes of them.

Which fields those are says their declaration: `swarm.core.tables.Amendable`. All others are refused by name.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.settings import RunSettings
from swarm.core.tables import Amendable, Table, field_types, read_table, show
from swarm.manifest.model import recut
from swarm.manifest.tables import ManifestTables, ModelTable
from swarm.manifest.value import checked_settings, settings_to_value

MAX_CHANGES_BYTES = 1 << 16
CUT = "model.stage_layers"
_CUT_BY = ("model.stages", CUT)
"""What a person gives instead of the layers' ranges."""

Changes = Mapping[str, Value]
"""New values by field, as "optimizer.total_steps"; none of them is what it was."""


def amendable_fields() -> tuple[str, ...]:
    """Those that are declared to be, in order."""
    return tuple(
        f"{name}.{field}"
        for name, table in _tables_of(RunSettings)
        for field, kind in field_types(table).items()
        if any(isinstance(mark, Amendable) for mark in get_args(kind))
    )


def read_changes(texts: Sequence[str], settings: RunSettings) -> dict[str, Value]:
    """Of lines as `optimizer.total_steps=400`, against the settings in force.

    Raises SettingsError for what cannot be amended, or is no value of its field, or changes nothing.
    """
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(f"--set {text}: give FIELD=VALUE, such as optimizer.total_steps=400")
        _check_amendable(name, value.strip())
        if name in given:
            raise SettingsError(f"--set {name} is given twice; give it once")
        try:
            given[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"--set {text}: {value.strip()!r} is no TOML value: {error}") from error
    cut = {name.partition(".")[2]: given.pop(name) for name in _CUT_BY if name in given}
    if cut:
        table = read_table(ModelTable, cut)
        given[CUT] = [[*layers] for layers in recut(settings.model, table).stage_layers]
    made = amended(settings, given)
    before, after = settings_to_value(settings), settings_to_value(made)
    changes = {name: _at(after, name) for name in sorted(given) if _at(after, name) != _at(before, name)}
    if not changes:
        raise SettingsError("this changes nothing: the run's settings are these already")
    return changes


def amended(settings: RunSettings, changes: Changes) -> RunSettings:
    """The settings with these changes. Raises SettingsError for what cannot be amended or does not agree."""
    value: Any = settings_to_value(settings)
    for name, new in changes.items():
        _check_amendable(name, show(new))
        table, _, field = name.partition(".")
        value[table][field] = new
    if CUT in changes:
        value["initial_state_digests"] = []  # they were of other stages
    return checked_settings(value)


def packed_changes(changes: Changes) -> bytes:
    """As they are signed."""
    return pack(dict(changes))


def unpacked_changes(data: bytes) -> dict[str, Value]:
    """What `packed_changes` packed. Raises RemoteError for anything else that no amendment may change."""
    value = unpack(data, max_bytes=MAX_CHANGES_BYTES)
    if not isinstance(value, dict) or not value or set(value) - {*amendable_fields()}:
        raise RemoteError("malformed", "an amendment changes what cannot be amended, or nothing")
    return value


def told(settings: RunSettings, changes: Changes) -> list[str]:
    """A line for each change, for people: what was, and what is to be."""
    before: Any = settings_to_value(settings)
    lines = []
    for name, new in sorted(changes.items()):
        old = _at(before, name)
        if name == CUT:
            old, new = _counts(old), _counts(new)
        lines.append(f"{name}: {show(old)} -> {show(new)}")
    return lines


def _counts(ranges: Any) -> Value:
    """Layers of each stage."""
    return [stop - start for start, stop in ranges]


def _check_amendable(name: str, value: str) -> None:
    """Raises SettingsError unless the field, as people or programs name it, may be amended."""
    may = {*amendable_fields(), *_CUT_BY}
    if name in may:
        return
    known = [f"{table}.{field}" for table, kind in _tables_of(ManifestTables) for field in field_types(kind)]
    if name in known:
        raise SettingsError(
            f"{name} cannot be amended; end the run and start a new one from its weights with {name} = {value} "
            "(`swarm export`, then model.checkpoint)"
        )
    near = difflib.get_close_matches(name, [*may, *known], n=1)
    advice = f"did you mean {near[0]}?" if near else f"give one of {', '.join(sorted(may))}"
    raise SettingsError(f"{name} is no field of a manifest; {advice}")


def _tables_of(tables: type[Table]) -> list[tuple[str, type[Table]]]:
    kinds = field_types(tables).items()
    return [(name, kind) for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Table)]


def _at(settings: Any, name: str) -> Any:
    """The value of the field, in plain settings."""
    table, _, field = name.partition(".")
    return settings[table][field]
