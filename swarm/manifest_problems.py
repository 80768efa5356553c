"""This is where what pydantic finds wrong becomes sentences: the field, its value, and what to do about it."""

import difflib
import json
from typing import Any

from pydantic import BaseModel, ValidationError

MAX_PROBLEMS = 10
_MAX_VALUE_CHARACTERS = 60
_TYPE_NAMES = {
    bool: "a truth value",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}
_EXPECTED = {
    "model_type": "a table",
    "tuple_type": "a list",
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
}
"""What to give instead, by pydantic's type of error, where its own words are Python's."""


def describe(error: ValidationError, table: type[BaseModel]) -> str:
    """One line for each field in trouble, the first MAX_PROBLEMS of them."""
    lines: dict[str, str] = {}
    problems: list[Any] = error.errors(include_url=False)
    for problem in problems:
        path, owner = _field_path(problem["loc"], table)
        if problem["type"] == "inconsistent":
            path = (*path, problem["ctx"]["field"])
            line = f"{'.'.join(path)} = {show(problem['ctx']['value'])} {problem['ctx']['message']}"
        elif problem["type"] == "extra_forbidden":
            path = (*path, str(problem["loc"][-1]))
            line = f"{'.'.join(path)} = {show(problem['input'])} is unknown; {_nearest(path[-1], owner)}"
        else:
            given = problem["input"]
            wrong = f"is {_TYPE_NAMES.get(type(given), type(given).__name__)}"
            if not str(problem["type"]).endswith(("_type", "_parsing", "_from_float")):
                wrong = "cannot be used"
            line = f"{'.'.join(path)} = {show(given)} {wrong}; {_remedy(problem)}{_default(path[-1:], owner)}"
            if problem["type"] == "missing":
                line = f"{'.'.join((*path, str(problem['loc'][-1])))} is missing; give it"
        lines.setdefault(".".join(path), line)
    found = list(lines.values())
    more = [f"and {len(found) - MAX_PROBLEMS} more"] if len(found) > MAX_PROBLEMS else []
    return "\n".join(found[:MAX_PROBLEMS] + more)


def show(value: object) -> str:
    """A value as TOML writes it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def _field_path(location: tuple[int | str, ...], table: type[BaseModel]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """The part of pydantic's location that is in the file, and the table it ends in."""
    path: list[str] = []
    owner = table
    for part in location:
        if isinstance(part, int):
            if path:
                path[-1] += f"[{part}]"
            continue
        field = owner.model_fields.get(part)
        if field is None:
            break  # an unknown key, or pydantic's name for a member of a union
        path.append(part)
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            # Below a plain field only indices belong to the file.
            path[-1] += "".join(f"[{index}]" for index in location[len(path) :] if isinstance(index, int))
            break
        owner = field.annotation
    return tuple(path), owner


def _remedy(problem: Any) -> str:
    """pydantic's message ("Input should be ...") as what to give instead."""
    if problem["type"] == "string_pattern_mismatch":
        return f"give text that matches {problem['ctx']['pattern']}"
    if problem["type"] in _EXPECTED:
        return f"give {_EXPECTED[problem['type']]}"
    expected = str(problem["msg"]).removeprefix("Input should be ")
    if expected.startswith(("greater", "less")):
        return f"give a number {expected}"
    return f"give another ({expected})" if expected == problem["msg"] else f"give {expected}"


def _nearest(name: str, owner: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name, owner.model_fields, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"remove it, or use one of {', '.join(owner.model_fields)}"


def _default(name: tuple[str, ...], owner: type[BaseModel]) -> str:
    field = owner.model_fields.get(name[0]) if name else None
    if field is None or field.default is None or field.is_required() or field.default_factory is not None:
        return ""
    return f" (the default is {show(field.default)})"
