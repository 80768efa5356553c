"""Which figures are older than the code they are of."""

import hashlib
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.results.entry import Entry
from benchmarks.results.reach import Reach, Source, Sources, digest
from benchmarks.results.record import Record

NEVER = "never measured"


def stale(entries: Iterable[Entry], records: Mapping[str, Record], root: Path) -> dict[str, str]:
    """By name, why the figures are old: other commands, or other code than that which was measured."""
    found, sources = {}, Sources(root)
    for entry in entries:
        why = _why(entry, records.get(entry.name), sources)
        if why is not None:
            found[entry.name] = why
    return found


def _why(entry: Entry, record: Record | None, sources: Sources) -> str | None:
    if record is None:
        return NEVER
    if record.commands != entry.lines_given:
        return f"measured at {record.commit} with other commands"
    code = Code(entry, sources)
    if record.code == code.digest():
        return None
    if git(sources.root, "rev-parse", "--quiet", "--verify", f"{record.commit}^{{commit}}") is None:
        return f"measured at {record.commit}, which this repository does not have, and other code now"
    changed = next(code.changed_since(record.commit), None if record.code is None else "what it imports")
    return None if changed is None else f"measured at {record.commit}, changed since: {changed}"


class Code:
    """What an entry's figures are of: definitions by their files, and files that commands name."""

    def __init__(self, entry: Entry, sources: Sources) -> None:
        self._sources, self._root = sources, sources.root
        self._definitions = Reach(entry.measures, sources).definitions()
        words = [word for command in entry.commands for word in shlex.split(command.line)]
        self._named = sorted({self._root / word for word in words if "/" in word and (self._root / word).is_file()})

    def files(self) -> list[str]:
        """Relative to the root."""
        return sorted({path.relative_to(self._root).as_posix() for path in (*self._definitions, *self._named)})

    def digest(self) -> str:
        """Another one when any of it is another, whichever commit it is of."""
        named = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self._named]
        return hashlib.sha256(" ".join([digest(self._definitions, self._sources), *named]).encode()).hexdigest()[:16]

    def changed_since(self, commit: str) -> Iterator[str]:
        """Definitions, as `path: name`, and files of other content than at the commit, also if not committed."""
        differing = set((git(self._root, "diff", "--name-only", "--no-renames", commit, "--") or "").splitlines())
        yield from (name for path in self._named if (name := path.relative_to(self._root).as_posix()) in differing)
        for path, names in sorted(self._definitions.items()):
            where = path.relative_to(self._root).as_posix()
            if where in differing:
                before = Source.of(git(self._root, "show", f"{commit}:{where}") or "")
                now = self._sources.at(path)
                yield from (f"{where}: {one}" for one in sorted(names) if before.texts.get(one) != now.texts.get(one))


def uncommitted(files: Iterable[str], root: Path) -> str | None:
    """Which of the files differ from the last commit's; None if none does."""
    found = git(root, "status", "--porcelain", "--", *files)
    return f"changed, and not committed: {' '.join(found.split())}" if found else None


def git(root: Path, *arguments: str) -> str | None:
    """What git answers; None if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
