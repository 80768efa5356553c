"""A daemon in the background is the one that was started, or its starter says why there is none."""

import subprocess
from pathlib import Path
from typing import IO

import pytest

from peer.program.detached import start_detached
from peer.program.state_folder import HeldFolder, StateFolder
from swarm.core.errors import SettingsError


def test_a_folder_that_another_daemon_holds_is_refused_and_what_that_one_said_is_kept(tmp_path: Path) -> None:
    state, said = StateFolder(tmp_path), tmp_path / "detached.out"
    said.write_text("joined stage 0\n")
    with HeldFolder(state) as other:
        other.listens_at(tmp_path / "socket")
        with pytest.raises(SettingsError, match=r"another daemon \(process \d+\) runs there"):
            start_detached(state, ["--version"])
    assert said.read_text() == "joined stage 0\n"


def test_a_daemon_that_another_was_quicker_than_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateFolder(tmp_path)
    (tmp_path / "detached.out").write_text("swarm: of an earlier start\n")

    class Slower:
        """By then this test's process holds the folder."""

        def __init__(self, argv: list[str], *, stdout: IO[bytes], **_: object) -> None:
            self.pid, self._looks = -1, 0
            self.other = HeldFolder(state)
            self.other.listens_at(tmp_path / "socket")
            stdout.write(b"swarm: another daemon runs there\n")

        def poll(self) -> int | None:
            self._looks += 1
            return 2 if self._looks > 1 else None

    monkeypatch.setattr(subprocess, "Popen", Slower)
    with pytest.raises(SettingsError, match=r"^another daemon runs there$"):
        start_detached(state, ["join"])
