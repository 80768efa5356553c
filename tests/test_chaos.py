"""Runs endure what a seed throws at them; the schedule is the seed's."""

import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos import KINDS, MEMBERS, endure, schedule
from tests.process_swarm import Zygote
from tests.verification.histories import strange_names, unrecorded


def test_a_schedule_follows_from_its_seed_and_nobody_has_two_faults_at_once() -> None:
    for seed in range(20):
        faults = schedule(seed, seconds=300.0, kinds=KINDS)
        assert faults == schedule(seed, seconds=300.0, kinds=KINDS) != schedule(seed + 1, seconds=300.0, kinds=KINDS)
        assert len({fault.kind for fault in faults}) >= len(KINDS) - 1
        cuts = [fault for fault in faults if fault.kind == "cut"]
        for own in (cuts, *([fault for fault in faults if fault.who == (name,)] for name in MEMBERS)):
            single = [fault for fault in own if own is cuts or fault.kind != "cut"]
            assert all(one.until_s <= other.at_s for one, other in pairwise(single)), (seed, single)


def test_a_fork_shows_in_the_vote_logs_and_what_was_in_flight_is_none(tmp_path: Path) -> None:
    log = tmp_path / "p0a" / "runs" / "run" / "voted-p0a.log"
    log.parent.mkdir(parents=True)
    certified = [f"{number:064}" for number in range(4)]
    forked, in_flight = "f" * 64, ["e" * 64, "d" * 64]
    log.write_text("\n".join([*certified, *in_flight]) + "\n")
    assert strange_names(tmp_path, "p0a", certified) == []
    log.write_text("\n".join([*certified[:2], forked, *certified[2:], *in_flight, forked]) + "\n")
    assert strange_names(tmp_path, "p0a", certified) == [forked, forked]


def test_what_the_host_has_not_recorded_yet_is_told_by_process(tmp_path: Path) -> None:
    old, new = "a" * 64, "b" * 64
    for log in (tmp_path / "host" / "voted.log", tmp_path / "p0a" / "runs" / "run" / "voted-p0a.log"):
        log.parent.mkdir(parents=True)
        log.write_text(f"{old}\n{new}\n")
    assert unrecorded(tmp_path, ["p0a", "p0b"], [old]) == {"host": {new}, "p0a": {new}}
    assert unrecorded(tmp_path, ["p0a", "p0b"], [old, new]) == {}


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_endures_two_minutes_of_faults(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    began = time.monotonic()
    outcome = endure(zygote, tmp_path, seed=seed, seconds=75.0, say=print)
    print(f"{time.monotonic() - began:.0f} s; {outcome}")
    assert not outcome.problem, outcome
