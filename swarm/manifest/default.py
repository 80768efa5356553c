"""The manifest that `swarm init` writes: every field, its meaning and its default."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from swarm.core.tables import Table, field_types
from swarm.manifest.tables import Example, ManifestTables
from swarm.manifest.text import field_line

COLUMNS = 119
HEAD = """\
# A run of homeswarm. Every field below has its default; delete what you do not change.
# Look at what it needs with `swarm plan run.toml`, then start it with `swarm host run.toml`.
# Relative paths start at this file's folder.
"""


def default_manifest_text(given: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """TOML that reads as the empty manifest does, but for what is `given` of its tables' fields; None of a field: it is
    left out."""
    tables = ManifestTables()
    lines = [HEAD]
    for table in fields(tables):
        chosen = (given or {}).get(table.name, {})
        lines += [f"[{table.name}]", *_field_lines(table.name, vars(tables)[table.name], chosen), ""]
    return "\n".join(lines[:-1]) + "\n"


def _field_lines(name: str, table: Table, chosen: Mapping[str, Any]) -> Iterator[str]:
    for field, kind in field_types(type(table)).items():
        sentence = next(mark for mark in get_args(kind) if isinstance(mark, str))
        yield from textwrap.wrap(sentence, COLUMNS, initial_indent="# ", subsequent_indent="# ")
        example = next((mark.value for mark in get_args(kind) if isinstance(mark, Example)), None)
        value = chosen.get(field, vars(table)[field] if example is None else None)
        is_left_out = value is None or (field in chosen and chosen[field] is None)
        shown = value if value is not None else example if example is not None else vars(table)[field]
        yield ("# " if is_left_out else "") + field_line(name, field, shown)
