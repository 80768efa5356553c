"""A host is told what its swarm is worth, and asked before a run that is worth nothing."""

import sys
from pathlib import Path
from typing import Any

import click
import pytest

from bootstrap.owner.worth import ask_whether_to_start
from bootstrap.state.run_folder import RunFolder
from swarm.cli import ExitCode, run
from swarm.core.settings import RunSettings
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from swarm.question import DECLINED

BAD = ""
"""The manifest's own defaults: a small model, on home lines."""


def _settings(text: str) -> RunSettings:
    manifest = parse_manifest(text, Path("run.toml"))
    return freeze(manifest, assumed_data(manifest), ())


class Terminal:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
        """`answer`: None where nobody sits before it."""
        monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
        monkeypatch.setattr(click, "confirm", self._confirm)
        self._answer = answer
        self.asked = 0
        self.shown: list[dict[str, Any]] = []

    def _confirm(self, text: str) -> bool:
        self.asked += 1
        assert self._answer is not None
        return self._answer


def test_a_bad_run_starts_when_its_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, True)
    ask_whether_to_start(_settings(BAD), terminal.shown.append, anyway=False)
    assert terminal.asked == 1
    (said,) = terminal.shown
    assert said["verdict"].startswith("SLOWER than one such machine alone")
    assert said["times_alone"] < 1


def test_a_bad_run_does_not_start_when_its_host_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, False)
    with pytest.raises(click.exceptions.Exit) as left:
        ask_whether_to_start(_settings(BAD), terminal.shown.append, anyway=False)
    assert left.value.exit_code == DECLINED


def test_nobody_is_asked_where_the_answer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, True)
    ask_whether_to_start(_settings(BAD), terminal.shown.append, anyway=True)
    good = _settings('[model]\npreset = "small"\n[averaging]\ndelay = 1\n[batch]\ntarget_tokens = 4194304\n')
    ask_whether_to_start(good, terminal.shown.append, anyway=False)
    assert terminal.asked == 0
    assert terminal.shown[1]["verdict"].startswith("faster than one such machine alone by ")


def test_a_script_that_cannot_be_asked_is_told_to_say_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Terminal(monkeypatch, None)
    (tmp_path / "run.toml").write_text(BAD)
    assert run(["host", str(tmp_path / "run.toml"), "--listen", "127.0.0.1:0"]) is ExitCode.BAD_INPUT
    assert "give --yes to start such a run" in capsys.readouterr().err
    assert not RunFolder(tmp_path / "run").root.exists()
