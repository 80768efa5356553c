"""What others do with the machine's cores is told apart: the owner's programs, and those of lower priority."""

from pathlib import Path

import pytest

from peer.machine import load
from peer.machine.load import Machine


def readings(monkeypatch: pytest.MonkeyPatch, *values: load._Cpu) -> Machine:
    """A machine whose counters go through these."""
    left = list(values)
    monkeypatch.setattr(load, "_cpu", lambda: left.pop(0))
    monkeypatch.setattr(load.os, "getpriority", lambda which, who: 10)
    made = Machine(Path())
    while left:
        made._look_at_cpu()
    return made


def test_programs_of_lower_priority_are_not_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    # In 100 s: 190 busy, of which this daemon 60 (10 in the kernel); another daemon 40, the owner's programs 90.
    start = load._Cpu(at=0.0, busy_s=0.0, own_s=0.0, own_user_s=0.0, nice_s=0.0)
    stop = load._Cpu(at=100.0, busy_s=190.0, own_s=60.0, own_user_s=50.0, nice_s=90.0)
    seen = readings(monkeypatch, start, stop)
    assert seen.own_cores == pytest.approx(0.6)
    assert seen.others_cores == pytest.approx(1.3)
    assert seen.foreground_cores == pytest.approx(0.9)
