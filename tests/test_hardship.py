"""A real peer's machine is in trouble: a wrong clock, a full disk, 30 s of standstill. It says so, and comes back."""

import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.homes import namespaces
from benchmarks.homes.namespaces import Namespaces
from bootstrap.program.ledger import Ledger
from swarm.network.identity_file import load_identity
from tests.peer.owner.small_disks import fill, small_disk, why_not
from tests.process_swarm import ProcessSwarm, Zygote
from tests.verification.histories import end_with_one_history, names_begun, wait_until_it_votes

pytestmark = [pytest.mark.processes, pytest.mark.soak]

ENDLESS = 5000


@pytest.fixture
def disks(tmp_path_factory: pytest.TempPathFactory) -> None:
    reason = why_not(tmp_path_factory.mktemp("disks") / "probe")
    if reason is not None:
        pytest.skip(reason)


def wait_until_said(log: Path, words: str, *, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    pause = threading.Event()
    while words not in log.read_text():
        assert time.monotonic() < give_up_at, f"{log.stem} has not said {words!r} within {timeout_s:.0f} s"
        pause.wait(0.05)


def train_on(swarm: ProcessSwarm, num_versions: int, *, timeout_s: float) -> None:
    swarm.wait_for_more("version", after=len(swarm.events()), count=num_versions, timeout_s=timeout_s)


def until_the_host_keeps_up(swarm: ProcessSwarm, name: str, *, timeout_s: float) -> None:
    """Until the host knows nearly all that the peer has seen certified: it hears of steps in their order."""
    give_up_at = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        begun = len(set(names_begun(swarm.root, name))) // 2  # of its own stage and of the one beside it
        known = max(event["version"] for event in swarm.events() if event["event"] == "version")
        if known + 2 >= begun:
            return
        assert time.monotonic() < give_up_at, f"after {timeout_s:.0f} s the host knows {known} versions of {begun}"
        pause.wait(0.05)


def test_clocks_a_minute_off_are_set_right_by_the_hosts(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=ENDLESS, every=ENDLESS) as swarm:
        swarm.start_host()
        swarm.set_clock("p0a", ahead_s=60.0)
        swarm.set_clock("p1b", ahead_s=-60.0)
        swarm.set_clock("p0b", ahead_s=0.0)
        swarm.start_founders()
        swarm.wait_for("version", version=20)
        for name, words in (("p0a", "60.0 s ahead of"), ("p1b", "60.0 s behind")):
            assert f"this machine's clock is {words} the host's" in (tmp_path / f"{name}.log").read_text()
        swarm.set_clock("p0a", ahead_s=0.0)
        swarm.set_clock("p0b", ahead_s=60.0)
        wait_until_said(tmp_path / "p0b.log", "60.0 s ahead of the host's", timeout_s=30)
        train_on(swarm, 20, timeout_s=60)
        assert not [event for event in swarm.events() if event["event"] == "left"]
        end_with_one_history(swarm)
    assert zygote.leftovers() == []


@pytest.mark.usefixtures("disks")
def test_a_peer_whose_disk_is_full_says_so_leaves_and_is_back_when_there_is_room(
    zygote: Zygote, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "p1b") as disk, ProcessSwarm(zygote, tmp_path, steps=ENDLESS, every=ENDLESS) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=5)
        ballast = fill(disk)
        wait_until_said(tmp_path / "p1b.log", f"the disk of {disk} is full: make room there", timeout_s=30)
        swarm.wait_for("left", stage=1, timeout_s=30)
        train_on(swarm, 5, timeout_s=60)
        assert not zygote.has_ended(swarm.peers["p1b"])
        ballast.unlink()
        swarm.wait_for("joined", stage=1, timeout_s=90)
        wait_until_it_votes(swarm, "p1b", timeout_s=60)
        assert "Traceback" not in (tmp_path / "p1b.log").read_text()
        end_with_one_history(swarm)
    assert zygote.leftovers() == []


@pytest.mark.usefixtures("disks")
def test_a_host_whose_disk_is_full_stands_still_and_takes_the_run_up_again(zygote: Zygote, tmp_path: Path) -> None:
    with small_disk(tmp_path / "host") as disk, ProcessSwarm(zygote, tmp_path, steps=ENDLESS, every=ENDLESS) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=5)
        ballast = fill(disk)
        wait_until_said(tmp_path / "host.log", "make room there; this host stands still", timeout_s=60)
        begun = len(names_begun(tmp_path, "p0a"))
        give_up_at = time.monotonic() + 60
        while len(names_begun(tmp_path, "p0a")) < begun + 10:
            assert time.monotonic() < give_up_at, "the swarm does not go on without its host"
            time.sleep(0.1)
        ballast.unlink()
        until_the_host_keeps_up(swarm, "p0a", timeout_s=90)
        end_with_one_history(swarm)
    assert zygote.leftovers() == []


MICROBATCHES_A_WINDOW = 20
CUT_S = 60.0


def windows_done(swarm: ProcessSwarm) -> dict[int, dict[str, int]]:
    """By version that a window began from: by peer, how many of its microbatches count. From the host's ledger."""
    names = {load_identity(swarm.root / name / "identity.key").peer_id: name for name in swarm.peers}
    ledger = Ledger(swarm.root / "host" / "ledger.sqlite")
    found = {}
    for event in ledger.events("result"):
        facts: Any = event.facts
        found[facts["step"]] = {names[peer]: num_microbatches for peer, num_microbatches, _ in facts["credit"]}
    ledger.close()
    return found


def test_windows_of_others_go_on_whoever_is_killed_stands_still_is_cut_off_or_comes(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Windows of a second or more: what befalls a member does so within one."""
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    windows = {"stages": 1, "founders": 4, "local_steps": 10, "target_tokens": 256, "slow_s": 0.05}
    network = Namespaces(("host", "p0a", "p0b", "p0c", "p0d", "p0e"))
    concerned: dict[str, list[range]] = defaultdict(list)
    with network, ProcessSwarm(zygote, tmp_path, steps=ENDLESS, every=ENDLESS, network=network, **windows) as swarm:

        def version() -> int:
            return max((event["version"] for event in swarm.events() if event["event"] == "version"), default=0)

        def until_back(name: str, since: int) -> None:
            wait_until_it_votes(swarm, name, timeout_s=120)
            concerned[name].append(range(since, version() + 1))

        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=3, timeout_s=240)
        killed_at = version()
        swarm.kill("p0a")
        train_on(swarm, 3, timeout_s=120)
        stopped_at = version()
        os.kill(swarm.peers["p0b"], signal.SIGSTOP)
        try:
            train_on(swarm, 3, timeout_s=120)
        finally:
            os.kill(swarm.peers["p0b"], signal.SIGCONT)
        until_back("p0b", stopped_at)
        swarm.start_peer("p0e", 0)
        wait_until_it_votes(swarm, "p0e", timeout_s=120)
        cut_at = version()
        network.cut(("p0d",))
        time.sleep(CUT_S)
        assert version() >= cut_at + 5, f"{version() - cut_at} rounds in {CUT_S:.0f} s without p0d"
        network.heal()
        until_back("p0d", cut_at)
        swarm.start_peer("p0a", 0)
        until_back("p0a", killed_at)
        until_the_host_keeps_up(swarm, "p0c", timeout_s=60)
        done = windows_done(swarm)
        os.kill(swarm.host, signal.SIGKILL)
        swarm.zygote.exit_code(swarm.host, timeout_s=30)
        begun = len(names_begun(tmp_path, "p0c"))
        swarm.start_host()
        swarm.wait_for("recovered", timeout_s=120)
        train_on(swarm, 2, timeout_s=120)
        assert len(names_begun(tmp_path, "p0c")) > begun
        end_with_one_history(swarm)
    for name in ("p0b", "p0c", "p0d"):  # members from the first to the last
        missed = {
            step: of.get(name, 0)
            for step, of in done.items()
            if of.get(name, 0) < MICROBATCHES_A_WINDOW and not any(step in one for one in concerned[name])
        }
        assert not missed, f"{name} was well and lost windows: {missed}"
    came = min(step for step, of in done.items() if "p0e" in of)
    assert done[came]["p0e"] == MICROBATCHES_A_WINDOW, "who comes begins with a whole window"
    assert zygote.leftovers() == []


@pytest.mark.parametrize("victim", ["p0a", "host"])
def test_who_stood_still_for_half_a_minute_goes_on_unblamed(zygote: Zygote, tmp_path: Path, victim: str) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=ENDLESS, every=ENDLESS) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=5)
        pid = swarm.host if victim == "host" else swarm.peers[victim]
        watched = "p0b"
        begun = len(names_begun(tmp_path, watched))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(30)
        gone_on = len(names_begun(tmp_path, watched)) - begun
        os.kill(pid, signal.SIGCONT)
        assert gone_on >= 5, f"in 30 s without {victim} the others began {gone_on} rounds"
        if victim != "host":
            wait_until_it_votes(swarm, victim, timeout_s=60)
        until_the_host_keeps_up(swarm, watched, timeout_s=60)
        end_with_one_history(swarm)
    assert zygote.leftovers() == []
