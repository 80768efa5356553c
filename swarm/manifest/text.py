"""A manifest's tables written as TOML, for scripts that make manifests."""

import json
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from swarm.core.errors import SettingsError


def manifest_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of tables of fields. Raises SettingsError for a value that TOML has no form for."""
    lines = []
    for table, fields in tables.items():
        lines.append(f"[{_key(table)}]")
        lines += [field_line(table, name, value) for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def field_line(table: str, name: str, value: Any) -> str:
    """A field of the table. Raises SettingsError for a value that TOML has no form for."""
    return f"{_key(name)} = {_toml(f'{table}.{name}', value)}"


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _toml(where: str, value: Any) -> str:
    if isinstance(value, Mapping):
        entries = (f"{_key(name)} = {_toml(f'{where}.{name}', item)}" for name, item in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(where, item) for item in value) + "]"
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-")
    if isinstance(value, str | PathLike):
        value = fspath(value)
        return json.dumps(value).replace("\x7f", "\\u007f")
    raise SettingsError(
        f"{where} is a {type(value).__name__}; give text, a path, a number, true or false, a list or a table"
    )
