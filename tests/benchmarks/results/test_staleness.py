"""Which figures are older than their code, in a repository made for it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results.entry import Command, Entry
from benchmarks.results.record import ROOT, Machine, Record
from benchmarks.results.staleness import NEVER, files_of, stale
from benchmarks.results.table import ENTRIES

ENTRY = Entry(
    name="speed",
    commands=(Command("swarm simulate data/fleet.toml"),),
    read=lambda answers: {},
    measures=("a.one",),
    minutes=1,
)


class Planted:
    """A repository; each of its commits changes files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._git("init", "--quiet")

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            self.write(name, text)
        self._git("add", ".")
        self._git("commit", "--quiet", "--message", " and ".join(files))
        return self._git("rev-parse", "--short", "HEAD")

    def write(self, name: str, text: str) -> None:
        folder, _, stem = name.rpartition("__")
        path = self.root / folder / (f"{stem}.toml" if folder == "data" else f"{stem}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def _git(self, *arguments: str) -> str:
        who = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
        command = ["git", "-C", str(self.root), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def measured_at(commit: str) -> dict[str, Record]:
    record = Record(figures={}, commands=(), commit=commit, date="2026-11-02", machine=Machine(2), seconds=None)
    return {"speed": record}


def test_figures_are_old_when_something_imported_has_changed_since(planted: Planted) -> None:
    planted.commit(a__one="import b.two\nimport json", b__two="def f():\n    from c import three", c__three="x = 1")
    first = planted.commit(d__other="x = 1", data__fleet="peers = 1")
    assert files_of(ENTRY, planted.root) == ["a/one.py", "b/two.py", "c/three.py", "data/fleet.toml"]
    assert stale([ENTRY], measured_at(first), planted.root) == {}
    planted.commit(d__other="x = 2")
    assert stale([ENTRY], measured_at(first), planted.root) == {}, "nobody imports it"
    second = planted.commit(data__fleet="peers = 2")
    (why,) = stale([ENTRY], measured_at(first), planted.root).values()
    assert why.startswith(f"measured at {first}, changed by {second}")
    assert why.endswith("data__fleet")


def test_what_is_imported_within_a_function_counts(planted: Planted) -> None:
    first = planted.commit(a__one="def f():\n    from c import three", c__three="x = 1")
    assert stale([ENTRY], measured_at(first), planted.root) == {}
    planted.commit(c__three="x = 2")
    assert stale([ENTRY], measured_at(first), planted.root).keys() == {"speed"}


def test_what_is_not_committed_counts(planted: Planted) -> None:
    first = planted.commit(a__one="x = 1")
    planted.write("a__one", "x = 2")
    assert stale([ENTRY], measured_at(first), planted.root) == {"speed": "changed, and not committed: M a/one.py"}


def test_what_was_never_measured_or_at_an_unknown_commit_is_old(planted: Planted) -> None:
    planted.commit(a__one="x = 1")
    assert stale([ENTRY], {}, planted.root) == {"speed": NEVER}
    (why,) = stale([ENTRY], measured_at("0123abc"), planted.root).values()
    assert "does not have" in why


def test_every_entry_is_of_modules_that_are_there() -> None:
    for entry in ENTRIES:
        for module in entry.measures:
            of_one = files_of(replace(entry, measures=(module,), commands=()), ROOT)
            path = module.replace(".", "/")
            assert {f"{path}.py", f"{path}/__init__.py"} & set(of_one), f"{entry.name}: {module}"
