"""All of a run's peers, or of a stage's, are gone; when they are back the run goes on by itself, from what they hold.

Each row of the table is a run of real processes: how many replicas a stage has, who goes and how, before the host's
first checkpoint or after it, back soon or after all leases have ended, each with its folder or one without.
"""

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from benchmarks.homes.disks import results_on
from bootstrap.state.run_folder import RunFolder
from swarm.checkpoint.archive import checkpoints, read_checkpoint
from tests.branches import Branches, breaches_on_disk, common_versions, data_order, steps_lost
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes

Departure = Literal[
    "all-leave",
    "all-killed",
    "host-and-all-killed",
    "host-killed-and-all-leave",
    "stage-1-leaves",
    "stage-1-killed",
]
Moment = Literal["before-a-checkpoint", "after-a-checkpoint"]
Return = Literal["back-at-once", "back-after-leases"]
Folders = Literal["same-folders", "one-empty-folder"]

STAGES = 2
PAUSE_S: dict[Return, float] = {"back-at-once": 5.0, "back-after-leases": 10.0}
"""Leases of these runs end after 4 s."""
GOES_ON_WITHIN_S = 30.0
"""From the return of the last to the first new certified step."""
ALL_TAKE_PART_WITHIN_S = 60.0
EMPTIED = "p1a"
"""Who comes back with an empty folder, and so under a new identity, where one does."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    replicas: int
    departure: Departure
    moment: Moment
    back: Return
    folders: Folders

    @property
    def min_replicas(self) -> int:
        return min(2, self.replicas)

    @property
    def gone(self) -> list[str]:
        """The peers that go, by name."""
        stages = (1,) if self.departure.startswith("stage-1") else range(STAGES)
        return [f"p{stage}{letter}" for stage in stages for letter in "abc"[: self.replicas]]

    @property
    def host_goes(self) -> bool:
        return self.departure.startswith("host")

    @property
    def in_good_order(self) -> bool:
        return self.departure.endswith(("leave", "leaves"))

    @property
    def keeps_its_state(self) -> bool:
        """Whether somebody, or the host, still holds each stage's last state."""
        given_to_the_host = self.in_good_order and not self.host_goes
        return self.folders == "same-folders" or self.replicas > 1 or given_to_the_host

    def __str__(self) -> str:
        return f"{self.replicas}-{self.departure}-{self.moment}-{self.back}-{self.folders}"


TABLE = [
    Row(*row)
    for row in itertools.product((1, 2, 3), get_args(Departure), get_args(Moment), get_args(Return), get_args(Folders))
]
HARDEST = Row(2, "host-and-all-killed", "after-a-checkpoint", "back-at-once", "same-folders")
CHOSEN = [
    Row(1, "all-leave", "before-a-checkpoint", "back-at-once", "same-folders"),
    Row(2, "stage-1-leaves", "before-a-checkpoint", "back-at-once", "same-folders"),
    Row(1, "all-leave", "before-a-checkpoint", "back-at-once", "one-empty-folder"),
]
"""Run in every soak."""


def test_the_run_goes_on_when_all_are_killed(zygote: Zygote, tmp_path: Path) -> None:
    come_back(zygote, tmp_path, HARDEST)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", CHOSEN, ids=str)
def test_the_run_goes_on(zygote: Zygote, tmp_path: Path, row: Row) -> None:
    come_back(zygote, tmp_path, row)


@pytest.mark.soak
@pytest.mark.drawn(12)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", [row for row in TABLE if row not in (HARDEST, *CHOSEN)], ids=str)
def test_the_run_goes_on_from_any_row_of_the_table(zygote: Zygote, tmp_path: Path, row: Row) -> None:
    come_back(zygote, tmp_path, row)


def come_back(zygote: Zygote, root: Path, row: Row) -> None:
    """Train, go, come back, and look at all that was written down."""
    swarm = ProcessSwarm(
        zygote,
        root,
        founders=row.replicas,
        min_replicas=row.min_replicas,
        steps=2000,
        every=4 if row.moment == "after-a-checkpoint" else 2000,
        target_tokens=512,
    )
    with swarm:
        swarm.start_host()
        swarm.start_founders()
        if row.moment == "after-a-checkpoint":
            swarm.wait_for("checkpoint")  # the stages are some steps beyond it by then
        else:
            swarm.wait_for("version", version=2)
        _go(swarm, row)
        known = Branches.read(root / "host" / "ledger.sqlite")
        assert not known.breaches(), "the run was wrong before anybody went"
        archived, made = _newest_checkpoint(root), _newest_made(root, swarm.peers)
        threading.Event().wait(PAUSE_S[row.back])
        if row.folders == "one-empty-folder":
            shutil.rmtree(root / EMPTIED)
        num_events = len(swarm.events())
        if row.host_goes:
            swarm.start_host()
        for name in row.gone:
            swarm.start_peer(name, int(name[1]))

        began = time.monotonic()
        back = _wait_for_a_new_step(swarm, known, made, until=began + GOES_ON_WITHIN_S)
        goes_on_s = time.monotonic() - began
        _check_where_it_went_on(row, known, back, archived)
        _check_what_was_said(swarm.events()[num_events:], known, back)
        version = _wait_for_common_snapshots(swarm, above=max(known.highest(), back.starts[-1].version) + 1)
        _kill_all(swarm)
        print(f"{row}: {known.versions()} -> {back.starts}, new step after {goes_on_s:.1f} s, equal at {version}")
        after = Branches.read(root / "host" / "ledger.sqlite")
        assert after.breaches() == []
        assert breaches_on_disk(root, swarm.peers, after, data_order(RunFolder(root / "host"))) == []
        said = {event["event"] for event in swarm.events()}
        assert not {"banned", "quarantined"} & said


def _go(swarm: ProcessSwarm, row: Row) -> None:
    """Those who go do, all at once; until none of them is there any more."""
    if row.in_good_order:
        if row.host_goes:
            os.kill(swarm.host, signal.SIGKILL)
            assert swarm.zygote.exit_code(swarm.host, timeout_s=30) == -signal.SIGKILL
        for name in row.gone:
            swarm.leave(name)
        for name in row.gone:
            swarm.has_left(name)
        return
    pids = [*([swarm.host] if row.host_goes else []), *(swarm.peers[name] for name in row.gone)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        assert swarm.zygote.exit_code(pid, timeout_s=30) == -signal.SIGKILL


def _kill_all(swarm: ProcessSwarm) -> None:
    pids = [pid for pid in (*swarm.peers.values(), swarm.host) if not swarm.zygote.has_ended(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        swarm.zygote.exit_code(pid, timeout_s=30)


def _newest_checkpoint(root: Path) -> int:
    """Version of the host's newest checkpoint; 0 before the first."""
    return max((read_checkpoint(path).version for path in checkpoints(root / "host" / "checkpoints")), default=0)


def _newest_made(root: Path, peers: Collection[str]) -> int:
    """Version that the newest certified result on a peer's disk makes, of which the host may not have heard; 0 if there
    is none."""
    results = [made for name in peers for made in results_on(root / name)]
    return max((int(made.roster.step) + 1 for made in results), default=0)


def _wait_for_a_new_step(swarm: ProcessSwarm, known: Branches, made: int, *, until: float) -> Branches:
    """Until all stages have certified what none of them can have certified before the others went; `made`: the highest
    version that one of them had by then."""
    pause = threading.Event()
    while True:
        found = Branches.read(swarm.root / "host" / "ledger.sqlite")
        is_new = len(found.starts) > len(known.starts)
        # Without a new start the run has only paused; a round that was under way then may have ended since.
        floor = found.starts[-1].version if is_new else max(*known.versions(), made) + 1
        if found.version() > floor:
            return found
        now = f"{found.starts[-1]}, stages at {found.versions()}"
        assert time.monotonic() < until, f"no new step after {GOES_ON_WITHIN_S:.0f} s: {known.versions()}, now {now}"
        assert not swarm.zygote.has_ended(swarm.host), "the host has ended"
        for name, pid in swarm.peers.items():
            assert not swarm.zygote.has_ended(pid), f"{name} has ended"
        pause.wait(0.1)


def _check_where_it_went_on(row: Row, known: Branches, back: Branches, archived: int) -> None:
    """From the newest version that was held."""
    expected = known.version() - 1 if row.keeps_its_state else archived
    begun_again = back.starts[len(known.starts) :]
    to = min((start.to for start in begun_again), default=known.version())
    assert to >= expected, f"it went back to {to}: the stages had {known.versions()}, the newest checkpoint {archived}"
    lost = steps_lost(back, known.results)
    assert all(step >= to for steps in lost.values() for step in steps), f"lost {lost}, though it went back to {to}"
    if not begun_again:
        assert not lost, f"no new start, and {lost} are lost"


def _check_what_was_said(events: list[dict[str, Any]], known: Branches, back: Branches) -> None:
    """The host has told of each new start, and of what was lost with it."""
    said = [(event["to"], event["version"]) for event in events if event["event"] == "continued"]
    begun_again = [(start.to, start.version) for start in back.starts[len(known.starts) :]]
    assert said == begun_again, "the host says other than its ledger"
    for event in events:
        if event["event"] == "continued":
            assert event["from"] >= event["to"], event
            assert event["version"] >= event["to"], event


def _wait_for_common_snapshots(swarm: ProcessSwarm, *, above: int) -> list[int]:
    """Until in each stage all replicas have a snapshot of one version above this; those versions by stage."""
    until, pause = time.monotonic() + ALL_TAKE_PART_WITHIN_S, threading.Event()
    stages = [[name for name in swarm.peers if int(name[1]) == stage] for stage in range(STAGES)]
    while not all(common := common_versions(swarm.root, stages, above=above)):
        assert time.monotonic() < until, f"not all replicas of each stage have one state above version {above}"
        pause.wait(0.1)
    return common


def test_the_table_has_every_row_once_and_names_that_tell() -> None:
    assert len(set(map(str, TABLE))) == len(TABLE) == 3 * 6 * 2 * 2 * 2
    assert {HARDEST, *CHOSEN} <= set(TABLE)
