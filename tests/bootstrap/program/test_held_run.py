"""One host a folder: the second is refused with the first's process, and nothing is left when a host ends."""

import os
from pathlib import Path

import pytest

from bootstrap.program.held_run import LOCK, HeldRun, is_held
from swarm.cli import ExitCode, run
from swarm.core.errors import SettingsError
from swarm.manifest.file import Manifest


def test_a_folder_is_held_while_a_host_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not is_held(folder)
    with HeldRun(folder):
        assert is_held(folder)
        with pytest.raises(SettingsError, match=rf"another `swarm host` \(process {os.getpid()}\)"), HeldRun(folder):
            pass
        assert is_held(folder)
    assert not is_held(folder)
    with HeldRun(folder):
        assert is_held(folder)


def test_a_lock_that_a_full_disk_left_empty_holds_all_the_same(tmp_path: Path) -> None:
    with HeldRun(tmp_path):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(SettingsError, match="process unknown"), HeldRun(tmp_path):
            pass


def test_a_second_host_is_refused_before_it_prepares_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.write(tmp_path / "run.toml", data={"max_text_mb": 1})
    with HeldRun(tmp_path / "run"):
        assert run(["host", str(manifest.path), "--yes", "--listen", "127.0.0.1:0"]) is ExitCode.BAD_INPUT
    assert f"process {os.getpid()}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cannot be written .*; choose another folder"), HeldRun(tmp_path / "file"):
        pass
