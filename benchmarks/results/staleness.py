"""Which figures are older than the code they are of."""

import ast
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from benchmarks.results.entry import Entry
from benchmarks.results.record import Record

NEVER = "never measured"


def stale(entries: Iterable[Entry], records: Mapping[str, Record], root: Path) -> dict[str, str]:
    """By name, why the figures are old: no code that they are of may have changed since their commit."""
    found = {}
    for entry in entries:
        record = records.get(entry.name)
        why = NEVER if record is None else changed_since(record.commit, files_of(entry, root), root)
        if why is not None:
            found[entry.name] = why
    return found


def files_of(entry: Entry, root: Path) -> list[str]:
    """What its figures are of, relative to the root: modules with all that they import, and files in its commands."""
    modules = {path for module in entry.measures for path in _with_imports(module, root)}
    words = [word for command in entry.commands for word in shlex.split(command.line)]
    named = {word for word in words if "/" in word and (root / word).is_file()}
    return sorted({path.relative_to(root).as_posix() for path in modules} | named)


def changed_since(commit: str, files: Iterable[str], root: Path) -> str | None:
    """The newest change of any of the files since the commit; None if there is none."""
    if git(root, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}") is None:
        return f"measured at {commit}, which this repository does not have"
    newest = git(root, "log", "-1", "--format=%h of %as: %s", f"{commit}..HEAD", "--", *files)
    if newest:
        return f"measured at {commit}, changed by {newest}"
    return uncommitted(files, root)


def uncommitted(files: Iterable[str], root: Path) -> str | None:
    """Which of the files differ from the last commit's; None if none does."""
    found = git(root, "status", "--porcelain", "--", *files)
    return f"changed, and not committed: {' '.join(found.split())}" if found else None


def git(root: Path, *arguments: str) -> str | None:
    """What git answers; None if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _with_imports(module: str, root: Path) -> frozenset[Path]:
    """Files of the module and of all that it imports of this repository, also within functions."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for path in _files(name, root):
            if path not in found:
                found.add(path)
                waiting += _imported(path)
    return frozenset(found)


def _files(module: str, root: Path) -> Iterator[Path]:
    """The module's file, and those of the packages that it is in; none for what is no module here."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        at = root.joinpath(*parts[:length])
        yield from (path for path in (at / "__init__.py", at.with_name(f"{at.name}.py")) if path.is_file())


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """Names that may be modules."""
    names = list[str]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)
