"""The manifest that `swarm init` writes: every field, its meaning and its default."""

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from swarm.core.tables import Table, field_types
from swarm.manifest.tables import Example, ManifestTables
from swarm.manifest.text import field_line

COLUMNS = 119
HEAD = """\
# A run of homeswarm. Every field below has its default; delete what you do not change.
# Look at what it needs with `swarm plan run.toml`, then start it with `swarm host run.toml`.
# Relative paths start at this file's folder.
"""


def default_manifest_text(tables: ManifestTables = ManifestTables()) -> str:  # noqa: B008 - frozen
    """TOML that reads as these tables: by default as the empty manifest does."""
    lines = [HEAD]
    for table in fields(tables):
        lines += [f"[{table.name}]", *_field_lines(table.name, vars(tables)[table.name]), ""]
    return "\n".join(lines[:-1]) + "\n"


def _field_lines(name: str, table: Table) -> Iterator[str]:
    given = {field for field, value in vars(table).items() if value != vars(type(table)())[field]}
    for field, kind in field_types(type(table)).items():
        sentence = next(mark for mark in get_args(kind) if isinstance(mark, str))
        yield from textwrap.wrap(sentence, COLUMNS, initial_indent="# ", subsequent_indent="# ")
        value, default = vars(table)[field], vars(type(table)())[field]
        example = next((mark.value for mark in get_args(kind) if isinstance(mark, Example)), None)
        if example is not None and value == default:
            yield f"# {field_line(name, field, example)}"
        else:
            yield ("# " if table.disagreement({*given, field}) else "") + field_line(name, field, value)
