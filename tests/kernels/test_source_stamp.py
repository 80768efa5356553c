"""What compiled code on disk was made from."""

import importlib
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from numba import config

from kernels import compiled
from kernels import source_stamp as stamps
from kernels.compiled import NotKeptError, only_kept
from kernels.source_stamp import source_stamp

KERNEL = """
from kernels.compiled import compiled
from made_up.sizes import WIDTH

@compiled
def width():
    return WIDTH
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that counts as this project's."""
    monkeypatch.setattr(stamps, "PACKAGES", ("made_up",))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv(
        "NUMBA_CACHE_DIR", config.CACHE_DIR
    )  # a compilation reads it anew when any of numba's has changed
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "sizes.py").write_text("from made_up import units\nWIDTH = 2 * units.UNIT\n")
    (folder / "units.py").write_text("UNIT = 4\n")
    (folder / "kernel.py").write_text(KERNEL)
    return folder


def begun_again(name: str) -> ModuleType:
    """The module as a new process would import it."""
    for known in [known for known in sys.modules if known.partition(".")[0] == "made_up"]:
        del sys.modules[known]
    importlib.invalidate_caches()
    stamps.source_stamp.cache_clear()
    stamps._text.cache_clear()
    return importlib.import_module(name)


def folders_in(kept: Path) -> list[Path]:
    return [folder for folder in (kept / "homeswarm").iterdir() if compiled._is_stamp(folder.name)]


def test_a_kernel_is_built_again_when_what_it_took_from_elsewhere_has_changed(made_up: Path) -> None:
    assert begun_again("made_up.kernel").width() == 8
    kept = begun_again("made_up.kernel")
    assert kept.width() == 8
    assert sum(kept.width.stats.cache_hits.values()) == 1
    (made_up / "units.py").write_text("UNIT = 40\n")
    assert begun_again("made_up.kernel").width() == 80


def test_another_installation_finds_what_was_built(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun_again("made_up.kernel").width() == 8
    other = made_up.parent / "other"
    shutil.copytree(made_up, other / "made_up", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "made_up" / "kernel.py").touch()
    monkeypatch.syspath_prepend(str(other))
    found = begun_again("made_up.kernel")
    assert Path(str(found.__file__)).is_relative_to(other)
    with only_kept():
        assert found.width() == 8


def test_what_nobody_asked_for_in_a_month_is_forgotten_when_something_is_built(made_up: Path) -> None:
    begun_again("made_up.kernel").width()
    (folder,) = folders_in(made_up.parent / "kept")
    notes = folder.with_name("notes")
    notes.mkdir()
    for days, is_there in ((29, True), (31, False)):
        at = time.time() - days * 86400
        os.utime(folder, (at, at))
        os.utime(notes, (at, at))
        compiled._forget_unused()
        assert folder.exists() == is_there
    assert notes.exists()


def test_what_is_asked_for_counts_as_used(made_up: Path) -> None:
    begun_again("made_up.kernel").width()
    (folder,) = folders_in(made_up.parent / "kept")
    os.utime(folder, (0, 0))
    begun_again("made_up.kernel")
    assert folder.stat().st_mtime > time.time() - 60


def test_a_home_that_cannot_be_written_has_it_beside_the_file(
    made_up: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path / "file")
    assert begun_again("made_up.kernel").width() == 8


def test_where_only_kept_code_is_wanted_nothing_is_compiled(made_up: Path) -> None:
    with only_kept(), pytest.raises(NotKeptError):
        begun_again("made_up.kernel").width()
    assert begun_again("made_up.kernel").width() == 8
    with only_kept():
        assert begun_again("made_up.kernel").width() == 8


def test_of_processes_that_need_a_kernel_at_the_same_time_one_compiles_it_and_says_so(made_up: Path) -> None:
    """A machine's daemons are started together: one works, and the others wait for it."""
    lines = [
        "import logging, sys",
        "from made_up.kernel import width",
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')",
        "print('ready', flush=True)",
        "input()",
        "width()",
        "print(sum(width.stats.cache_misses.values()), sum(width.stats.cache_hits.values()))",
    ]
    begin = [sys.executable, "-c", "\n".join(lines)]
    paths = os.pathsep.join([str(made_up.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as ended:
        both = [ended.enter_context(subprocess.Popen(begin, env=environment, **pipes)) for _ in range(2)]
        for one in both:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in both:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        said = sorted(one.communicate(timeout=200)[0].split("\n")[:-1] for one in both)
    assert said[0] == ["0 1"]
    assert said[1][-1] == "1 0"
    assert [line.split(" for ")[0] for line in said[1][:-1]] == ["compiles its kernels"]


def test_the_stamp_is_of_all_modules_that_are_imported_and_of_no_others(made_up: Path) -> None:
    begun_again("made_up.kernel")
    before = source_stamp("made_up.kernel")
    (made_up / "unused.py").write_text("UNIT = 5\n")
    begun_again("made_up.kernel")
    assert source_stamp("made_up.kernel") == before
    (made_up / "units.py").write_text("UNIT = 4  # metres\n")
    begun_again("made_up.kernel")
    assert source_stamp("made_up.kernel") != before


def test_constants_of_other_modules_are_in_the_stamps_of_kernels() -> None:
    for module in ("kernels.clipping", "peer.fleet.flow"):
        names = {name for name in stamps._imported(stamps._text(module) or b"") if stamps._text(name) is not None}
        assert names & {"kernels.norms", "swarm.core.pipeline.wiring"}, module
