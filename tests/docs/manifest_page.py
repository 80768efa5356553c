"""docs/manifest.md: every field of a manifest, of its declaration.

python -m tests.docs.manifest_page > docs/manifest.md
"""

from collections.abc import Iterator
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from swarm.core.tables import Amendable, Bounds, Matching, Table, field_types
from swarm.manifest.tables import Example, ManifestTables
from swarm.manifest.text import field_line

HEAD = """\
# The manifest's fields

`swarm init` writes a manifest with all of them. "May be" is what a value is held to; those marked + may be amended
while the run goes on ([hosting](hosting.md#changing-a-run-that-goes-on)). What a bad value is refused with names its
field and a remedy. Written by `python -m tests.docs.manifest_page`.
"""


def page() -> str:
    tables = ManifestTables()
    return "\n".join(
        [HEAD, *(line for table in fields(tables) for line in _rows(table.name, vars(tables)[table.name]))]
    )


def _rows(name: str, table: Table) -> Iterator[str]:
    yield from (f"## [{name}]", "", "| field | default | may be | meaning |", "|---|---|---|---|")
    for field, kind in field_types(type(table)).items():
        marks = get_args(kind)
        sentence = next(mark for mark in marks if isinstance(mark, str))
        example = next((mark.value for mark in marks if isinstance(mark, Example)), None)
        default = "none" if example is not None else f"`{_shown(name, field, vars(table)[field])}`"
        if example is not None:
            sentence += f" For example `{_shown(name, field, example)}`."
        is_amendable = any(isinstance(mark, Amendable) for mark in marks)
        cells = [f"`{field}`{' +' if is_amendable else ''}", default, _kind(kind), sentence]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _shown(table: str, field: str, value: Any) -> str:
    return field_line(table, field, value).split(" = ", 1)[1]


def _kind(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        bounds = [_within(mark) for mark in marks if isinstance(mark, Bounds | Matching)]
        return ", ".join([_kind(inner), *bounds])
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_kind(one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        return "a list"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(kind, "a table")


def _within(mark: Bounds | Matching) -> str:
    if isinstance(mark, Matching):
        return f"like `{mark.pattern}`"
    said = {"from": mark.least, "above": mark.above, "to": mark.most, "below": mark.below}
    return " ".join(f"{word} {_number(value)}" for word, value in said.items() if value is not None)


def _number(value: float) -> str:
    for less in (0, 1):
        power = 1 << max(0, int(value).bit_length() - 1 + less)
        if value > 1 << 16 and value == power - less:
            return f"2^{power.bit_length() - 1}" + (" - 1" if less else "")
    return f"{value:g}"


if __name__ == "__main__":
    print(page(), end="")
