"""What a host prints for the person who started it."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from bootstrap.program.command import _Shown

OVER = {
    "event": "over",
    "invite": "swarm://192.0.2.1:4002/chats#mAEB",
    "checkpoint": "/runs/chats/checkpoints/step-00000040",
    "held_out_loss": {"start": 8.328, "end": 7.911},
}


@pytest.mark.parametrize(("adapters", "what"), [(False, "model"), (True, "adapters")])
def test_at_the_end_it_says_how_what_was_trained_is_taken_home(
    adapters: bool, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _Shown(False)({**OVER, "adapters": adapters})
    said = capsys.readouterr().out
    assert "held-out loss 8.328 to 7.911" in said
    assert f"swarm export /runs/chats/checkpoints {what}" in said
    assert f"swarm pull '{OVER['invite']}' {what}" in said
    assert ("with --base MODEL" in said) == adapters


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_does_not_end_the_host_that_says_something(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        _Shown(as_json)({"event": "disk_full", "reason": "no room"})


def test_what_is_said_before_a_run_begins_ends_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event: dict[str, Any] = {"event": "verdict", "verdict": "SLOWER than one such machine alone, bound by averaging"}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    _Shown(False)(event)
    assert capsys.readouterr().out == "SLOWER than one such machine\nalone, bound by averaging\n"
