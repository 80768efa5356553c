"""A real daemon in a real run, as its owner sees it: useful, paused within a microbatch, left in order."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer.program.state_folder import StateFolder
from swarm.network.services.daemon_client import daemon_client
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes

IN_FLIGHT = 2  # limits.max_in_flight of the manifest
UP_S = 60.0
FOUND_S = 30.0
BACK_S = 90.0


def ask(zygote: Zygote, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "swarm", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(zygote.runtime)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return done.stdout


def status_of(zygote: Zygote, folder: Path) -> dict[str, Any]:
    """With what is told of its one peer."""
    told: dict[str, Any] = json.loads(ask(zygote, "status", "--json", "--dir", str(folder)))
    (peer,) = told["peers"]
    return told | peer


def status_once(zygote: Zygote, folder: Path, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first of which this holds: on a busy machine a peer hears of the steps later than the host."""
    give_up_at = time.monotonic() + UP_S
    while not holds(told := status_of(zygote, folder)):
        assert time.monotonic() < give_up_at, told
    return told


def has_credit_and_work(told: dict[str, Any]) -> bool:
    """Of the last step too: in each the other replica may have been the quicker."""
    return bool(told["credit"]["tokens"] and told["work"]["last_step_tokens"])


def test_an_owner_sees_its_work_pauses_it_and_leaves(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=2000, every=2000, founders=2) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=4)
        folder = tmp_path / "p1a"
        told = status_once(zygote, folder, has_credit_and_work)
        assert told["state"] == "working"
        assert told["reason"] == ""
        assert told["place"]["standing"] == "member"
        assert told["work"]["certified_microbatches"] > 0
        assert told["work"]["last_step_tokens"] <= told["work"]["last_step_all_tokens"]
        assert told["traffic"]["month_bytes"] > 0
        assert 0 < told["credit"]["steps"] <= told["place"]["version"]
        assert 1 <= told["credit"]["rank"] <= told["credit"]["num_ranked"] <= 4
        assert "in the run (host's ledger)" in " ".join(ask(zygote, "status", "--dir", str(folder)).split())

        ask(zygote, "pause", "--dir", str(folder))
        before = status_of(zygote, folder)
        assert before["state"] == "paused"
        swarm.wait_for_more("version", after=len(swarm.events()), count=3, timeout_s=60)
        after = status_of(zygote, folder)
        assert after["work"]["computed"] - before["work"]["computed"] <= IN_FLIGHT
        status_once(zygote, folder, lambda told: told["work"]["last_step_tokens"] == 0)
        ask(zygote, "resume", "--dir", str(folder))

        started = time.monotonic()
        assert "left after" in ask(zygote, "leave", "--dir", str(folder))
        assert time.monotonic() - started < 30
        assert zygote.exit_code(swarm.peers["p1a"], timeout_s=30) == 0
        assert "left after" in ask(zygote, "leave", "--now", "--dir", str(tmp_path / "p1b"))
        assert zygote.exit_code(swarm.peers["p1b"], timeout_s=30) == 130

        os.kill(swarm.peers["p0a"], signal.SIGKILL)
        zygote.exit_code(swarm.peers["p0a"], timeout_s=30)
        gone = subprocess.run(
            [sys.executable, "-m", "swarm", "status", "--dir", str(tmp_path / "p0a")], capture_output=True, check=False
        )
        assert gone.returncode == 4
    assert zygote.leftovers() == []


def test_a_daemon_waits_for_its_seeds_and_finds_them_when_they_come_back(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=2000, every=2000, founders=1) as swarm:
        swarm.start_host()
        address = swarm.wait_for("listening")["addresses"][0]
        os.kill(swarm.host, signal.SIGKILL)
        zygote.exit_code(swarm.host, timeout_s=30)

        folder = tmp_path / "p0a"
        argv = ["join", address, "--yes", "--dir", str(folder), "--threads", "1", "--listen", "127.0.0.1:0"]
        started = time.monotonic()
        swarm.peers["p0a"] = zygote.start(argv, tmp_path / "p0a.log")
        while not (folder / "daemon.lock").exists() or "socket" not in (folder / "daemon.lock").read_text():
            assert time.monotonic() - started < UP_S
            time.sleep(0.02)
        # Of a host that was just killed p2pd may live for a moment.
        refused = f"{address}: connection refused"
        status_once(zygote, folder, lambda told: told["state"] == "looking" and refused in told["reason"])

        swarm.start_host()
        swarm.wait_for("listening")
        back = time.monotonic()
        with daemon_client(StateFolder(folder).running_at()) as client:  # quicker than the command
            while client.status().peers[0].state not in ("joining", "working"):
                assert time.monotonic() - back < FOUND_S
                time.sleep(0.1)
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_a_daemon_whose_p2pd_dies_starts_another_and_works_on(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=20_000, every=20_000, founders=2) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=4)
        daemon, folder = psutil.Process(swarm.peers["p1a"]), tmp_path / "p1a"
        (before,) = [child for child in daemon.children(recursive=True) if child.name() == "p2pd"]
        before.kill()
        killed = time.monotonic()
        while True:
            told = status_of(zygote, folder)
            now = {child.pid for child in daemon.children(recursive=True) if child.name() == "p2pd"} - {before.pid}
            # What is certified is counted from the new start on.
            if now and told["state"] == "working" and (told["work"] or {}).get("certified_microbatches", 0) > 0:
                break
            assert time.monotonic() - killed < BACK_S, told
            time.sleep(0.5)
        print(f"back at work {time.monotonic() - killed:.1f} s after its p2pd was killed")
        assert "p2pd has ended, and is started again" in (tmp_path / "p1a.log").read_text()
    assert zygote.leftovers() == []
