"""Which figures are older than their code, in a repository made for it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results.entry import Command, Entry
from benchmarks.results.reach import Reach, Sources
from benchmarks.results.record import ROOT, Machine, Record
from benchmarks.results.staleness import NEVER, Code, stale
from benchmarks.results.table import ENTRIES

ENTRY = Entry(
    name="speed",
    commands=(Command("swarm simulate data/fleet.toml"),),
    read=lambda answers: {},
    measures=("a.one",),
    minutes=1,
    rows=(),
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
        folder, _, stem = name.partition("__")
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


def measured_at(commit: str, code: str | None = None) -> dict[str, Record]:
    commands = ENTRY.lines_given
    return {
        "speed": Record(
            figures={}, commands=commands, commit=commit, date="2026-11-02", machine=Machine(2), seconds=None, code=code
        )
    }


def test_figures_are_old_when_something_reached_has_changed_since(planted: Planted) -> None:
    planted.commit(a__one="from b.two import f\nf()", b__two="def f():\n    from c import three", c__three="x = 1")
    first = planted.commit(d__other="x = 1", data__fleet="peers = 1")
    files = Code(ENTRY, Sources(planted.root)).files()
    assert files == ["a/one.py", "b/two.py", "c/three.py", "data/fleet.toml"]
    assert stale([ENTRY], measured_at(first), planted.root) == {}
    planted.commit(d__other="x = 2")
    assert stale([ENTRY], measured_at(first), planted.root) == {}, "nobody imports it"
    second = planted.commit(data__fleet="peers = 2")
    (why,) = stale([ENTRY], measured_at(first), planted.root).values()
    assert why == f"measured at {first}, changed since: data/fleet.toml"
    planted.commit(c__three="x = 2")
    (why,) = stale([ENTRY], measured_at(second), planted.root).values()
    assert why == f"measured at {second}, changed since: c/three.py: x"


CALLER = "from b.two import C, f\nC\nf()\n"
BEFORE = '''"""What it is."""
import c.three
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c.four import T
LIMIT = 1
OTHER = 2
def f(x: "T" = LIMIT) -> "T":
    """What it does."""
    return x
def g():
    return OTHER
class C:
    field: int
    """What it means."""
@register
def h():
    pass
'''


@pytest.mark.parametrize(
    ("old", "new", "is_stale"),
    [
        ("LIMIT = 1", "LIMIT = 3", True),
        ("return x", "return  (x)", True),
        ("field: int", "field: float", True),
        ("    pass", "    return 1", True),  # it may have been registered
        ("import c.three", "import c.four", True),
        ("OTHER = 2", "OTHER = 3", False),
        ("return OTHER", "return 3", False),
        ("What it does.", "What else it does.", False),
        ("What it means.", "What else it means.", False),
        ("return x", "return x  # why", False),
        ("from c.four import T", "from c.four import U as T", False),
    ],
)
def test_only_what_is_reached_by_its_name_counts_and_no_words(
    planted: Planted, old: str, new: str, is_stale: bool
) -> None:
    files = {"c__three": "import os", "c__four": "print(1)", "data__fleet": ""}
    first = planted.commit(a__one=CALLER, b__two=BEFORE, **files)
    measured = measured_at(first, Code(ENTRY, Sources(planted.root)).digest())
    planted.commit(b__two=BEFORE.replace(old, new))
    assert bool(stale([ENTRY], measured, planted.root)) == is_stale


def test_what_a_package_hands_on_is_reached_through_it(planted: Planted) -> None:
    planted.commit(
        a__one="import b\nfrom c import g\nb.f(g)", b____init__="from b.two import f", b__two="def f(): pass"
    )
    planted.commit(c____init__="def __getattr__(name):\n    from c.three import g\n    return g", c__three="def g(): 1")
    reached = Reach(["a.one"], Sources(planted.root)).definitions()
    assert {path.relative_to(planted.root).as_posix(): names - {"(at import)"} for path, names in reached.items()} == {
        **{"a/one.py": set(), "b/__init__.py": set(), "b/two.py": {"f"}},
        **{"c/__init__.py": {"__getattr__"}, "c/three.py": {"g"}},
    }


def test_figures_of_the_same_code_are_not_old_whatever_became_of_their_commit(planted: Planted) -> None:
    planted.commit(a__one="x = 1", data__fleet="peers = 1")
    code = Code(ENTRY, Sources(planted.root)).digest()
    assert stale([ENTRY], measured_at("0123abc", code), planted.root) == {}
    planted.commit(a__one="x = 2")
    (why,) = stale([ENTRY], measured_at("0123abc", code), planted.root).values()
    assert "does not have" in why


def test_figures_of_other_commands_are_old(planted: Planted) -> None:
    first = planted.commit(a__one="x = 1")
    other = replace(ENTRY, commands=(Command("swarm simulate --seed 1"),))
    assert stale([other], measured_at(first), planted.root) == {"speed": f"measured at {first} with other commands"}


def test_what_is_not_committed_counts(planted: Planted) -> None:
    first = planted.commit(a__one="x = 1")
    planted.write("a__one", "x = 2")
    assert stale([ENTRY], measured_at(first), planted.root) == {
        "speed": f"measured at {first}, changed since: a/one.py: x"
    }


def test_what_was_never_measured_is_old(planted: Planted) -> None:
    planted.commit(a__one="x = 1")
    assert stale([ENTRY], {}, planted.root) == {"speed": NEVER}


def test_every_entry_is_of_modules_that_are_there() -> None:
    sources = Sources(ROOT)
    for entry in ENTRIES:
        assert not [module for module in entry.measures if sources.path(module) is None], entry.name
